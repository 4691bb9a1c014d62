"""How many drafts of each row to verify: pure rules over confidences, exact under `ratio` and `block` verification.

`confidence[b, k]` is the chance that draft k is accepted if the drafts before it are. It may depend on those drafts,
on q_k as a whole and on the past, not on the drawn x_k. Then a rule is exact iff "draft k is verified" is decided by
confidences 0..k, of all rows, alone: every rule here walks the candidates in an order in which whatever depends on x_k
comes after draft k.

All rules take ragged candidates: row b offers `lengths[b]` of the K drafts (a chain of several stages is one long
row), a number that must not depend on the drafts it leaves out. Latencies are callables from a step's tokens (anchors
included) to seconds, such as `CostTable.curve(...)`.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, zip_longest

import torch
from torch import Tensor


def confidence_prefix(
    confidence: Tensor, threshold: float, lengths: Tensor | None = None, cumulative: bool = False
) -> Tensor:
    """Drafts before the first one whose confidence is below `threshold` (DSpark's static rule, arXiv 2607.05147).

    Args:
        confidence: `[B, K]` in [0, 1].
        threshold: in [0, 1]; 0 keeps everything.
        lengths: `[B]` candidates per row, default K.
        cumulative: compare the running product instead.

    Returns:
        `[B]` lengths on the same device; no synchronisation.
    """
    score = confidence.cumprod(-1) if cumulative else confidence
    keep = (score >= threshold).long().cumprod(-1).sum(-1)
    return keep if lengths is None else torch.minimum(keep, lengths.to(keep))


def survival(confidence: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Chance that drafts 1..k are all accepted: [B, K], float64, CPU, never rising along a row, 0 beyond `lengths`."""
    c = confidence.detach().to("cpu", torch.float64)
    if lengths is not None:
        c = c.masked_fill(torch.arange(c.shape[1]) >= lengths.cpu()[:, None], 0.0)
    if not ((c >= 0) & (c <= 1)).all():
        raise ValueError(
            f"confidences range from {c.min():.3g} to {c.max():.3g}, and a survival is a product of probabilities: "
            "pass numbers in [0, 1], e.g. the sigmoid of the confidence logits."
        )
    return c.cumprod(-1)


def algorithm1(
    confidence: Tensor, latency: Callable[[float], float], lengths: Tensor | None = None, padded: bool = False
) -> Tensor:
    """DSpark's hardware-aware prefix scheduler (arXiv 2607.05147, Algorithm 1): admit drafts by falling survival while
    expected tokens per second strictly rise.

    The first candidate that does not pay ends the search; looking further is what would make it inexact. It finds the
    best lengths whenever the rate rises and then falls along the way, so give it a non-decreasing latency
    (`LatencyCurve.isotonic`). Equal survivals go by depth, then row.

    Args:
        confidence: `[B, K]` in [0, 1], B active rows.
        latency: tokens in the step -> seconds, draft time included.
        lengths: `[B]` candidates per row, default K.
        padded: the forward is padded to the longest row, so one more position for every row is the unit that is
            admitted.

    Returns:
        `[B]` drafts to verify, 0..lengths.
    """
    a = survival(confidence, lengths)
    rows = len(a)
    chosen = torch.zeros(rows, dtype=torch.long)
    if padded:
        steps = [(column.sum().item(), rows, (column > 0).long()) for column in a.T if column.any()]
    else:
        unit = torch.eye(rows, dtype=torch.long)
        steps = [(gain, 1, unit[row]) for gain, row in _ranked(a)]
    tokens = emitted = rows
    best = emitted / latency(tokens) if rows else 0.0
    for gain, added, grow in steps:
        tokens, emitted = tokens + added, emitted + gain
        rate = emitted / latency(tokens)
        if not rate > best:
            break
        best, chosen = rate, chosen + grow
    return chosen.to(confidence.device)


def lookahead(
    confidence: Tensor,
    expected: Sequence[float],
    latency: Callable[[float], float],
    rate: float,
    lengths: Tensor | None = None,
    room: Sequence[int] | None = None,
    stage: int | None = None,
) -> int:
    """Drafts per row worth verifying where the forward is padded to the longest row: one more position while some
    length from there on is expected to gain more tokens than its time is worth (ours; [`algorithm1`] looks one position
    ahead, and so stops at an expensive first draft although three together would pay).

    What lies ahead is foreseen from earlier rounds and from what was settled before drafting: later confidences, stop
    tokens, cuts and further stages all depend on the draft that is judged. So the rule is exact on any latency.

    Args:
        confidence: `[B, K]` in [0, 1].
        expected: chances that draft k is accepted if the drafts before it are, from earlier rounds; of whole stages.
        latency: tokens in the step -> seconds.
        rate: tokens that a second is worth, over all rows.
        lengths: `[B]` candidates per row, default K.
        room: `[B]` most drafts of each row, settled before drafting; default no limit.
        stage: drafts of a stage, beyond whose end nothing is foreseen; default all that are `expected`.
    """
    a = survival(confidence, lengths)
    rows, drafts = a.shape
    stage, limit = stage or len(expected), [len(expected)] * rows if room is None else room
    seconds = [latency(rows * (1 + k)) for k in range(len(expected) + 1)]
    for k, alive in enumerate(a.T.tolist()):
        gain, best = 0.0, -math.inf
        for last in range(k, (k // stage + 1) * stage):
            if last > k:
                alive = [x * expected[last] if most > last else 0.0 for x, most in zip(alive, limit, strict=True)]
            gain += sum(alive)
            best = max(best, gain - rate * (seconds[last + 1] - seconds[k]))
        if not best > 0:
            return k
    return drafts


def throughput(
    confidence: Tensor,
    chosen: Tensor,
    latency: Callable[[float], float],
    lengths: Tensor | None = None,
    padded: bool = False,
) -> float:
    """The schedulers' objective: expected tokens per second when `chosen` `[B]` drafts are verified, bonus tokens
    included."""
    a = survival(confidence, lengths)
    chosen = chosen.cpu()
    emitted = len(a) + a[torch.arange(a.shape[1]) < chosen[:, None]].sum().item()
    tokens = len(a) * (1 + int(chosen.max())) if padded else len(a) + int(chosen.sum())
    return emitted / latency(tokens)


def capacity(
    old_confidence: Tensor,
    latency: Callable[[float], float],
    lengths: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> int:
    """Drafts worth verifying over the whole batch: global maximum of the expected rate, no early stop (arXiv
    2607.05147, 5.2).

    Exact only with confidences of an EARLIER round: on the current ones a late candidate would decide about a draft
    before it.

    Args:
        old_confidence: `[B, K]` of a finished round.
        latency: tokens in the step -> seconds; may be jagged.
        sizes: captured step sizes; the step is rounded up to the next one, which `allocate` fills with the next-ranked
            drafts.
    """
    a = survival(old_confidence, lengths)
    return _best_count([gain for gain, _ in _ranked(a)], len(a), latency, sizes)


def allocate(confidence: Tensor, count: int, lengths: Tensor | None = None) -> Tensor:
    """The `count` drafts with the highest current survival, as lengths `[B]` (the second half of the asynchronous
    form)."""
    a = survival(confidence, lengths)
    return _allocate(a, count).to(confidence.device)


class LaggedScheduler:
    """The asynchronous form with its memory: how much to verify comes from survivals `lag` rounds old, what to verify
    from current ones.

    A row that has no old survivals yet is judged by a running mean over all rows. Before there is any, everything is
    verified.

    Args:
        lag: rounds between a confidence and the capacity it sets, at least 1 (2 hides the scheduling behind the
            forward).
        decay: of the running mean, per round.
        sizes: as in `capacity`.
    """

    def __init__(self, lag: int = 2, decay: float = 0.9, sizes: Sequence[int] | None = None):
        if lag < 1:
            raise ValueError(
                f"lag={lag} would let a draft decide about itself, which biases the output: set at least 1."
            )
        self.lag, self.decay, self.sizes = lag, decay, sizes
        self._recent: dict[Hashable, deque] = {}
        self._mean: list[float] | None = None

    def __call__(
        self,
        confidence: Tensor,
        streams: Sequence[Hashable],
        latency: Callable[[float], float],
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Lengths `[B]` for this round; `streams[b]` names the request in row b across rounds."""
        a = survival(confidence, lengths)
        recent = {s: self._recent.get(s, deque(maxlen=self.lag)) for s in streams}
        old = {s: list(past[0]) for s, past in recent.items() if len(past) == self.lag}
        if old:
            mean = [sum(column) / len(old) for column in zip_longest(*old.values(), fillvalue=0.0)]
            pairs = zip_longest(self._mean or mean, mean, fillvalue=0.0)
            self._mean = [self.decay * x + (1 - self.decay) * y for x, y in pairs]
        count = a.numel()
        if self._mean is not None:
            gains = sorted((x for s in streams for x in old.get(s, self._mean) if x > 0), reverse=True)
            count = _best_count(gains, len(a), latency, self.sizes)
        for stream, row in zip(streams, a.tolist(), strict=True):
            recent[stream].append(row)
        self._recent = recent  # whoever left is forgotten
        return _allocate(a, count).to(confidence.device)


def _ranked(a: Tensor) -> list[tuple[float, int]]:
    """Candidates (survival, row), best first. On ties depth goes before row, so that a draft never precedes the one it
    follows, and nothing in the key depends on a token's value."""
    order = sorted((-x, j, r) for r, row in enumerate(a.tolist()) for j, x in enumerate(row) if x > 0)
    return [(-x, r) for x, _, r in order]


def _allocate(a: Tensor, count: int) -> Tensor:
    chosen = [r for _, r in _ranked(a)[: max(count, 0)]]
    return torch.bincount(torch.tensor(chosen, dtype=torch.long), minlength=len(a))


def _best_count(
    gains: Sequence[float], rows: int, latency: Callable[[float], float], sizes: Sequence[int] | None
) -> int:
    """Number of leading gains with the highest rate; the fewest on a tie."""
    emitted = list(accumulate(gains, initial=float(rows)))
    count = max(range(len(emitted)), key=lambda k: emitted[k] / latency(rows + k))
    return min((s for s in sizes or () if s >= rows + count), default=rows + count) - rows
