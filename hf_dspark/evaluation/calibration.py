"""Making a drafter's confidence true: run the real loop on held-out prompts, compare with what was accepted, fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_dspark.modeling import SpeculationConfig
from hf_dspark.scheduling.calibration import (
    calibration_report,
    fit_sequential_temperatures,
    prefix_predictions,
    reliability_bins,
)
from hf_dspark.scheduling.headless import fit_survival, survival_logits

from .record import ConfidenceData, RoundLog, confidence_data, record


@dataclass
class Calibration:
    """What was fitted: `temperatures` [K] of a confidence head, or the `survival_model` of a drafter without one.

    `before`, `after`, `held_out`: `scheduling.calibration_report`s with the raw confidence (None without a head), with
    what was fitted, and cross-validated (fitted on one half of the prompts, measured on the other, both ways).
    `reliability` {"before", "after"}: bins of a reliability diagram, positions pooled. `rounds` and `tau` of the run.
    """

    temperatures: list[float] | None
    survival_model: dict | None
    before: dict | None
    after: dict
    held_out: dict | None
    reliability: dict
    rounds: int
    tau: float


def collect(
    target,
    drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    batch_size: int = 8,
    seed: int = 0,
    sampling: dict | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[RoundLog]]:
    """Rounds of each prompt (token ids), nothing pruned: every draft of a block is verified.

    Args:
        temperature: of the target and the drafts; 0 is greedy. Confidence heads are trained on temperature 1.
        sampling: `top_k`, `top_p`, ... progress: called with (prompts done, in all).
    """
    sample = {"do_sample": True, "temperature": temperature, "top_k": 0, **(sampling or {})} if temperature > 0 else {}
    pad, headless = target.generation_config.pad_token_id or 0, not drafter.config.confidence_head
    logs: list[list[RoundLog]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in batch], device=target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=target.device)
        with record(drafter, features=headless) as recorder:
            target.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, assistant_model=drafter, pad_token_id=pad,
                speculation=SpeculationConfig(seed=seed + start), **{"do_sample": False, **sample},
            )  # fmt: skip
        logs += [[r for r in recorder.rounds if r.row == row] for row in range(len(batch))]
        if progress is not None:
            progress(len(logs), len(prompts))
    return logs


def fit(drafter, logs: list[list[RoundLog]], min_labels: int = 500) -> Calibration:
    """Fit on all `logs` (one list per prompt) and report. The drafter isn't changed, see `apply`.

    Args:
        min_labels: labels a position needs to get a temperature of its own.

    Raises:
        ValueError: nothing was drafted.
    """
    rounds = [r for log in logs for r in log]
    if not any(r.drafted for r in rounds):
        raise ValueError(
            "No round drafted anything, so there is nothing to calibrate: give more prompts or longer answers."
        )
    data, headless = confidence_data(rounds), not drafter.config.confidence_head

    def fitted(part: ConfidenceData, need: int):
        if headless:
            return fit_survival(part.features, part.labels, part.valid)
        return fit_sequential_temperatures(part.logits, part.labels, part.valid, min_labels=need)

    def logits_of(part: ConfidenceData, model) -> torch.Tensor:
        if headless:
            return survival_logits(model, part.features).double()
        return part.logits / torch.tensor(model, dtype=part.logits.dtype)

    model = fitted(data, min_labels)
    calibrated = logits_of(data, model)
    bins = {"after": _reliability(calibrated, data)}
    if not headless:
        bins["before"] = _reliability(data.logits, data)
    return Calibration(
        temperatures=None if headless else model,
        survival_model=model if headless else None,
        before=None if headless else calibration_report(data.logits, data.labels, data.valid),
        after=calibration_report(calibrated, data.labels, data.valid),
        held_out=_cross_validated(logs, lambda part: fitted(part, max(min_labels // 2, 1)), logits_of),
        reliability=bins,
        rounds=len(rounds),
        tau=sum(r.emitted for r in rounds) / len(rounds),
    )


def apply(drafter, calibration: Calibration) -> None:
    """Store what was fitted in the drafter's config, where decoding reads it and `save_pretrained` keeps it."""
    drafter.config.confidence_temperatures = calibration.temperatures
    drafter.config.survival_model = calibration.survival_model


def _cross_validated(logs, fitted, logits_of) -> dict | None:
    halves = [[r for log in logs[i::2] for r in log if r.drafted] for i in (0, 1)]
    if not all(halves):
        return None
    parts = [confidence_data(h) for h in halves]
    logits = torch.cat([logits_of(parts[1], fitted(parts[0])), logits_of(parts[0], fitted(parts[1]))])
    labels, valid = (torch.cat([getattr(parts[1], name), getattr(parts[0], name)]) for name in ("labels", "valid"))
    return calibration_report(logits, labels, valid)


def _reliability(logits: torch.Tensor, data: ConfidenceData) -> dict:
    return reliability_bins(prefix_predictions(logits)[data.valid], data.labels[data.valid])
