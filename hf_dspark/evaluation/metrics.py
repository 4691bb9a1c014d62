"""What every number we report means, each with a worked example.

A response is a list of rounds; the prefill is no round. "Pooled" counts all rounds of all responses alike, "macro"
first averages within each response. Papers differ in exactly these choices, so both are always reported.
"""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from hf_dspark.decoding.outputs import COPIED
from hf_dspark.scheduling import auroc


class Round(NamedTuple):
    """One round of one row.

    `verified` drafts the target looked at, `accepted` of them kept, `emitted` tokens (bonus included), `stages`
    drafting stages, `source` of its drafts, `reach` the most it could accept where that isn't all that was verified (a
    tree's depth). A round cut by a stop token or the budget has no bonus and counts as verified only what came before
    the cut.
    """

    verified: int
    accepted: int
    emitted: int
    stages: int = 1
    source: str = "drafter"
    reach: int | None = None

    @property
    def depth(self) -> int:
        return self.verified if self.reach is None else self.reach


def responses_of(stats) -> list[list[Round]]:
    """The rounds of a [`SpeculationStats`], one list per output row."""
    sources = stats.sources or [["drafter"] * len(row) for row in stats.draft_lengths]
    columns = (
        stats.draft_lengths,
        stats.accepted_lengths,
        stats.acceptance_lengths,
        stats.draft_stages,
        sources,
        stats.reach,
    )
    rows = [[Round(*r) for r in zip(*row, strict=True)] for row in zip(*columns, strict=True)]
    return [[r._replace(reach=None) if r.reach == r.verified else r for r in row] for row in rows]


def pooled(responses: Iterable[list[Round]]) -> list[Round]:
    """All rounds of all responses."""
    return list(chain.from_iterable(responses))


def drafted(rounds: Iterable[Round]) -> list[Round]:
    """Those that the drafter had a part in, or nobody: without copies, which say nothing about it."""
    return [r for r in rounds if r.source not in COPIED]


def by_source(rounds: Iterable[Round]) -> dict[str, dict[str, int]]:
    """Rounds, tokens emitted, drafts verified and accepted, by where the drafts came from.

    >>> by_source([Round(5, 2, 3), Round(4, 4, 5, 1, "copy")])["copy"]
    {'rounds': 1, 'emitted': 5, 'verified': 4, 'accepted': 4}
    """
    table: dict[str, dict[str, int]] = {}
    for r in rounds:
        mine = table.setdefault(r.source, dict.fromkeys(("rounds", "emitted", "verified", "accepted"), 0))
        for name, count in zip(mine, (1, r.emitted, r.verified, r.accepted)):
            mine[name] += count
    return table


def tau(rounds: Sequence[Round]) -> float:
    """Acceptance length: tokens per round, bonus included.

    >>> tau([Round(5, 2, 3), Round(5, 0, 1)])  # two accepted plus a bonus, then a bonus alone
    2.0
    """
    return _ratio(sum(r.emitted for r in rounds), len(rounds))


def tau_macro(responses: Iterable[list[Round]]) -> float:
    """Mean over responses of each response's tau (the way of DFlash); responses without a round don't count.

    >>> long, short = [Round(5, 2, 3)] * 3, [Round(5, 0, 1)]
    >>> tau(long + short), tau_macro([long, short])
    (2.5, 2.0)
    """
    taus = [tau(r) for r in responses if r]
    return _ratio(sum(taus), len(taus))


def accepted_per_round(rounds: Sequence[Round]) -> float:
    """Drafts accepted per round, bonus left out: what some papers call acceptance length.

    >>> accepted_per_round([Round(5, 2, 3), Round(5, 0, 1)])
    1.0
    """
    return _ratio(sum(r.accepted for r in rounds), len(rounds))


def acceptance_rate(rounds: Sequence[Round]) -> float:
    """Drafts accepted over drafts verified.

    >>> acceptance_rate([Round(5, 2, 3), Round(5, 0, 1)])
    0.2
    """
    return _ratio(sum(r.accepted for r in rounds), sum(r.verified for r in rounds))


def verify_rate(rounds: Sequence[Round]) -> float:
    """Tokens gained over tokens fed to the target, anchors and bonus tokens included (DeepSpec's acceptance rate).

    >>> verify_rate([Round(5, 2, 3), Round(5, 1, 2)])  # (2 + 1) + (1 + 1) of 6 + 6
    0.4166666666666667
    """
    return _ratio(sum(r.accepted + 1 for r in rounds), sum(r.verified + 1 for r in rounds))


def survival(rounds: Sequence[Round]) -> list[float]:
    """At k: of the rounds that verified draft k, the share that accepted drafts 1..k.

    >>> survival([Round(2, 2, 3), Round(2, 1, 2), Round(2, 0, 1), Round(1, 1, 2)])
    [0.75, 0.3333333333333333]
    """
    return [_share(r.accepted >= k for r in rounds if r.depth >= k) for k in _positions(rounds)]


def conditional_acceptance(rounds: Sequence[Round]) -> list[float]:
    """At k: of the rounds that verified draft k and accepted all before it, the share that accepted it too.

    Its running product is the survival, where all rounds verify alike (DSpark, figure 2).

    >>> conditional_acceptance([Round(2, 2, 3), Round(2, 1, 2), Round(2, 0, 1), Round(1, 1, 2)])
    [0.75, 0.5]
    """
    return [_share(r.accepted >= k for r in rounds if r.depth >= k and r.accepted >= k - 1) for k in _positions(rounds)]


def full_acceptance(rounds: Sequence[Round], block: int) -> list[float]:
    """At stage s: of the whole blocks verified behind an accepted prefix, the share accepted whole.

    Stages that an earlier rejection took away don't count, nor do blocks cut short by a stop token or the budget.

    >>> full_acceptance([Round(4, 3, 4, 2), Round(4, 4, 5, 2), Round(2, 1, 2, 1), Round(1, 1, 2, 1)], block=2)
    [0.6666666666666666, 0.5]
    """
    stages = max((r.verified // block for r in rounds), default=0)
    return [
        _share(r.accepted >= s * block for r in rounds if r.verified >= s * block and r.accepted >= (s - 1) * block)
        for s in range(1, stages + 1)
    ]


def by_stages(rounds: Sequence[Round], seconds: Sequence[float] | None = None) -> dict[int, dict[str, float]]:
    """Rounds, tokens and time by the number of drafting stages.

    Args:
        seconds: each round's, if known.

    >>> table = by_stages([Round(2, 1, 2), Round(2, 2, 3), Round(4, 4, 5, 2)], [1.0, 1.0, 1.5])
    >>> table[1]
    {'rounds': 2, 'tokens': 5, 'token_share': 0.5, 'tau': 2.5, 'seconds_per_round': 1.0, 'seconds_per_token': 0.4}
    >>> table[2]
    {'rounds': 1, 'tokens': 5, 'token_share': 0.5, 'tau': 5.0, 'seconds_per_round': 1.5, 'seconds_per_token': 0.3}
    """
    everything, table = sum(r.emitted for r in rounds), {}
    for stages in sorted({r.stages for r in rounds}):
        picked = [i for i, r in enumerate(rounds) if r.stages == stages]
        tokens = sum(rounds[i].emitted for i in picked)
        row = {"rounds": len(picked), "tokens": tokens, "token_share": _ratio(tokens, everything)}
        row["tau"] = _ratio(tokens, len(picked))
        if seconds is not None:
            spent = sum(seconds[i] for i in picked)
            row |= {"seconds_per_round": spent / len(picked), "seconds_per_token": _ratio(spent, tokens)}
        table[stages] = row
    return table


def looped_token_share(rounds: Sequence[Round]) -> float:
    """Share of tokens from rounds of more than one drafting stage.

    >>> looped_token_share([Round(2, 1, 2), Round(2, 2, 3), Round(4, 4, 5, 2)])
    0.5
    """
    return _ratio(sum(r.emitted for r in rounds if r.stages > 1), sum(r.emitted for r in rounds))


def verifications_saved(rounds: Sequence[Round], plain: Sequence[Round]) -> float:
    """Share of verifications per token that looping saves over single-stage rounds `plain`; negative if it costs some.

    >>> verifications_saved([Round(4, 4, 5, 2), Round(4, 2, 3, 2)], [Round(2, 1, 2)] * 3)  # 2 for 8 tokens, 3 for 6
    0.5
    """
    return 1 - _ratio(tau(plain), tau(rounds))


def gate_quality(scores: Sequence[float], full: Sequence[bool], passed: Sequence[bool]) -> dict[str, float]:
    """How well a gate's score tells blocks that are accepted whole from others.

    `auroc`: chance that a whole block scores higher than another; `precision`: share of whole blocks among those that
    passed; `passed`: share that passed. DLoop, arXiv 2610.07659.

    >>> gate_quality([-0.1, -0.2, -0.9, -3.0], [True, False, True, False], [True, True, False, False])
    {'auroc': 0.75, 'precision': 0.5, 'passed': 0.5}
    """
    labels = torch.tensor([bool(f) for f in full], dtype=torch.float64)
    area = auroc(torch.tensor(scores, dtype=torch.float64), labels) if len(labels) else math.nan
    precision = _share(f for f, p in zip(full, passed, strict=True) if p)
    return {"auroc": area, "precision": precision, "passed": _share(passed)}


def speedup(baseline: Sequence[float], method: Sequence[float], samples: int = 2000, seed: int = 0) -> dict[str, float]:
    """Ratio of mean seconds per token, `baseline[i]` and `method[i]` measured on the same prompt one after the other,
    with the 95 % interval of a bootstrap over prompts.

    >>> speedup([0.2, 0.4], [0.1, 0.2])
    {'ratio': 2.0, 'low': 2.0, 'high': 2.0}
    """
    pairs = list(zip(baseline, method, strict=True))
    if not pairs:
        return dict.fromkeys(("ratio", "low", "high"), math.nan)
    draw = random.Random(seed)

    def ratio(sample):
        return _ratio(sum(a for a, _ in sample), sum(b for _, b in sample))

    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(samples))
    low, high = drawn[int(0.025 * samples)], drawn[min(int(0.975 * samples), samples - 1)]
    return {"ratio": ratio(pairs), "low": low, "high": high}


def summary(responses: Sequence[list[Round]], block: int | None = None) -> dict:
    """Everything above that needs only rounds, by name; `block` (drafts of a whole stage) adds the full acceptance.
    What tells of single drafts leaves copies out."""
    rounds = pooled(responses)
    out = {
        "rounds": len(rounds),
        "tau": tau(rounds),
        "tau_macro": tau_macro(responses),
        "accepted_per_round": accepted_per_round(rounds),
        "acceptance_rate": acceptance_rate(rounds),
        "verify_rate": verify_rate(rounds),
        "survival": survival(drafted(rounds)),
        "conditional_acceptance": conditional_acceptance(drafted(rounds)),
        "looped_token_share": looped_token_share(rounds),
        "sources": by_source(rounds),
    }
    if block:
        out["full_acceptance"] = full_acceptance(drafted(rounds), block)
    return out


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return _ratio(sum(map(bool, flags)), len(flags))


def _positions(rounds: Sequence[Round]) -> range:
    return range(1, 1 + max((r.depth for r in rounds), default=0))
