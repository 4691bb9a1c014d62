"""What drafting and verifying cost here, for a real target and drafter: `scheduling.profile` with the two behind it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import LogitsProcessorList

from hf_dspark.decoding.costs import profile_path
from hf_dspark.decoding.target import FeatureTap, Target
from hf_dspark.drafting.proposer import Context, Proposer, Sampling
from hf_dspark.modeling import SpeculationConfig
from hf_dspark.scheduling.cost import CostTable, machine_key, profile
from hf_dspark.verification.probabilities import Scorer


class _Bench:
    """A batch of `rows` random prompts of `context` tokens, prefilled in both models; every call leaves it as it was.

    Rows differ in length by a token or two, as they do after a round: equal ones need no mask, and take other kernels.
    """

    def __init__(self, target: Target, drafter, rows: int, context: int):
        self.target, self.rows, self.context = target, rows, context
        vocabulary, device = target.config.vocab_size, target.device
        generator = torch.Generator().manual_seed(0)
        self.block = drafter.config.max_block if drafter is not None else 0
        ids = torch.randint(vocabulary, (rows, context + self.block + 2), generator=generator).to(device)
        self.cache = target.new_cache(rows)
        target.forward(ids[:, :context], self.cache, [context] * rows, torch.tensor([context - 1], device=device))
        self.cache.advance(torch.tensor([context - i % 3 for i in range(rows)]).clamp_min(1))
        self.ids = ids
        if drafter is not None:
            self.features = target.tap.features(drafter.device)
            self.proposer = Proposer(drafter, SpeculationConfig(), torch.zeros(rows, dtype=torch.long))
            self.proposer.observe(self.features, ids[:, 1 : context + 1], torch.full((rows,), context))

    def verify(self, width: int) -> None:
        tokens = self.ids[:, -1:].expand(-1, width)
        self.target.forward(tokens, self.cache, [self.context + width] * self.rows)

    def draft(self) -> None:
        """One stage, and the extension of the drafter's context that every round does."""
        room = [self.block] * self.rows
        scorer = Scorer(LogitsProcessorList(), list(self.ids), list(self.ids))
        lengths = [self.context + 1] * self.rows
        rows = list(range(self.rows))
        sampling = Sampling(rows, rows, scorer, None, frozenset())
        anchors = self.ids[:, self.context]
        self.proposer.propose(Context(rows, anchors, self.ids, lengths, room, [sampling]))
        cache, n = self.proposer.cache, min(self.block + 1, self.context)
        mark, every = cache.mark(), torch.ones(self.rows, n, dtype=torch.bool)
        self.proposer.drafter.extend(cache, self.features[:, :n], self.ids[:, 1 : n + 1], every)
        cache.rollback(mark)


@torch.no_grad()
def profile_pair(
    target,
    drafter=None,
    rows: Sequence[int] = (1, 4),
    widths: Sequence[int] = (1, 2, 4, 8, 16),
    contexts: Sequence[int] = (256,),
    repeats: int = 9,
    warmup: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> CostTable:
    """Median seconds of a target forward, through the cache and masks of decoding, and of a drafting stage with its
    overhead.

    Args:
        rows, widths, contexts: batch sizes, tokens per row, and tokens in the cache to measure at. repeats, warmup:
            timed and untimed calls per point. progress: called with (points done, points in all).
    """
    benches: dict[tuple[int, int], _Bench] = {}
    points: list[tuple] = []
    total = len(set(rows)) * len(set(contexts)) * (len(set(widths)) + (drafter is not None))

    with FeatureTap(target, drafter.config.target_layer_ids if drafter is not None else [0]) as tap:
        model = Target(target, tap)

        def bench(r, context, point) -> _Bench:
            if point not in points:
                points.append(point)
                if progress is not None:
                    progress(len(points) - 1, total)
            if (r, context) not in benches:
                benches.clear()  # one cache at a time
                benches[r, context] = _Bench(model, drafter, r, context)
            return benches[r, context]

        return profile(
            lambda r, tokens, context: bench(r, context, (r, context, tokens)).verify(tokens // r),
            None if drafter is None else lambda r, context: bench(r, context, (r, context, "draft")).draft(),
            rows=rows, widths=widths, contexts=contexts, repeats=repeats, warmup=warmup, sync=_sync(target.device),
            key=_key(target, drafter),
        )  # fmt: skip


def cached_profile(
    target, drafter, path: str | Path | None = None, again: bool = False, **options
) -> tuple[CostTable, Path]:
    """The table of this machine, pair, dtype and thread count, measured if it isn't there (or `again`), and where it
    lies.

    The default path is where `scheduler="auto"` and `loop_gate="auto"` look for it.
    """
    path = Path(path or profile_path(drafter, target))
    if path.exists() and not again:
        return CostTable.load(path, _key(target, drafter)), path
    table = profile_pair(target, drafter, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    table.save(path)
    return table, path


def _key(target, drafter) -> dict:
    names = [m.config.name_or_path or type(m).__name__ for m in (target, drafter) if m is not None]
    return machine_key("+".join(names), target.dtype, str(target.device))


def _sync(device: torch.device) -> Callable[[], None] | None:
    kinds = {"cuda": torch.cuda, "mps": getattr(torch, "mps", None), "xpu": getattr(torch, "xpu", None)}
    return kinds[device.type].synchronize if device.type in kinds else None
