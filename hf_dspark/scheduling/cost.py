"""What a step costs on this machine: measured once (`profile`, `CostTable`) or while decoding (`OnlineCost`).

A step drafts and then runs the target over `tokens` positions in all: `rows` anchors plus the drafts. Seconds
everywhere. What is interpolated is always the latency, never its inverse. Decisions that rest on timings are exact,
but they do not repeat.
"""

import json
import os
import platform
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import torch


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds of a step by its number of tokens; callable, as the prefix rules want it.

    Linear between the knots, the last slope after them, flat before them; with `staircase` the next knot's value
    between them, for engines that pad a step to the next captured size. `LatencyCurve((1,), (1.0,))` is the "nothing
    was measured" curve: every token is free, so nothing is pruned. `weights`: how far each knot is to be trusted, e.g.
    its number of measurements; equal without.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    staircase: bool = False
    weights: tuple[float, ...] | None = None

    def __call__(self, tokens: float) -> float:
        if self.staircase and tokens <= self.tokens[-1]:
            return self.seconds[bisect_left(self.tokens, tokens)]
        return _interpolate(self.tokens, self.seconds, tokens)

    def isotonic(self) -> "LatencyCurve":
        """The closest non-decreasing curve in weighted least squares (pool adjacent violators): a longer step is
        never really cheaper, and a dent from noise would mislead whoever looks for the length that pays."""
        pools: list[tuple[float, float, int]] = []  # mean, weight, knots
        for seconds, weight in zip(self.seconds, self.weights or [1.0] * len(self.seconds), strict=True):
            pools.append((seconds, weight, 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (b, v, m), (a, w, n) = pools.pop(), pools.pop()
                pools.append(((a * w + b * v) / (w + v), w + v, n + m))
        return replace(self, seconds=tuple(mean for mean, _, n in pools for _ in range(n)))

    def as_staircase(self) -> "LatencyCurve":
        return replace(self, staircase=True)


@dataclass(frozen=True)
class CostTable:
    """Measured seconds on a grid of rows x context lengths x widths, a width being the tokens of one row in a step.

    Args:
        rows, contexts, widths: increasing knots.
        verify: seconds of a target forward, `verify[rows][context][width]`.
        draft: seconds of one drafting stage, `draft[rows][context]`; zeros without a drafter.
        key: what the numbers hold for, see `machine_key`.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    verify: tuple[tuple[tuple[float, ...], ...], ...]
    draft: tuple[tuple[float, ...], ...]
    key: dict = field(default_factory=dict)

    def verify_seconds(self, tokens: float, rows: int = 1, context: float = 0) -> float:
        """Seconds of a target forward over `tokens` positions in all, shared by `rows` rows."""
        width = tokens / rows
        return _interpolate(self.rows, [self._at(c, context, width) for c in self.verify], rows)

    def draft_seconds(self, rows: int = 1, context: float = 0) -> float:
        """Seconds of one drafting stage."""
        return _interpolate(self.rows, [_interpolate(self.contexts, d, context) for d in self.draft], rows)

    def curve(self, rows: int = 1, context: float = 0, stages: int = 1) -> LatencyCurve:
        """Step latency for a fixed number of rows: `stages` drafting stages and one verification."""
        tokens = tuple(rows * w for w in self.widths)
        draft = stages * self.draft_seconds(rows, context)
        return LatencyCurve(tokens, tuple(draft + self.verify_seconds(t, rows, context) for t in tokens))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, key: dict | None = None) -> "CostTable":
        """Read a table; with `key`, refuse one that was measured elsewhere."""
        values = json.loads(Path(path).read_text(), object_hook=_tuples)
        if key is not None and key != values["key"]:
            raise ValueError(
                f"{path} was measured under {values['key']}, this is {key}, and seconds don't carry over: profile "
                "again, or pass key=None to use them anyway."
            )
        return cls(**values)

    def _at(self, contexts, context, width):
        return _interpolate(self.contexts, [_interpolate(self.widths, seconds, width) for seconds in contexts], context)


def machine_key(model: str, dtype: torch.dtype | str, device: str = "cpu") -> dict[str, str | int]:
    """What a measurement holds for: this machine, the model, its dtype, the threads."""
    cuda = str(device).startswith("cuda")
    machine = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    threads = 0 if cuda else torch.get_num_threads()
    return {
        "machine": f"{machine} x {os.cpu_count()}",
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
    }


def profile(
    run: Callable[[int, int, int], None],
    draft: Callable[[int, int], None] | None = None,
    *,
    rows: Sequence[int] = (1,),
    widths: Sequence[int] = (1, 2, 4, 8, 16),
    contexts: Sequence[int] = (256,),
    repeats: int = 20,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    sync: Callable[[], None] | None = None,
    key: dict | None = None,
) -> CostTable:
    """Median latencies of a target forward and of a drafting stage on a grid.

    Args:
        run: `run(rows, tokens, context)` does one target forward over `tokens` positions in all (`rows * width`)
            behind `context` cached ones per row.
        draft: `draft(rows, context)` does one drafting stage.
        widths: tokens per row; 1 is plain decoding.
        repeats, warmup: timed and untimed calls per grid point.
        sync: waits for the device, e.g. `torch.cuda.synchronize`.
    """

    def seconds(call, *args):
        for _ in range(warmup):
            call(*args)
        times = []
        for _ in range(repeats):
            if sync:
                sync()
            start = clock()
            call(*args)
            if sync:
                sync()
            times.append(clock() - start)
        return median(times)

    rows, widths, contexts = (tuple(sorted(set(grid))) for grid in (rows, widths, contexts))
    verify = tuple(tuple(tuple(seconds(run, r, r * w, c) for w in widths) for c in contexts) for r in rows)
    drafts = tuple(tuple(seconds(draft, r, c) if draft else 0.0 for c in contexts) for r in rows)
    return CostTable(rows, contexts, widths, verify, drafts, key or {})


# Shape of a step's cost before anything is measured, in units of a plain step: each further token of a row adds 4 %,
# and a drafting stage takes 15 %. Both are what small models on a CPU show; on a GPU a token is cheaper, and the first
# rounds say so.
GENERIC = CostTable((1,), (0,), (1, 32), (((1.0, 2.24),),), ((0.15,),))


class OnlineCost:
    """Step costs measured while decoding; the same methods as `CostTable`, usable before the first measurement.

    Every measurement is kept as its ratio to the prior, so the prior gives the shape (over rows, widths and context)
    and the data the height. A bucket, one (rows, width), answers with the median of its latest `window` ratios, which
    a stray scheduler slice or a first-call compilation cannot move; between buckets ratios are interpolated, and rows
    never seen borrow the nearest ones. A bucket with fewer than `SETTLED` measurements counts only while its rows have
    no other: one slow sample would make its width look expensive, and an expensive width is not measured again.

    Args:
        prior: a `CostTable` of this machine, or the generic shape.
        window: measurements remembered per bucket.
        recursive: drafting costs grow with the number of drafts (EAGLE-3, MTP) rather than being one block's.
    """

    SETTLED = 3
    UNSEEN = 0.01  # weight of a width that the prior alone knows

    def __init__(self, prior: CostTable = GENERIC, window: int = 32, recursive: bool = False):
        self.prior, self.window, self.recursive = prior, window, recursive
        self._verify: dict[int, dict[float, float]] = {}  # rows -> width -> median ratio
        self._draft: dict[int, dict[float, float]] = {}  # rows -> drafts per row -> median ratio
        self._samples: dict[tuple, deque] = {}
        self._early: dict[tuple, bool] = {}  # (kind, rows) without a settled bucket

    def record_verify(self, seconds: float, tokens: int, rows: int = 1, context: float = 0) -> None:
        """One target forward over `tokens` positions in all."""
        width = round(4 * tokens / rows) / 4  # rows of different widths would have a bucket each
        self._record("verify", rows, width, seconds / self.prior.verify_seconds(tokens, rows, context))

    def record_draft(self, seconds: float, drafts: int = 1, rows: int = 1, context: float = 0) -> None:
        """One drafting stage of `drafts` tokens per row."""
        self._record("draft", rows, drafts, seconds / self._prior_draft(drafts, rows, context))

    def plain_steps(self) -> int:
        """How many steps of one token per row were measured (up to the window)."""
        return sum(len(s) for (kind, _, width), s in self._samples.items() if kind == "verify" and width == 1)

    def draft_stages(self) -> int:
        """How many drafting stages were measured (up to the window)."""
        return sum(len(s) for (kind, _, _), s in self._samples.items() if kind == "draft")

    def verify_seconds(self, tokens: float, rows: int = 1, context: float = 0) -> float:
        return self.prior.verify_seconds(tokens, rows, context) * _ratio(self._verify, rows, tokens / rows, 1.0)

    def draft_seconds(self, rows: int = 1, context: float = 0, drafts: int = 1) -> float:
        """Seconds of a stage of `drafts` tokens; before any was measured, the prior's share of a plain step."""
        step = _ratio(self._verify, rows, 1, 1.0)
        return self._prior_draft(drafts, rows, context) * _ratio(self._draft, rows, drafts, step)

    def curve(self, rows: int = 1, context: float = 0, stages: int = 1, drafts: int = 1) -> LatencyCurve:
        """Step latency for a fixed number of rows: `stages` drafting stages of `drafts` tokens and one
        verification. Knots weigh what was measured there: a width that was seen thrice, on a busy machine, gives way to
        wider ones seen often."""
        widths = sorted({*self.prior.widths, *(_nearest(self._verify, rows) or ())})
        draft = stages * self.draft_seconds(rows, context, drafts)
        tokens = tuple(rows * w for w in widths)
        seconds = tuple(draft + self.verify_seconds(t, rows, context) for t in tokens)
        weights = tuple(len(self._samples.get(("verify", rows, w), ())) or self.UNSEEN for w in widths)
        return LatencyCurve(tokens, seconds, weights=weights)

    def _prior_draft(self, drafts, rows, context):
        # A table that was measured without a drafter has no draft times.
        stage = self.prior.draft_seconds(rows, context) or 0.15 * self.prior.verify_seconds(rows, rows, context)
        return stage * (drafts if self.recursive else 1)

    def _record(self, kind, rows, x, ratio):
        samples = self._samples.setdefault((kind, rows, x), deque(maxlen=self.window))
        samples.append(ratio)
        medians, settled = self._verify if kind == "verify" else self._draft, len(samples) >= self.SETTLED
        if settled and self._early.pop((kind, rows), False):
            medians[rows] = {}
        if rows not in medians:
            self._early[kind, rows] = not settled
        if settled or self._early.get((kind, rows)):
            medians.setdefault(rows, {})[x] = median(samples)


def _nearest(table: dict, rows: int) -> dict | None:
    return table[min(table, key=lambda r: (abs(r - rows), r))] if table else None


def _ratio(table: dict, rows: int, x: float, default: float) -> float:
    """Interpolated median ratio, constant outside the measured knots: there the prior's shape is all we know."""
    knots = _nearest(table, rows)
    if not knots:
        return default
    xs = sorted(knots)
    return _interpolate(xs, [knots[k] for k in xs], min(x, xs[-1]))


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between knots, flat before the first, the last slope (never downwards) after the last."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = min(bisect_left(xs, x), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i] + (max(slope, 0.0) if x > xs[-1] else slope) * (x - xs[i])


def _tuples(values: dict) -> dict:
    def freeze(x):
        return tuple(map(freeze, x)) if isinstance(x, list) else x

    return {k: freeze(v) for k, v in values.items()}
