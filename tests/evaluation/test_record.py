"""The round log of the real loop: equal to the statistics, with the confidences and log-probabilities of the drafts."""

import math

import pytest
import tiny
import torch

from hf_dspark import SpeculationConfig
from hf_dspark.decoding.generate import _LISTENING
from hf_dspark.evaluation import metrics
from hf_dspark.evaluation.record import RoundLog, confidence_data, gate_data, record
from hf_dspark.scheduling import draft_features


def run(case, drafter, features=False, **knobs):
    with record(drafter, features=features) as recorder:
        out = case.target.generate(
            **case.padded(), max_new_tokens=tiny.NEW, do_sample=False, assistant_model=drafter,
            return_dict_in_generate=True, speculation=SpeculationConfig(**knobs),
        )  # fmt: skip
    return out, recorder.rounds


def test_the_log_holds_every_round_the_statistics_count(llama):
    out, rounds = run(llama, tiny.good(llama.texts))
    for row, expected in enumerate(metrics.responses_of(out.speculation)):
        assert [r.round for r in rounds if r.row == row] == expected
    assert sum(r.verify_seconds / r.rows for r in rounds) == pytest.approx(out.speculation.verify_seconds)
    assert sum(r.seconds / r.rows for r in rounds) == pytest.approx(
        out.speculation.verify_seconds + out.speculation.draft_seconds + out.speculation.overhead_seconds
    )


def test_recording_leaves_nothing_behind(llama):
    drafter = tiny.make_drafter(llama.target)
    run(llama, drafter, features=True)
    assert "step" not in vars(drafter) and _LISTENING.get() == (None, None)


def test_raw_confidence_logits_are_logged_whatever_the_stored_temperatures(llama):
    drafter = tiny.make_drafter(llama.target)
    _, without = run(llama, drafter)
    drafter.config.confidence_temperatures = [0.5, 3.0]
    _, scaled = run(llama, drafter)
    assert [r.confidence for r in scaled] == [pytest.approx(r.confidence, abs=1e-5) for r in without]
    assert max(abs(z) for r in without for z in r.confidence or ()) > 0.1


def test_labels_are_one_up_to_the_last_accepted_draft_and_valid_where_drafted():
    log = RoundLog(0, 3, 2, 3, 1, 4, 1, 4, [-0.1] * 3, [1.0, 2.0, 3.0], 0, 0, 0)
    nothing = RoundLog(0, 0, 0, 1, 1, 4, 1, 1, [], [], 0, 0, 0)
    data = confidence_data([log, nothing])
    assert data.logits.tolist() == [[1, 2, 3, 0]] and data.labels.tolist() == [[1, 1, 0, 0]]
    assert data.valid.tolist() == [[True, True, True, False]] and data.features is None


def test_a_round_cut_by_a_criterion_counts_what_came_before_the_cut():
    log = RoundLog(0, 5, 4, 2, 1, 5, 1, 6, [-0.1] * 5, None, 0, 0, 0)
    assert log.round == metrics.Round(2, 2, 2)
    assert RoundLog(0, 5, 4, 5, 1, 5, 1, 6, [-0.1] * 5, None, 0, 0, 0).round == metrics.Round(5, 4, 5)


def test_a_drafted_stop_token_ends_what_is_valid(llama):
    stop = llama.new[0][4]
    drafter = tiny.oracle(llama.texts)
    with record(drafter) as recorder:
        llama.target.generate(
            llama.prompts[0][None], max_new_tokens=tiny.NEW, do_sample=False, assistant_model=drafter, eos_token_id=stop
        )
    before = llama.new[0].index(stop)  # drafts before it, the prefill's token not being one
    assert [r.drafted for r in recorder.rounds] == [before]
    assert recorder.rounds[0].round == metrics.Round(before, before, before)  # no bonus behind a stop


def test_features_are_those_of_the_drafts_own_distributions(llama):
    drafter = tiny.make_drafter(llama.target)
    seen = []
    step = drafter.step

    def spy(cache, state, prev):
        out = step(cache, state, prev)
        seen.append(out[0].float().log_softmax(-1))
        return out

    drafter.step = spy
    with record(drafter, features=True) as recorder:
        llama.target.generate(llama.prompts[1][None], max_new_tokens=6, do_sample=False, assistant_model=drafter)
    first = recorder.rounds[0]
    log_q = torch.stack(seen[: first.drafted], 1)
    expected = draft_features(log_q, log_q.argmax(-1))[0]
    assert torch.allclose(torch.tensor(first.features), expected, atol=1e-6)


def test_gate_scores_are_sums_over_whole_blocks_behind_an_accepted_prefix():
    looped = RoundLog(0, 6, 2, 3, 3, 2, 1, 7, [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], None, 0, 0, 0)
    short = RoundLog(0, 1, 1, 2, 1, 2, 1, 2, [-9.0], None, 0, 0, 0)
    assert gate_data([looped, short]) == {1: ([-3.0], [True], [True]), 2: ([-7.0], [False], [True])}


def test_looped_rounds_are_logged_with_their_stages(llama):
    _, rounds = run(llama, tiny.oracle(llama.texts, block=3), loop_gate=-math.inf, max_draft_stages=3)
    assert max(r.stages for r in rounds) == 3 and all(r.block == 3 for r in rounds)
    assert all(len(r.log_q) == r.drafted for r in rounds)
