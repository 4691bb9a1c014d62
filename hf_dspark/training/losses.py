"""The losses of drafted blocks and chains, as sums and counts: whoever knows all micro-batches and processes
divides."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .anchors import block_weights


@dataclass(frozen=True)
class Objective:
    """What is minimised: ce * CE + distill * ((1 - r) * KL + r * TV) + confidence * BCE (DSpark, section 3.4).

    CE is that of the true token, KL = sum p log(p/q) over the draft vocabulary, TV = |q - p|_1 over the target's
    (0..2). r runs from 0 to 1 over the first `kl_until` of the training: forward KL learns fast while q is far from p,
    TV is what acceptance is. `kl_until=0` is TV from the start, as published. The confidence is trained on 1 - TV / 2.

    With `base_until > 0` all but the confidence's term is (1 - b) times that of the corrected logits plus b times that
    of the base logits, b falling from 1 to 0 over the first `base_until` of the training (Domino, arXiv 2605.29707).
    """

    ce: float = 0.1
    distill: float = 0.9
    confidence: float = 1.0
    kl_until: float = 0.75
    decay: float | None = 4.0
    detach_confidence: bool = True
    base_until: float = 0.0

    def tv_share(self, progress: float) -> float:
        """r after `progress` (0..1) of the training."""
        return min(1.0, progress / self.kl_until) if self.kl_until > 0 else 1.0

    def base_share(self, progress: float) -> float:
        """b after `progress` of the training."""
        return max(0.0, 1 - progress / self.base_until) if self.base_until > 0 else 0.0

    def combine(self, ce, kl, tv, progress: float) -> torch.Tensor:
        """The terms without the confidence's."""
        r = self.tv_share(progress)
        return self.ce * ce + self.distill * ((1 - r) * kl + r * tv)


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
        count = len(self.prev.split(size))
        parts = [[None] * count if x is None else x.split(size) for x in vars(self).values()]
        return [Blocks(*part) for part in zip(*parts, strict=True)]


def block_losses(drafter, target_logits, blocks: Blocks, objective: Objective, progress: float, chunk: int) -> dict:
    """Sums over `blocks`; divide those of losses by "weight", "accepted" by "supervised", "tau" and "greedy_tau" by
    "blocks".

    Args:
        drafter: gives `block_logits`, `draft_labels`.
        target_logits: maps target states [..., Dt] to logits [..., Vd] of the drafted ids.
        progress (`float`): 0..1, share of the training done.
        chunk (`int`): blocks whose logits exist at once; with more blocks, logits are computed again in the backward
            pass.

    Returns:
        `dict[str, torch.Tensor]`: "loss" (with gradient), "ce", "kl", "tv", "confidence", "confidence_error", "weight"
        [], "accepted" and "supervised" [K], "tau", "greedy_tau", "blocks" [].
    """

    def sums(part: Blocks):
        return _chunk_losses(drafter, target_logits, part, objective, progress)

    parts = blocks.split(chunk)
    if len(parts) == 1:
        return sums(parts[0])
    again = torch.is_grad_enabled()
    results = [checkpoint(sums, part, use_reentrant=False) if again else sums(part) for part in parts]
    return {key: sum(d[key] for d in results) for key in results[0]}


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Dot products [...] over the last dimension, without a tensor of products."""
    return torch.bmm(a.flatten(0, -2)[:, None], b.flatten(0, -2)[..., None]).view(a.shape[:-1])


class Divergences(torch.autograd.Function):
    """CE, KL and TV [...] of draft logits [..., Vd] against the target's, with gradients written out.

    Plain autograd makes twice as many passes over tensors of the vocabulary's size, which is where the time goes. With
    q = softmax(logits), p = exp(target_logits - log_normalizer), P = sum p, s = [q < p]: TV = 2 - 2 sum min(p, q), and
    d CE = q - onehot, d KL = P q - p, d TV = 2 q (sum(q s) - s).
    """

    @staticmethod
    def forward(ctx, logits, target_logits, log_normalizer, labels):
        q = logits.softmax(-1)
        log_sum = logits.logsumexp(-1)
        p = (target_logits - log_normalizer[..., None]).exp_()
        total = p.sum(-1)
        tv = 2 - 2 * torch.minimum(p, q).sum(-1)
        cross = log_sum * total - _dot(p, logits)
        entropy = log_normalizer * total - _dot(p, target_logits)
        known = labels >= 0
        picked = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        ctx.save_for_backward(q, p, total, labels)
        return torch.where(known, log_sum - picked, 0.0), cross - entropy, tv

    @staticmethod
    def backward(ctx, d_ce, d_kl, d_tv):
        q, p, total, labels = ctx.saved_tensors
        d_ce = torch.where(labels >= 0, d_ce, 0.0)
        below = torch.where(q < p, q, 0.0)
        grad = q * (d_ce + d_kl * total + 2 * d_tv * below.sum(-1))[..., None]
        grad.addcmul_(p, d_kl[..., None], value=-1)
        grad.addcmul_(below, d_tv[..., None], value=-2)
        grad.scatter_add_(-1, labels.clamp(min=0)[..., None], -d_ce[..., None])
        return grad, None, None, None


def _chunk_losses(drafter, target_logits, blocks, objective, progress):
    base, logits, confidence = drafter.block_logits(
        blocks.hidden, blocks.prev, blocks.first, detach_confidence=objective.detach_confidence
    )
    weight = block_weights(blocks.labels, objective.decay).to(logits.dtype)
    with torch.no_grad():
        theirs = target_logits(blocks.target_hidden).to(logits.dtype)
    labels = drafter.draft_labels(blocks.labels)
    aim = theirs, blocks.log_normalizer.to(logits.dtype), labels
    ce, kl, tv = Divergences.apply(logits, *aim)
    loss = objective.combine(ce, kl, tv, progress)
    if b := objective.base_share(progress):
        loss = (1 - b) * loss + b * objective.combine(*Divergences.apply(base, *aim), progress)

    accept = (1 - tv.detach() / 2).clamp(0, 1)
    bce = torch.zeros_like(accept)
    if confidence is not None:
        bce = F.binary_cross_entropy_with_logits(confidence.to(accept.dtype), accept, reduction="none")
        loss = loss + objective.confidence * bce
    with torch.no_grad():
        valid = blocks.labels != -100
        match = drafter.target_ids()[logits.argmax(-1)] == blocks.top
        error = torch.zeros_like(accept) if confidence is None else (confidence.sigmoid() - accept).abs()
        # Supervised drafts are a prefix of their block, so products that end with the first hole are the block's own.
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
