"""What the real decode loop did, round by round: confidences, log-probabilities, acceptances, seconds."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from hf_dspark.decoding.generate import listening
from hf_dspark.decoding.outputs import COPIED
from hf_dspark.scheduling.headless import step_features

from .metrics import Round

THRESHOLDS = tuple(i / 20 for i in range(20))


@dataclass
class RoundLog:
    """One row's round.

    `drafted` drafts verified and `accepted` of them, before the commit cut anything off; `emitted` tokens that became
    output; `log_q` and `confidence` [drafted]: temperature-1 log-probabilities and raw confidence logits (None without
    a head); `features` [drafted][5] of `scheduling.headless` if recorded; `source` of the drafts. Seconds are
    those of all `rows` rows together, `fed` is what the target read of each.
    """

    row: int
    drafted: int
    accepted: int
    emitted: int
    stages: int
    block: int
    rows: int
    fed: int
    log_q: list[float]
    confidence: list[float] | None
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    features: list[list[float]] | None = None
    source: str = "drafter"

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds

    @property
    def round(self) -> Round:
        """As the statistics count it: a round that was cut verified nothing behind the cut."""
        cut = self.emitted < self.accepted + 1
        accepted = min(self.accepted, self.emitted)
        return Round(accepted if cut else self.drafted, accepted, self.emitted, self.stages, self.source)

    to_dict = asdict


class Recorder:
    """Collects a [`RoundLog`] per row and round; what `record` yields. `rounds` is in the order of decoding."""

    def __init__(self, temperatures: list[float] | None = None):
        self.rounds: list[RoundLog] = []
        self.temperatures = temperatures
        self.steps: list[torch.Tensor] = []  # log q [A, Vd] of each step since the last round

    def __call__(self, event) -> None:
        """Takes a `decoding.loop.Round`."""
        draft, accepted, seconds = event.draft, event.accepted, event.seconds
        confidence = self._logits(draft)
        features = self._features(draft) if self.steps else None
        for i, commit in enumerate(event.commits):
            n = event.verified[i]
            self.rounds.append(
                RoundLog(
                    row=commit.key,
                    drafted=n,
                    accepted=accepted[i],
                    emitted=len(commit.tokens),
                    stages=draft.stages[i],
                    block=draft.block,
                    rows=len(event.commits),
                    fed=1 + max(event.verified),
                    log_q=draft.log_q[i, :n].tolist(),
                    confidence=None if confidence is None else confidence[i, :n].tolist(),
                    draft_seconds=seconds.draft,
                    verify_seconds=seconds.verify,
                    overhead_seconds=seconds.overhead,
                    features=None if features is None else features[i, :n].tolist(),
                    source=draft.sources[i],
                )
            )
        self.steps.clear()

    def _logits(self, draft) -> torch.Tensor | None:
        """Raw confidence logits [A, L]: the proposer's with their temperatures taken out again."""
        if draft.confidence is None:
            return None
        logits = draft.confidence.double()
        if self.temperatures is None:
            return logits
        place = torch.arange(logits.shape[1]) % max(draft.block, 1)
        return logits * torch.tensor(self.temperatures)[place.clamp_max(len(self.temperatures) - 1)].to(logits)

    def _features(self, draft) -> torch.Tensor:
        return torch.stack([step_features(q, draft.log_q[:, :k]) for k, q in enumerate(self.steps)], 1)


@contextmanager
def record(drafter, features: bool = False, policy=None) -> Iterator[Recorder]:
    """Record every round that `drafter` takes part in.

    `with record(drafter) as recorder: target.generate(..., assistant_model=drafter)`, then read `recorder.rounds`.

    Args:
        drafter: whatever is given to `generate`. features: also keep what an acceptance estimate without a confidence
            head may look at; single-stage rounds only. policy: decides in place of the drafter's own.
    """
    config = drafter.config
    recorder = Recorder(config.confidence_temperatures if config.confidence_head else None)
    if features:
        step = drafter.step

        def recorded(cache, state, prev):
            logits, confidence, state = step(cache, state, prev)
            recorder.steps.append(logits.float().log_softmax(-1))
            return logits, confidence, state

        drafter.step = recorded
    try:
        with listening(observer=recorder, policy=policy):
            yield recorder
    finally:
        if features:
            del drafter.step


def drafters(rounds: list[RoundLog]) -> list[RoundLog]:
    """Those whose drafts, if any, the drafter made: copies tell nothing of its confidence, its gate or its time."""
    return [r for r in rounds if r.source not in COPIED]


class ConfidenceData(NamedTuple):
    """Confidence logits [J, K], labels [J, K] (1 iff drafts 1..k were all accepted), and where a draft was verified at
    all."""

    logits: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    features: torch.Tensor | None  # [J, K, 5]


def confidence_data(rounds: list[RoundLog]) -> ConfidenceData:
    """First stages of unpruned `rounds` as arrays for `scheduling.calibration`. Positions behind a drafted stop token
    were never drafted, so they aren't valid. Without a confidence head the logits are zeros."""
    width, rounds = max(r.block for r in rounds), [r for r in drafters(rounds) if r.drafted]
    shape = len(rounds), width
    logits, labels = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    valid, features = torch.zeros(shape, dtype=torch.bool), torch.zeros(*shape, 5)
    known = bool(rounds) and rounds[0].features is not None
    for j, r in enumerate(rounds):
        n = min(r.drafted, r.block)
        if r.confidence is not None:
            logits[j, :n] = torch.tensor(r.confidence[:n], dtype=torch.float64)
        if known:
            features[j, :n] = torch.tensor(r.features[:n])
        labels[j, : min(r.accepted, n)], valid[j, :n] = 1.0, True
    return ConfidenceData(logits, labels, valid, features if known else None)


class GateData(NamedTuple):
    """Of the whole blocks of one stage that were verified behind an accepted prefix: their summed log-probabilities,
    which were accepted whole, and behind which another stage was drafted."""

    scores: list[float]
    full: list[bool]
    passed: list[bool]


def gate_data(rounds: list[RoundLog]) -> dict[int, GateData]:
    """By stage, from 1."""
    data: dict[int, GateData] = {}
    for r in drafters(rounds):
        for s in range(1, 1 + (r.drafted // r.block if r.block else 0)):
            if r.accepted < (s - 1) * r.block:
                break
            stage = data.setdefault(s, GateData([], [], []))
            stage.scores.append(sum(r.log_q[(s - 1) * r.block : s * r.block]))
            stage.full.append(r.accepted >= s * r.block)
            stage.passed.append(r.stages > s)
    return data


def threshold_sweep(rounds: list[RoundLog]) -> list[tuple[float, int, int]]:
    """(threshold, drafts verified, drafts accepted) had every round's verification stopped before the first draft whose
    raw confidence is below the threshold; empty without a confidence head."""
    rounds = drafters(rounds)
    if not rounds or any(r.drafted and r.confidence is None for r in rounds):
        return []
    out = []
    for threshold in THRESHOLDS:
        kept = [next((k for k, z in enumerate(r.confidence or ()) if z < _logit(threshold)), r.drafted) for r in rounds]
        out.append((threshold, sum(kept), sum(min(r.accepted, k) for r, k in zip(rounds, kept))))
    return out


def _logit(p: float) -> float:
    return math.log(p / (1 - p)) if p else -math.inf
