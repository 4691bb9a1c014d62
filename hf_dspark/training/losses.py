"""The losses of block drafters, as sums and counts: whoever knows all micro-batches and processes divides."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .anchors import block_weights


@dataclass(frozen=True)
class Objective:
    """What is minimised: ce * CE + distill * ((1 - r) * KL + r * TV) + confidence * BCE (DSpark, section 3.4).

    CE is that of the true token, KL = sum p log(p/q) over the draft vocabulary, TV = |q - p|_1 over the whole vocabulary (0..2).
    r runs from 0 to 1 over the first `kl_until` of the training: forward KL learns fast while q is far from p, TV is what
    acceptance is. `kl_until=0` is TV from the start, as published. The confidence is trained on 1 - TV / 2.
    """

    ce: float = 0.1
    distill: float = 0.9
    confidence: float = 1.0
    kl_until: float = 0.75
    decay: float | None = 4.0
    detach_confidence: bool = True

    def tv_share(self, progress: float) -> float:
        """r after `progress` (0..1) of the training."""
        return min(1.0, progress / self.kl_until) if self.kl_until > 0 else 1.0


@dataclass
class Blocks:
    """M blocks of K drafts, flat, and all their losses need.

    Attributes:
        hidden: [M, K, D] final-normed states; `first` [M, D] slot 0 where it doesn't draft, or None.
        prev, labels: [M, K] target ids: the true token before each draft, and at it (-100 where not supervised).
        target_hidden: [M, K, Dt] the target's final-normed states that predict those tokens.
        log_normalizer, top: [M, K] the target's log-sum-exp over its whole vocabulary, and its most likely token.
    """

    hidden: torch.Tensor
    first: torch.Tensor | None
    prev: torch.Tensor
    labels: torch.Tensor
    target_hidden: torch.Tensor
    log_normalizer: torch.Tensor
    top: torch.Tensor

    def split(self, size: int) -> list["Blocks"]:
        parts = [[None] * (-(-len(self.prev) // size)) if x is None else x.split(size) for x in vars(self).values()]
        return [Blocks(*part) for part in zip(*parts, strict=True)] or [self]


def block_losses(drafter, target_logits, blocks: Blocks, objective: Objective, progress: float, chunk: int) -> dict:
    """Sums over `blocks`; divide those of losses by "weight", "accepted" by "supervised", "tau" and "greedy_tau" by "blocks".

    Args:
        drafter: gives `block_logits`, `draft_labels`.
        target_logits: maps target states [..., Dt] to logits [..., Vd] of the drafted ids.
        progress (`float`): 0..1, share of the training done.
        chunk (`int`): blocks whose logits exist at once; with more blocks, logits are computed again in the backward pass.

    Returns:
        `dict[str, torch.Tensor]`: "loss" (with gradient), "ce", "kl", "tv", "confidence", "confidence_error", "weight" [],
        "accepted" and "supervised" [K], "tau", "greedy_tau", "blocks" [].
    """

    def sums(part: Blocks):
        return _chunk_losses(drafter, target_logits, part, objective, objective.tv_share(progress))

    parts = blocks.split(chunk)
    if len(parts) == 1:
        return sums(parts[0])
    again = torch.is_grad_enabled()
    done = [checkpoint(sums, part, use_reentrant=False) if again else sums(part) for part in parts]
    return {key: sum(d[key] for d in done) for key in done[0]}


def _chunk_losses(drafter, target_logits, blocks, objective, share):
    _, logits, confidence = drafter.block_logits(
        blocks.hidden, blocks.prev, blocks.first, detach_confidence=objective.detach_confidence
    )
    weight = block_weights(blocks.labels, objective.decay).to(logits.dtype)
    log_q, q = logits.log_softmax(-1), logits.softmax(-1)
    with torch.no_grad():
        log_p = target_logits(blocks.target_hidden).to(logits.dtype) - blocks.log_normalizer[..., None].to(logits.dtype)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        outside = (1 - p.sum(-1)).clamp(min=0)

    tv = (q - p).abs().sum(-1) + outside  # q is 0 outside the draft vocabulary
    kl = -(p * log_q).sum(-1) - entropy
    labels = drafter.draft_labels(blocks.labels)
    ce = F.nll_loss(log_q.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none").view_as(labels)
    loss = objective.ce * ce + objective.distill * ((1 - share) * kl + share * tv)

    accept = (1 - tv.detach() / 2).clamp(0, 1)
    bce = torch.zeros_like(accept)
    if confidence is not None:
        bce = F.binary_cross_entropy_with_logits(confidence.to(accept.dtype), accept, reduction="none")
        loss = loss + objective.confidence * bce
    with torch.no_grad():
        valid = blocks.labels != -100
        match = drafter.target_ids()[log_q.argmax(-1)] == blocks.top
        error = torch.zeros_like(accept) if confidence is None else (confidence.sigmoid() - accept).abs()
        # A hole can't precede a supervised draft, so the prefix product over valid drafts is the block's own.
        survive = [(x * valid).cumprod(-1).sum() + len(x) for x in (accept, match.to(accept.dtype))]
    return {
        "loss": (loss * weight).sum(),
        **{name: (x.detach() * weight).sum() for name, x in (("ce", ce), ("kl", kl), ("tv", tv), ("confidence", bce))},
        "confidence_error": (error * weight).sum(),
        "weight": weight.sum(),
        "accepted": (accept * valid).flatten(0, -2).sum(0),
        "supervised": valid.flatten(0, -2).sum(0).to(weight.dtype),
        "tau": survive[0],
        "greedy_tau": survive[1],
        "blocks": torch.tensor(float(len(accept)), device=accept.device, dtype=weight.dtype),
    }
