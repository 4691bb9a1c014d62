"""Which blocks a batch trains on. Everything random here is keyed, so that no accident of batching can change it."""

from dataclasses import dataclass

import torch

_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 63) - 1


@dataclass(frozen=True)
class Step:
    """What a batch is computed for. It travels with the batch, so that nothing else can decide it.

    Args:
        stages (`int`): drafting stages S. progress (`float`): 0..1, share of the training done.
        looped (`bool`): the last stage shares the loss with the first; else the first has it all.
        split (`str`): where metrics are collected: "train", "eval", or "estimate" (dropped).
    """

    stages: int = 1
    progress: float = 1.0
    looped: bool = True
    split: str = "train"

    def shares(self, last: bool) -> list[float]:
        """What the first and the last stage weigh in the loss; `last` says whether the last has anything to learn."""
        if self.stages == 1:
            return [1.0]
        return [0.5, 0.5] if self.looped and last else [1.0, 0.0]


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator that depends on the integers of `key`, in order, and on nothing else."""
    state = 0
    for part in key:
        state = ((state ^ part) * _MIX + 1) & _MASK
        state ^= state >> 29
    return torch.Generator().manual_seed(state)


def draw_anchors(labels: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """At most `count` sorted anchors [n] of one document with labels [T], drawn without replacement.

    An anchor is a position whose next token is supervised, so the last token of a prompt is one (DSpark, section 3.4).
    """
    eligible = (labels[1:] != -100).nonzero()[:, 0]
    return eligible[torch.randperm(len(eligible), generator=generator)[:count]].sort().values


def draw_stages(seed: int, step: int, exposure: int) -> int:
    """Stages S of one optimizer step: S - 1 ~ U{1..exposure}; 1 without loop exposure (DLoop, section 4)."""
    if exposure == 0:
        return 1
    return 2 + int(torch.randint(exposure, (), generator=keyed_generator(seed, step)))


def block_weights(labels: torch.Tensor, decay: float | None) -> torch.Tensor:
    """Weights of labels [..., K]: exp(-k / decay) for draft k from 0 where supervised, 0 where not; no decay if
    None."""
    k = torch.arange(labels.shape[-1], device=labels.device, dtype=torch.float64)
    weight = torch.ones_like(k) if decay is None else torch.exp(-k / decay)
    return weight * (labels != -100)
