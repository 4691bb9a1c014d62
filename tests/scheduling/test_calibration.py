import math

import pytest
import torch

from hf_dspark.scheduling import (
    auroc,
    auroc_histogram,
    brier,
    calibrate,
    calibration_report,
    ece,
    fit_sequential_temperatures,
    prefix_predictions,
    reliability_bins,
)

TRUE = [2.5, 0.4, 1.0, 1.7]


@pytest.fixture(scope="module")
def rounds():
    """Logits that are the true ones times TRUE, and prefix labels from coins."""
    generator = torch.Generator().manual_seed(0)
    true = 1.2 + 1.5 * torch.randn(8000, len(TRUE), generator=generator, dtype=torch.float64)
    coins = torch.rand(true.shape, generator=generator) < true.sigmoid()
    return true * torch.tensor(TRUE, dtype=torch.float64), coins.long().cumprod(-1)


def slow_ece(predictions, labels, bins=20):
    total = 0.0
    for b in range(bins):
        inside = [(p, y) for p, y in zip(predictions, labels, strict=True) if min(math.floor(bins * p), bins - 1) == b]
        if inside:
            mean_p, mean_y = (sum(column) / len(inside) for column in zip(*inside, strict=True))
            total += len(inside) / len(predictions) * abs(mean_p - mean_y)
    return total


def slow_auroc(scores, labels):
    pairs = [
        (a, b) for a, y in zip(scores, labels, strict=True) if y for b, z in zip(scores, labels, strict=True) if not z
    ]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


@pytest.fixture
def sample():
    generator = torch.Generator().manual_seed(1)
    scores = (
        torch.rand(300, generator=generator, dtype=torch.float64) * 50
    ).round() / 50  # many ties, 0 and 1 among them
    return scores, (torch.rand(300, generator=generator) < scores).long()


def test_ece_equals_its_definition(sample):
    scores, labels = sample
    assert {0.0, 1.0} <= set(scores.tolist())
    for bins in (20, 7):
        assert ece(scores, labels, bins) == pytest.approx(slow_ece(scores.tolist(), labels.tolist(), bins))


def test_ece_of_a_hand_made_case():
    assert ece(torch.tensor([0.02, 0.04, 0.9, 1.0]), torch.tensor([0, 1, 1, 1])) == pytest.approx((0.94 + 0.1) / 4)
    # 0.96 and 1.0 share the last bin, where their gaps partly cancel.
    assert ece(torch.tensor([0.96, 1.0]), torch.tensor([1, 0])) == pytest.approx((1.96 - 1) / 2)
    assert len(reliability_bins(torch.tensor([1.0]), torch.tensor([1]))["count"]) == 20


def test_auroc_counts_pairs_and_ties_half(sample):
    scores, labels = sample
    assert auroc(scores, labels) == pytest.approx(slow_auroc(scores.tolist(), labels.tolist()))
    assert auroc_histogram(scores, labels) == pytest.approx(auroc(scores, labels))  # multiples of 1/50 stay apart
    assert auroc_histogram(scores, labels, bins=3) != pytest.approx(auroc(scores, labels))
    assert math.isnan(auroc(scores, torch.ones_like(labels)))


def test_reliability_bins_add_up_to_the_ece(sample):
    scores, labels = sample
    bins = reliability_bins(scores, labels)
    gaps = zip(bins["count"], bins["prediction"], bins["label"], strict=True)
    assert sum(n * abs(p - y) for n, p, y in gaps if n) / 300 == pytest.approx(ece(scores, labels))
    assert bins["edge"][:2] == [0.0, 0.05] and len(bins["edge"]) == 20


def test_brier_is_the_mean_squared_error():
    assert brier(torch.tensor([0.5, 1.0]), torch.tensor([1, 0])) == pytest.approx(0.625)


def test_known_temperatures_are_recovered(rounds):
    temperatures = fit_sequential_temperatures(*rounds)
    assert temperatures == pytest.approx(TRUE, rel=0.15)


def test_temperatures_lower_the_ece_of_held_out_rounds(rounds):
    logits, labels = rounds
    temperatures = fit_sequential_temperatures(logits[:4000], labels[:4000])
    before = calibration_report(logits[4000:], labels[4000:])
    after = calibration_report(logits[4000:], labels[4000:], temperatures=temperatures)
    assert before["mean_ece"] > 0.05 > 0.02 > after["mean_ece"]
    assert after["mean_brier"] < before["mean_brier"]


def test_each_temperature_is_the_best_of_a_fine_scan_given_the_ones_before(rounds):
    logits, labels = rounds[0][:1000], rounds[1][:1000]
    temperatures = fit_sequential_temperatures(logits, labels)
    finer = 0
    for k in range(len(TRUE)):

        def error(t, k=k):
            return ece(prefix_predictions(logits[:, : k + 1], [*temperatures[:k], t])[:, k], labels[:, k])

        scan = min(error(0.2 * 25 ** (i / 120)) for i in range(121))
        assert error(temperatures[k]) <= min(scan, error(1.0)) + 1e-9
        finer += error(temperatures[k]) < scan - 1e-6
    assert finer > 0


def test_calibration_keeps_the_order_within_a_position(rounds):
    logits = rounds[0]
    calibrated = calibrate(logits, fit_sequential_temperatures(*rounds))
    order = logits.argsort(0)
    assert (calibrated.gather(0, order).diff(dim=0) >= 0).all()


def test_few_labels_or_one_class_keep_the_identity(rounds):
    logits, labels = rounds
    assert fit_sequential_temperatures(logits[:499], labels[:499]) == [1.0] * 4
    assert fit_sequential_temperatures(logits[:499], labels[:499], min_labels=499) != [1.0] * 4
    labels = labels.clone()
    labels[:, 1:] = 0
    assert fit_sequential_temperatures(logits, labels)[1:] == [1.0] * 3


def test_ties_go_to_the_temperature_nearest_one(rounds):
    labels = rounds[1][:, :1]
    assert fit_sequential_temperatures(torch.zeros(labels.shape), labels) == [1.0]


def test_invalid_positions_change_nothing(rounds):
    logits, labels = rounds
    logits, labels = logits[:2000].clone(), labels[:2000].clone()
    valid = torch.ones_like(labels, dtype=torch.bool)
    valid[:700, 2:] = False
    kept = fit_sequential_temperatures(logits, labels, valid)
    report = calibration_report(logits, labels, valid)
    logits[:700, 2:], labels[:700, 2:] = float("nan"), 7
    assert fit_sequential_temperatures(logits, labels, valid) == kept
    assert calibration_report(logits, labels, valid) == report
    assert kept != fit_sequential_temperatures(rounds[0][:2000], rounds[1][:2000])
    assert report["count"] == [2000, 2000, 1300, 1300]


def test_the_report_weighs_positions_by_their_counts(rounds):
    logits, labels = rounds[0][:100, :2], rounds[1][:100, :2]
    valid = torch.ones_like(labels, dtype=torch.bool)
    valid[:90, 1] = False
    report = calibration_report(logits, labels, valid, temperatures=[2.0, 0.5])
    first, second = (logits[:, 0] / 2).sigmoid(), (logits[:, 1] / 0.5).sigmoid()
    columns = [(first, labels[:, 0]), ((first * second)[90:], labels[90:, 1])]
    errors = [slow_ece(p.tolist(), y.tolist()) for p, y in columns]
    assert report["ece"] == pytest.approx(errors)
    assert report["auroc"] == pytest.approx([auroc(p, y) for p, y in columns], abs=1e-2)
    assert report["brier"] == pytest.approx([((p - y) ** 2).mean().item() for p, y in columns])
    assert report["mean_ece"] == pytest.approx((100 * errors[0] + 10 * errors[1]) / 110)


def test_a_chain_of_stages_starts_the_temperatures_again():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
    assert torch.equal(calibrate(logits, [2.0, 4.0]), torch.full((1, 5), 0.5).sigmoid())
    assert torch.equal(calibrate(logits), logits.sigmoid())


def test_shapes_that_differ_are_refused(rounds):
    with pytest.raises(ValueError, match="one shape"):
        fit_sequential_temperatures(rounds[0], rounds[1][:, :2])
