"""Is the text with a drafter the text without it? Where not, was it a near tie that rounding may turn either way?

A target fed several tokens at once uses other kernels than one fed a single token. In float32 and float64 that never
changes a greedy text; in bfloat16 near ties flip, in plain decoding just as well (another batch size is enough).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hf_dspark.decoding.selfcheck import SelfCheck, self_check

# A flip is a near tie if the logits differ by less than this part of the larger one.
NEAR_TIE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass
class Divergence:
    """The first token that differs: its index among the generated ones, plain decoding's choice and ours (None where
    the text has ended), the target's logits of both there (from one forward over the common text), and their gap, also
    as a part of the larger one."""

    index: int
    plain: int | None
    ours: int | None
    plain_logit: float
    our_logit: float
    near_tie: bool

    @property
    def gap(self) -> float:
        return self.plain_logit - self.our_logit

    @property
    def relative(self) -> float:
        return abs(self.gap) / max(abs(self.plain_logit), abs(self.our_logit), 1e-12)


@dataclass
class Exactness:
    """Per prompt the first divergence, or None; `tokens` compared in all. `verdict`: `"exact"`, `"near ties"` or
    `"different"`, the last of which is a bug, or a target whose `self_check` says that its forward isn't causal."""

    divergences: list[Divergence | None]
    tokens: int
    dtype: str
    self_check: SelfCheck

    @property
    def verdict(self) -> str:
        found = [d for d in self.divergences if d is not None]
        if not found:
            return "exact"
        return "near ties" if all(d.near_tie for d in found) else "different"


@torch.no_grad()
def check_exactness(
    target,
    drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    speculation=None,
    progress: Callable[[int], None] | None = None,
) -> Exactness:
    """Compare greedy texts with and without `drafter`, one prompt (token ids) at a time.

    A target that fails the self-check is compared all the same (`trust_target`), so that its differences show.

    Args:
        speculation ([`SpeculationConfig`], *optional*): knobs of the call; the drafter's stored ones by default.
        progress (*optional*): called with the number of prompts compared, after each.
    """
    divergences, tokens, found = [], 0, self_check(target)
    if not found.passed:
        speculation = replace(speculation or drafter.speculation, trust_target=True)
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=target.device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
        plain = target.generate(ids, **options)[0]
        knobs = {} if speculation is None else {"speculation": speculation}
        ours = target.generate(ids, assistant_model=drafter, **options, **knobs)[0]
        tokens += len(plain) - len(prompt)
        divergences.append(_first_divergence(target, plain, ours, len(prompt)))
        if progress is not None:
            progress(len(divergences))
    return Exactness(divergences, tokens, str(target.dtype).removeprefix("torch."), found)


def _first_divergence(target, plain: torch.Tensor, ours: torch.Tensor, start: int) -> Divergence | None:
    n = min(len(plain), len(ours))
    differs = (plain[:n] != ours[:n]).nonzero()
    if not len(differs):
        if len(plain) == len(ours):
            return None
        a, b = (int(text[n]) if len(text) > n else None for text in (plain, ours))
        return Divergence(n - start, a, b, math.nan, math.nan, False)  # one of them ended: no tie can do that
    at = int(differs[0])
    logits = target(input_ids=plain[None, :at]).logits[0, -1].float()
    a, b = int(plain[at]), int(ours[at])
    found = Divergence(at - start, a, b, logits[a].item(), logits[b].item(), False)
    found.near_tie = found.relative < NEAR_TIE.get(target.dtype, 0.0)
    return found
