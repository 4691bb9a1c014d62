"""Which rows of a round copy, how much of it, and whether the others draft: most expected tokens per second.

It looks at what was settled before the round (lengths of matches, earlier rounds, measured costs), never at a draft, so
every verification stays exact.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """`copies` [A] tokens of each row's copy to verify, 0 where it doesn't copy; `drafts`: whether the others draft."""

    copies: list[int]
    drafts: bool


def choose(
    copies: Sequence[Sequence[float]],
    drafts: Sequence[float],
    verify: Callable[[int], float],
    draft_seconds: float,
    optional: bool,
) -> Choice:
    """The best of all ways to share a round whose forward is as wide as its longest row.

    For every width, each row takes what it is expected to gain most from: its copy, cut to the width, or the drafter's
        block.

    Args:
        copies: per row the chances that tokens 1..n of its copy are all accepted; empty where nothing matched.
        drafts: chances that drafts 1..k of the drafter are all accepted; empty where there is no drafter.
        verify: width (tokens per row, the anchor included) -> seconds of the target's forward.
        draft_seconds: of drafting a block.
        optional: whether a round may leave the drafter out though a row doesn't copy.
    """
    rows = len(copies)
    gains = [_running(chances) for chances in copies]
    block = _running(drafts)
    best, choice = 0.0, Choice([0] * rows, bool(drafts))
    for drafting in (False, True) if drafts else (False,):
        least = len(drafts) if drafting else 0
        for width in range(least, max(least, *(len(c) for c in copies)) + 1):
            lengths = [min(width, len(c)) for c in copies]
            if drafting:
                lengths = [n if gain[n] > block[-1] else 0 for n, gain in zip(lengths, gains)]
            if not optional and bool(drafts) and drafting == all(lengths):
                continue
            expected = rows + sum(gain[n] if n or not drafting else block[-1] for n, gain in zip(lengths, gains))
            rate = expected / (verify(1 + width) + drafting * draft_seconds)
            if rate > best:
                best, choice = rate, Choice(lengths, drafting)
    return choice


def _running(chances: Sequence[float]) -> list[float]:
    """Expected accepted tokens of 0, 1, 2, ... drafts."""
    sums = [0.0]
    for chance in chances:
        sums.append(sums[-1] + chance)
    return sums
