"""Verified tokens become output up to the first stop token, criterion or the budget, whichever token comes first."""

import pytest
import torch

from hf_dspark.verification.commit import commit, row_stopped

A, B, STOP, C, D = 10, 11, 2, 12, 13


@pytest.mark.parametrize(
    ("tokens", "budget", "kept", "reason"),
    [
        ([A, B, STOP, C, D], 5, [A, B, STOP], "stop"),
        ([A, B, STOP, C, D], 3, [A, B, STOP], "stop"),
        ([A, B, STOP, C, D], 2, [A, B], "length"),
        ([STOP], 1, [STOP], "stop"),
        ([A, B], 2, [A, B], "length"),
        ([A, B], 3, [A, B], None),
        ([A, 3, STOP], 9, [A, 3], "stop"),
    ],
)
def test_the_first_stop_token_or_the_budget_ends_a_row(tokens, budget, kept, reason):
    assert commit(tokens, frozenset({STOP, 3}), budget) == (kept, reason)


def test_nothing_ends_a_row_without_stop_tokens():
    assert commit([A, STOP, B], frozenset(), 9) == ([A, STOP, B], None)


def test_criteria_are_asked_token_by_token_and_no_further_than_they_fire():
    asked = []

    def stopped(i):
        asked.append(i)
        return i == 1

    assert commit([A, B, C, STOP], frozenset({STOP}), 9, stopped) == ([A, B], "criteria")
    assert asked == [0, 1]


def test_a_stop_token_needs_no_criterion():
    assert commit([STOP, A], frozenset({STOP}), 9, lambda i: pytest.fail("asked")) == ([STOP], "stop")


def test_criteria_see_the_row_and_its_scores_up_to_each_token():
    seen = []

    def criteria(ids, scores):
        seen.append((ids.tolist(), [float(s[0, 0]) for s in scores]))
        return torch.tensor([ids.shape[1] == 5])

    row = torch.tensor([[1, 7, 8, A, B, C]])  # a prompt of two columns, one token of an earlier round, three new ones
    scores = [torch.tensor([float(i)]) for i in range(4)]
    stopped = row_stopped(criteria, row, 3, scores)
    assert [stopped(i) for i in range(3)] == [False, True, False]
    assert seen == [([row[0, : 4 + i].tolist()], [0.0, *range(1, 2 + i)]) for i in range(3)]


def test_criteria_get_none_where_no_scores_are_kept():
    def criteria(ids, scores):
        assert scores is None
        return torch.tensor([False])

    assert not row_stopped(criteria, torch.tensor([[1, A]]), 1, None)(0)


def test_there_is_nothing_to_ask_without_criteria():
    assert row_stopped([], torch.tensor([[1, A]]), 1, None) is None
