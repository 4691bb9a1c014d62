"""Calibration on the real loop: an overconfident drafter is told so, and what is stored is what decoding uses."""

import math

import pytest
import tiny
import tiny_chat
import torch

from hf_dspark import SpeculationConfig
from hf_dspark.evaluation import calibration
from hf_dspark.evaluation.metrics import survival
from hf_dspark.evaluation.record import record


def prompts_of(case):
    return [p.tolist() for p in case.prompts]


@pytest.fixture(scope="module")
def overconfident():
    """Drafts that are right about three times in four, each said to be 98 % certain."""
    case = tiny.load_case("llama")
    drafter = tiny.good(case.texts, block=3, confidence=lambda k: 4.0)
    drafter.config.confidence_head = True
    return drafter, calibration.collect(case.target, drafter, prompts_of(case), tiny.NEW, temperature=0.0, batch_size=3)


def test_logs_are_those_of_each_prompt_whatever_the_batch(overconfident):
    drafter, logs = overconfident
    assert [sum(r.emitted for r in log) for log in logs] == [tiny.NEW - 1] * 4
    assert all(r.confidence == pytest.approx([4.0] * r.drafted, abs=1e-4) for log in logs for r in log if r.drafted)
    for log in logs:
        left = [tiny.NEW - 1 - sum(x.emitted for x in log[:i]) for i in range(len(log))]
        assert [r.drafted for r in log] == [min(3, n - 1) for n in left]  # nothing pruned


def test_temperatures_bring_the_error_down_and_are_stored_where_decoding_reads_them(overconfident):
    drafter, logs = overconfident
    found = calibration.fit(drafter, logs, min_labels=5)
    assert found.before["mean_ece"] > 0.1 > found.after["mean_ece"]
    assert all(t > 1 for t in found.temperatures) and found.survival_model is None
    rounds = [r for log in logs for r in log if r.drafted]
    # A constant confidence can only become the mean acceptance, position by position.
    product = math.prod(1 / (1 + math.exp(-4.0 / t)) for t in found.temperatures[:1])
    assert product == pytest.approx(survival([r.round for r in rounds])[0], abs=0.06)
    calibration.apply(drafter, found)
    case = tiny.load_case("llama")
    with record(drafter) as recorder:
        case.target.generate(
            case.prompts[0][None], max_new_tokens=6, do_sample=False, assistant_model=drafter,
            speculation=SpeculationConfig(confidence_threshold=0.9),
        )  # fmt: skip
    assert all(r.drafted == 0 for r in recorder.rounds)  # no longer 98 % certain
    calibration.apply(drafter, calibration.Calibration(None, None, None, {}, None, {}, 0, 0.0))


def test_the_held_out_report_counts_every_round_once(overconfident):
    drafter, logs = overconfident
    found = calibration.fit(drafter, logs, min_labels=5)
    assert found.held_out["count"] == found.after["count"] == found.before["count"]
    assert found.held_out["mean_ece"] >= found.after["mean_ece"]
    assert calibration.fit(drafter, logs[:1]).held_out is None


def test_too_few_labels_change_nothing(overconfident):
    drafter, logs = overconfident
    assert calibration.fit(drafter, logs, min_labels=10**6).temperatures == [1.0] * 3


def test_a_drafter_without_a_head_gets_an_estimate_that_knows_more_than_the_mean():
    target, drafter, prompts = tiny_chat.trained()
    wrong = torch.randint(
        3, tiny.V - 1, (6, 6), generator=torch.Generator().manual_seed(9)
    ).tolist()  # unlearnt prompts
    logs = calibration.collect(target, drafter, [*prompts[:3], *wrong[:3]], 24, temperature=0.0, batch_size=6)
    found = calibration.fit(drafter, logs)
    assert found.temperatures is None and found.before is None and set(found.reliability) == {"after"}
    assert found.after["mean_auroc"] > 0.75 and len(found.survival_model["bias"]) == 4
    calibration.apply(drafter, found)
    try:
        ids = torch.tensor(wrong[:1])
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        with record(drafter) as recorder:
            ours = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, assistant_model=drafter,
                speculation=SpeculationConfig(confidence_threshold=0.5),
            )  # fmt: skip
        assert torch.equal(plain, ours)
        assert min(r.drafted for r in recorder.rounds[:3]) < 4
    finally:
        drafter.config.survival_model = None


def test_sampling_is_repeatable_and_pruning_is_off_whatever_is_stored(llama):
    drafter = tiny.make_drafter(llama.target)
    drafter.speculation = SpeculationConfig(confidence_threshold=0.999)
    first, second = (calibration.collect(llama.target, drafter, prompts_of(llama), 10, seed=3) for _ in range(2))
    lengths = [[(r.drafted, r.accepted) for r in log] for log in first]
    assert lengths == [[(r.drafted, r.accepted) for r in log] for log in second]
    assert max(n for log in lengths for n, _ in log) == 5


def test_nothing_drafted_calibrates_nothing(llama):
    drafter = tiny.make_drafter(llama.target)
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibration.fit(drafter, calibration.collect(llama.target, drafter, prompts_of(llama), 1))
