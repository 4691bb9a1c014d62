"""How far a confidence can be believed, and the temperatures that make it believable.

Arrays here are `[J, K]`: J rounds, K draft positions. A label is 1 iff drafts 1..k were all accepted, so the
prediction it belongs to is the running product of the confidences. Records come from unpruned rounds; `valid` is off
where nothing was drafted or the text had already ended.
"""

import math

import torch
from torch import Tensor


def ece(predictions: Tensor, labels: Tensor, bins: int = 20) -> float:
    """Expected calibration error of probabilities `[N]` against labels `[N]` over equal-width bins (arXiv 2607.05147,
    as DeepSpec
    evaluates it: bin floor(20 p), 1.0 in the last one). The mean gap of a bin, weighted by its share, is its summed
        gap over N."""
    if predictions.numel() == 0:
        return math.nan
    gap = predictions.double() - labels.double()
    return torch.bincount(_bin(predictions, bins), gap, minlength=bins).abs().sum().item() / len(gap)


def reliability_bins(predictions: Tensor, labels: Tensor, bins: int = 20) -> dict[str, list]:
    """The points of a reliability diagram: per bin its lower edge, count, mean prediction and mean label (nan in empty
    bins)."""
    index = _bin(predictions, bins)
    count = torch.bincount(index, minlength=bins)
    prediction = torch.bincount(index, predictions.double(), minlength=bins) / count
    label = torch.bincount(index, labels.double(), minlength=bins) / count
    edge = [b / bins for b in range(bins)]
    return {"edge": edge, "count": count.tolist(), "prediction": prediction.tolist(), "label": label.tolist()}


def brier(predictions: Tensor, labels: Tensor) -> float:
    """Mean squared error of probabilities `[N]`."""
    return (predictions.double() - labels.double()).square().mean().item()


def auroc(scores: Tensor, labels: Tensor) -> float:
    """P(score of a positive > score of a negative), ties counted half; nan with one class."""
    return _auroc(scores.unique(return_inverse=True)[1], labels)


def auroc_histogram(scores: Tensor, labels: Tensor, bins: int = 1000) -> float:
    """AUROC with probabilities rounded to bins: what DeepSpec reports, since it needs no sort."""
    return _auroc(_bin(scores, bins), labels)


def calibrate(logits: Tensor, temperatures: list[float] | Tensor | None = None) -> Tensor:
    """Confidence logits `[..., K]` to probabilities of the same shape and dtype. A chain of several stages starts the
    temperatures again at every block."""
    if temperatures is None:
        return logits.sigmoid()
    temperatures = torch.as_tensor(temperatures, dtype=logits.dtype, device=logits.device)
    return (logits / temperatures[torch.arange(logits.shape[-1], device=logits.device) % len(temperatures)]).sigmoid()


def prefix_predictions(logits: Tensor, temperatures: list[float] | Tensor | None = None) -> Tensor:
    """Predicted chance `[J, K]` (float64) that drafts 1..k are all accepted, each factor clamped to [1e-8, 1 -
    1e-8]."""
    return calibrate(logits.double(), temperatures).clamp(1e-8, 1 - 1e-8).cumprod(-1)


def calibration_report(
    logits: Tensor, labels: Tensor, valid: Tensor | None = None, temperatures: list[float] | Tensor | None = None
) -> dict[str, list]:
    """ECE, AUROC (1000 bins) and Brier score per draft position, and their means weighted by the positions' counts.

    Args:
        logits: `[J, K]` raw confidence logits.
        labels: `[J, K]`, 1 iff drafts 1..k were all accepted.
        valid: `[J, K]` bool, default all.
        temperatures: K of them, default none.

    Returns:
        `{"count", "ece", "auroc", "brier"}`, a list of K numbers each, and the same names with `mean_` in front (a
        number).
    """
    valid = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid.bool()
    predictions = prefix_predictions(logits.masked_fill(~valid, 0), temperatures)
    columns = [(predictions[valid[:, k], k], labels[valid[:, k], k]) for k in range(logits.shape[1])]
    report = {"count": [len(label) for _, label in columns]}
    for name, metric in (("ece", ece), ("auroc", auroc_histogram), ("brier", brier)):
        report[name] = [metric(*column) for column in columns]
        known = [(n, x) for n, x in zip(report["count"], report[name], strict=True) if not math.isnan(x)]
        report[f"mean_{name}"] = sum(n * x for n, x in known) / max(1, sum(n for n, _ in known)) if known else math.nan
    return report


def fit_sequential_temperatures(
    logits: Tensor, labels: Tensor, valid: Tensor | None = None, min_labels: int = 500
) -> list[float]:
    """One temperature per draft position, fitted left to right so that the running product is calibrated (sequential
    temperature scaling, arXiv 2607.05147; the grid is ours).

    For each position the ECE of `prefix * sigmoid(logit / T)` is minimised over 121 log-spaced T in [0.2, 5] and then
    over 41 between the winner's neighbours, with the earlier temperatures fixed. Ties go to the smallest |log T|; a
    position with fewer than `min_labels` labels or with one class keeps T = 1.

    Args:
        logits: `[J, K]` raw confidence logits of held-out, unpruned rounds.
        labels: `[J, K]`, 1 iff drafts 1..k were all accepted.
        valid: `[J, K]` bool, default all. If position k is valid, so are the ones before it.
        min_labels: labels a position needs to be fitted.
    """
    valid = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid.bool()
    if not (logits.shape == labels.shape == valid.shape and logits.ndim == 2):
        raise ValueError(
            f"logits, labels, valid have shapes {[tuple(x.shape) for x in (logits, labels, valid)]}, and a "
            "temperature is fitted per draft position of a round: pass three arrays of one shape [rounds, positions]."
        )
    prefix, temperatures = torch.ones(len(logits), dtype=torch.float64), []
    for k in range(logits.shape[1]):
        seen = valid[:, k].cpu()
        z, label, before = logits[:, k].cpu()[seen].double(), labels[:, k].cpu()[seen].double(), prefix[seen]
        fits = len(label) >= min_labels and 0 < label.sum() < len(label)
        temperatures.append(_best_temperature(z, label, before) if fits else 1.0)
        prefix[seen] = before * (z / temperatures[-1]).sigmoid()
    return temperatures


def _best_temperature(z: Tensor, label: Tensor, before: Tensor) -> float:
    error = {}

    def search(grid):
        error.update({t: ece(before * (z / t).sigmoid(), label) for t in grid})
        return min(error, key=lambda t: (error[t], abs(math.log(t))))

    coarse = [1.0 if i == 60 else 0.2 * 25 ** (i / 120) for i in range(121)]
    i = coarse.index(search(coarse))
    low, high = coarse[max(i - 1, 0)], coarse[min(i + 1, 120)]
    return search(low * (high / low) ** (j / 40) for j in range(41))


def _bin(probabilities: Tensor, bins: int) -> Tensor:
    return (probabilities.double() * bins).floor().long().clamp(0, bins - 1)


def _auroc(rank: Tensor, labels: Tensor) -> float:
    positive = torch.bincount(rank, labels.double())
    negative = torch.bincount(rank, 1 - labels.double())
    pairs = positive.sum() * negative.sum()
    wins = (positive * (negative.cumsum(0) - negative / 2)).sum()
    return (wins / pairs).item() if pairs else math.nan
