"""Verified tokens become output up to the first stop token, criterion or the budget, whichever token comes first."""

import pytest
import torch
from transformers import GenerationConfig, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_dspark.verification.commit import check_criteria, commit, own_criteria, row_stopped

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


def test_criteria_are_asked_about_a_stop_token_too_which_stays_the_reason():
    asked = []
    assert commit([A, STOP, B], frozenset({STOP}), 9, lambda i: asked.append(i) or i == 1) == ([A, STOP], "stop")
    assert asked == [0, 1]


def test_criteria_see_the_row_and_its_scores_up_to_each_token():
    seen = []

    def criteria(ids, scores):
        seen.append((ids.tolist(), [float(s[0, 0]) for s in scores]))
        return torch.tensor([ids.shape[1] == 5])

    row = torch.tensor([[1, 7, 8, A, B, 0]])  # a prompt of two columns, one token of an earlier round, three new ones
    scores = [torch.tensor([float(i)]) for i in range(4)]
    stopped = row_stopped(criteria, row, 3, lambda i: scores[: 2 + i])
    assert [stopped(i) for i in range(2)] == [False, True]
    row[0, 5] = C  # the last one is known later
    assert [stopped(i) for i in range(3)] == [False, True, False]
    assert seen == [([row[0, : 4 + i].tolist()], [0.0, *range(1, 2 + i)]) for i in range(3)], "each once"


def test_criteria_get_none_where_no_scores_are_kept():
    def criteria(ids, scores):
        assert scores is None
        return torch.tensor([False])

    assert not row_stopped(criteria, torch.tensor([[1, A]]), 1)(0)


def test_there_is_nothing_to_ask_without_criteria():
    assert row_stopped([], torch.tensor([[1, A]]), 1) is None


class Mine(MaxLengthCriteria):
    pass


@pytest.mark.parametrize(
    ("criteria", "length", "stops", "rest"),
    [
        ([], 20, set(), 0),
        ([MaxLengthCriteria(20)], 20, set(), 0),
        ([MaxLengthCriteria(9)], 9, set(), 0),
        ([MaxLengthCriteria(31)], 31, set(), 0),
        ([MaxLengthCriteria(31), MaxLengthCriteria(25)], 25, set(), 0),
        ([EosTokenCriteria([2, 7]), MaxTimeCriteria(5.0)], 20, {2, 7}, 1),
        ([EosTokenCriteria(2), EosTokenCriteria(torch.tensor([4]))], 20, {2, 4}, 0),
        ([MaxLengthCriteria(20), Mine(9)], 20, set(), 1),
    ],
)
def test_lengths_and_stop_tokens_are_those_of_the_prepared_criteria(criteria, length, stops, rest):
    ends = own_criteria(StoppingCriteriaList(criteria), GenerationConfig(max_length=20, eos_token_id=11))
    assert (ends.max_length, ends.stop_ids, len(ends.criteria)) == (length, frozenset(stops), rest)


class Own(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(len(input_ids), dtype=torch.bool)


class Declared(Own):
    row_wise = True


def test_criteria_of_the_users_own_are_refused_for_several_rows_unless_declared():
    check_criteria([Own(), Declared(), MaxTimeCriteria(1.0)], 1)
    check_criteria([Declared(), MaxTimeCriteria(1.0)], 4)
    with pytest.raises(ValueError, match="Own is a stopping criterion of your own, given for 4 rows.*row_wise = True"):
        check_criteria([Declared(), Own()], 4)
