"""The metrics: their worked examples, the statistics of real runs, and the choices papers differ in."""

import doctest
import math

import pytest
import tiny

from hf_dspark.evaluation import metrics
from hf_dspark.evaluation.metrics import Round


def test_the_worked_examples_are_right():
    result = doctest.testmod(metrics)
    assert result.attempted >= 15 and not result.failed


def test_metrics_agree_with_the_statistics_of_a_generate_call(llama):
    target = llama.target
    drafter = tiny.good(llama.texts)
    out = target.generate(
        **llama.padded(),
        max_new_tokens=tiny.NEW,
        do_sample=False,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    stats, responses = out.speculation, metrics.responses_of(out.speculation)
    rounds = metrics.pooled(responses)
    assert metrics.tau(rounds) == stats.tau
    assert metrics.acceptance_rate(rounds) == stats.acceptance_rate
    assert metrics.conditional_acceptance(rounds) == pytest.approx(stats.conditional_acceptance, nan_ok=True)
    assert [sum(r.emitted for r in row) for row in responses] == [tiny.NEW - 1] * 4  # the prefill emits the first token


def test_survival_is_the_running_product_of_conditional_acceptance_where_all_rounds_verify_alike():
    rounds = [Round(3, a, a + 1) for a in (0, 1, 1, 2, 3, 3, 0, 2)]
    product, products = 1.0, []
    for chance in metrics.conditional_acceptance(rounds):
        product *= chance
        products.append(product)
    assert metrics.survival(rounds) == pytest.approx(products)


def test_a_response_without_rounds_is_no_number_and_spoils_no_mean():
    assert math.isnan(metrics.tau([]))
    assert metrics.tau_macro([[], [Round(5, 2, 3)]]) == 3.0
    assert math.isnan(metrics.acceptance_rate([Round(0, 0, 1)]))
    assert metrics.conditional_acceptance([]) == metrics.full_acceptance([], 3) == []


def test_a_later_stage_counts_only_behind_an_accepted_one():
    rounds = [Round(6, 2, 3, 2), Round(6, 3, 4, 2), Round(6, 6, 7, 2)]
    assert metrics.full_acceptance(rounds, block=3) == [pytest.approx(2 / 3), 0.5]


def test_the_speed_up_is_a_ratio_of_means_over_the_same_prompts():
    plain, ours = [0.1, 0.3, 0.2], [0.1, 0.1, 0.1]
    result = metrics.speedup(plain, ours)
    assert result["ratio"] == pytest.approx(2.0)
    assert 1.0 <= result["low"] < 2.0 < result["high"] <= 3.0
    assert result == metrics.speedup(plain, ours)  # its bootstrap has a seed of its own
    with pytest.raises(ValueError):
        metrics.speedup(plain, ours[:2])


def test_a_gate_that_knows_everything_has_an_auroc_of_one():
    quality = metrics.gate_quality([-0.1, -0.3, -2.0], [True, True, False], [True, True, False])
    assert quality == {"auroc": 1.0, "precision": 1.0, "passed": pytest.approx(2 / 3)}
    assert math.isnan(metrics.gate_quality([-0.1], [True], [True])["auroc"])
