"""Replaying policies on logged rounds, by hand-countable costs."""

import math

import pytest

from hf_dspark.evaluation.record import RoundLog, threshold_sweep
from hf_dspark.evaluation.replay import (
    Costs,
    FixedLength,
    confidence_threshold,
    everything,
    first,
    gate,
    oracle_gate,
    plain,
    replay,
    replay_scheduler,
)
from hf_dspark.scheduling import CostTable

COSTS = Costs(draft=1.0, verify=lambda tokens: 10.0 + tokens, overhead=0.5)


def log(accepted, stages=1, log_q=-0.1, confidence=None, drafted=None, seconds=(0.0, 0.0, 0.0)):
    drafted = stages * 2 if drafted is None else drafted
    log_q = [log_q] * drafted if isinstance(log_q, float) else log_q
    return RoundLog(0, drafted, accepted, accepted + 1, stages, 2, 1, drafted + 1, log_q, confidence, *seconds)


def test_everything_costs_what_was_logged():
    done = replay([log(2), log(0)], COSTS, everything)
    assert (done.rounds, done.tokens, done.drafted, done.verified) == (2, 4, 4, 4)
    assert done.seconds == 2 * (1 + 13 + 0.5) and done.tau == 2.0 and done.seconds_per_token == done.seconds / 4


def test_plain_decoding_drafts_nothing_and_emits_one_token_a_round():
    done = replay([log(2), log(0)], COSTS, plain)
    assert (done.tokens, done.seconds) == (2, 2 * (11 + 0.5))


def test_a_prefix_loses_what_lay_behind_it():
    done = replay([log(2), log(0)], COSTS, first(1))
    assert (done.tokens, done.verified, done.seconds) == (3, 2, 2 * (1 + 12 + 0.5))


def test_a_gate_stops_before_the_stages_it_would_not_have_drafted():
    sure, unsure = log(4, 2, [-0.1, -0.1, -3.0, -3.0]), log(1, 2, [-1.0, -1.0, -0.1, -0.1])
    done = replay([sure, unsure], COSTS, gate(-0.5))
    assert (done.drafted, done.tokens) == (4 + 2, 5 + 2)
    assert done.seconds == (2 + 15 + 0.5) + (1 + 13 + 0.5)


def test_the_oracle_gate_loops_exactly_behind_whole_blocks():
    assert [oracle_gate(r) for r in (log(6, 3), log(3, 3), log(1, 3))] == [(3, 6), (2, 4), (1, 2)]


def test_a_confidence_threshold_cuts_before_the_first_draft_below_it():
    policy = confidence_threshold(0.5)
    assert policy(log(2, confidence=[1.0, -1.0])) == (1, 1) and policy(log(2, confidence=[1.0, 1.0])) == (1, 2)


def test_no_policy_gets_more_than_was_logged():
    done = replay([log(1, drafted=1)], COSTS, lambda r: (9, 9))
    assert (done.drafted, done.verified, done.tokens) == (1, 1, 2)


def test_costs_are_medians_per_row_and_length():
    rounds = [log(0, seconds=(0.2, 1.0, 0.1)), log(0, seconds=(0.4, 3.0, 0.1)), log(0, seconds=(9.0, 2.0, 0.1))]
    rounds += [log(0, drafted=0, seconds=(0.4, 0.5, 0.1))]
    costs = Costs.measured(rounds)
    assert (costs.draft, costs.overhead, costs.verify(3), costs.verify(1)) == (0.4, 0.1, 2.0, 0.5)
    assert costs.verify(2) == pytest.approx(1.25)
    assert math.isnan(replay([], costs, everything).tau)


LINEAR = CostTable((1, 4), (0,), (1, 3), (((10.0, 12.0),), ((10.0, 12.0),)), ((1.0,), (1.0,)))


def test_a_fixed_length_on_several_rows_costs_the_widest():
    logs = [[log(2), log(0)], [log(1), log(1)]]
    done = replay_scheduler(logs, LINEAR, FixedLength(2), rows=2, rounds=2)
    assert (done.rounds, done.tokens, done.verified, done.drafted) == (4, (3 + 2) + (1 + 2), 8, 8)
    assert done.seconds == 2 * (1 + LINEAR.verify_seconds(6, 2))
    plain = replay_scheduler(logs, LINEAR, FixedLength(0), rows=2, rounds=2)
    assert (plain.tokens, plain.seconds) == (4, 2 * 10)


def test_a_scheduler_sees_calibrated_confidences_and_what_became_of_its_drafts():
    seen = []

    class First(FixedLength):
        def prune(self, draft):
            seen.append(draft.confidence)
            return [1] * len(draft.lengths)

        def observe(self, draft, lengths, accepted, fed, draft_seconds, verify_seconds):
            seen.append((lengths, accepted, fed, draft_seconds, verify_seconds))

    done = replay_scheduler(
        [[log(2, confidence=[2.0, -2.0])]], LINEAR, First(2), rows=1, rounds=1, temperatures=[2.0, 1.0]
    )
    assert seen[0][0].tolist() == pytest.approx([1.0, -2.0])
    assert seen[1] == ([1], [1], 2, 1.0, 11.0) and done.tokens == 2


def test_a_log_that_is_too_short_begins_anew():
    done = replay_scheduler([[log(2), log(0)]], LINEAR, FixedLength(2), rows=1, rounds=5)
    assert done.tokens == 3 + 1 + 3 + 1 + 3


def test_a_threshold_sweep_counts_what_lies_before_the_first_unsure_draft():
    rounds = [log(1, confidence=[3.0, -1.0]), log(0, confidence=[-1.0, 3.0])]
    sweep = {t: (n, a) for t, n, a in threshold_sweep(rounds)}
    assert sweep[0.0] == (4, 1) and sweep[0.5] == (1, 1) and sweep[0.95] == (1, 1)
    assert threshold_sweep([log(1)]) == []
