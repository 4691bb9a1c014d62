"""What a policy would cost on logged rounds: a quick judge for schedulers, gates and draft lengths.

Rounds are logged once with everything drafted and verified. A policy then says, round by round, how many stages it
would have drafted and how many drafts it would have verified; drafts it left out are unknown to it, those it kept are
accepted as they were. The rounds stand for the states decoding passes through, so what counts is seconds per token, not
the total: a policy that emits less would pass through more of them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

import torch

from hf_dspark.drafting.draft import Draft
from hf_dspark.scheduling import CostTable, LatencyCurve

from .record import RoundLog

Policy = Callable[[RoundLog], tuple[int, int]]


@dataclass(frozen=True)
class Costs:
    """Median seconds of a round's parts: `verify(tokens)` the target over so many tokens of one row, `draft` one
    stage."""

    draft: float
    verify: Callable[[float], float]
    overhead: float = 0.0

    @classmethod
    def measured(cls, rounds: Iterable[RoundLog]) -> "Costs":
        """From the logged rounds themselves. Log some of every length (e.g. with several `num_draft_tokens`): between
        the lengths seen the verification time is interpolated."""
        verify, draft, overhead = defaultdict(list), [], []
        for r in rounds:
            verify[r.fed].append(r.verify_seconds / r.rows)
            overhead.append(r.overhead_seconds / r.rows)
            if r.stages and r.source == "drafter":
                draft.append(r.draft_seconds / r.rows / r.stages)
        knots = sorted(verify)
        curve = LatencyCurve(tuple(knots), tuple(median(verify[k]) for k in knots))
        return cls(median(draft) if draft else 0.0, curve, median(overhead))


@dataclass(frozen=True)
class Replay:
    """Totals of a policy over the log. Example: 3 rounds, 6 tokens, 1.2 seconds: tau 2, 0.2 seconds per token."""

    rounds: int
    tokens: int
    drafted: int
    verified: int
    seconds: float

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds if self.rounds else math.nan

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else math.nan


def replay(rounds: Iterable[RoundLog], costs: Costs, policy: Policy) -> Replay:
    """Time and tokens of `policy(round) -> (stages drafted, drafts verified)` over logged rounds.

    The policy is shown the whole log of a round and must itself look only at what it would have known; both numbers are
    capped by what was logged.
    """
    count = tokens = drafted = verified = 0
    seconds = 0.0
    for r in rounds:
        stages, kept = policy(r)
        stages = min(stages, r.stages)
        kept = min(kept, r.drafted, stages * r.block)
        count, drafted, verified = count + 1, drafted + min(r.drafted, stages * r.block), verified + kept
        tokens += min(r.accepted, kept) + 1
        seconds += stages * costs.draft + costs.verify(1 + kept) + costs.overhead
    return Replay(count, tokens, drafted, verified, seconds)


def replay_scheduler(
    logs: Sequence[list[RoundLog]],
    costs: CostTable,
    scheduler,
    rows: int,
    rounds: int = 400,
    context: int = 256,
    temperatures: Sequence[float] | None = None,
) -> Replay:
    """A scheduler on `rows` answers at a time, cut from the logged ones; the log begins anew where it is too short.

    Args:
        logs: per answer its rounds of one stage, nothing pruned (see `calibration.collect`).
        costs: the measured medians that time is counted in; the scheduler is told them as its measurements.
        scheduler: has `begin`, `plan`, `prune` and `observe` as `scheduling.policy.Policy`; see also [`FixedLength`].
        context: tokens in the cache of each. temperatures ([K]): of the confidences.
    """
    flat = [r for log in logs for r in log if r.drafted == r.block and r.source == "drafter"]
    streams = [cycle(flat[i * len(flat) // rows :] + flat[: i * len(flat) // rows]) for i in range(rows)]
    tokens = drafted = verified = 0
    seconds = 0.0
    for batch in islice(zip(*streams), rounds):
        scheduler.begin(rows, context)
        planned = min(scheduler.plan(), batch[0].block)
        draft = _draft(batch, planned, temperatures)
        lengths = scheduler.prune(draft)
        accepted = [min(r.accepted, n) for r, n in zip(batch, lengths)]
        fed = 1 + max(lengths)
        spent = costs.draft_seconds(rows, context) if planned else 0.0, costs.verify_seconds(rows * fed, rows, context)
        scheduler.observe(draft, lengths, accepted, fed, *spent)
        drafted, verified = drafted + rows * planned, verified + sum(lengths)
        tokens, seconds = tokens + sum(accepted) + rows, seconds + sum(spent)
    return Replay(rounds * rows, tokens, drafted, verified, seconds)


def _draft(batch: Sequence[RoundLog], planned: int, temperatures) -> Draft:
    confidence = None
    if planned and batch[0].confidence is not None:
        logits = torch.tensor([r.confidence[:planned] for r in batch])
        confidence = logits / (1.0 if temperatures is None else torch.tensor(temperatures)[:planned])
    log_q = torch.tensor([r.log_q[:planned] for r in batch])
    rows = len(batch)
    return Draft(
        tokens=torch.zeros(rows, planned, dtype=torch.long),
        lengths=[planned] * rows,
        log_q=log_q,
        confidence=confidence,
        stages=[1] * rows,
        block=batch[0].block,
        room=[planned] * rows,
    )


class FixedLength:
    """A scheduler that always drafts and verifies `drafts` tokens; 0 is plain decoding."""

    def __init__(self, drafts: int):
        self.drafts = drafts

    def begin(self, rows, context):
        pass

    def plan(self) -> int:
        return self.drafts

    def prune(self, draft: Draft) -> list[int]:
        return draft.lengths

    def observe(self, *measured):
        pass


def everything(r: RoundLog) -> tuple[int, int]:
    """Draft and verify all that was logged."""
    return r.stages, r.drafted


def plain(r: RoundLog) -> tuple[int, int]:
    """No drafts at all."""
    return 0, 0


def first(count: int) -> Policy:
    """Draft one stage and verify its first `count` drafts. (A shorter block may draft cheaper than the logged one.)"""
    return lambda r: (1, min(count, r.block))


def gate(threshold: float) -> Policy:
    """DLoop's gate: go on while the latest block's summed log-probability is at least `threshold`."""

    def policy(r: RoundLog) -> tuple[int, int]:
        stages = 1
        while stages < r.stages and sum(r.log_q[(stages - 1) * r.block : stages * r.block]) >= threshold:
            stages += 1
        return stages, stages * r.block

    return policy


def oracle_gate(r: RoundLog) -> tuple[int, int]:
    """Go on exactly while the latest block will be accepted whole (DLoop's upper bound): the first block with a
    mismatch is still verified."""
    stages = 1
    while stages < r.stages and r.accepted >= stages * r.block:
        stages += 1
    return stages, stages * r.block


def confidence_threshold(threshold: float) -> Policy:
    """Verify one stage up to the first draft whose confidence is below `threshold`."""
    cut = math.log(threshold / (1 - threshold)) if 0 < threshold < 1 else -math.inf

    def policy(r: RoundLog) -> tuple[int, int]:
        logits = (r.confidence or [])[: r.block]
        return 1, next((k for k, z in enumerate(logits) if z < cut), r.block)

    return policy
