"""Counter-based noise: a hash of (seed, stream, index of the generated token, domain, round), the same on CPU and GPU.

No generator state exists, so a token's noise doesn't depend on batch, drafts or what was rejected before it. The domains
keep the target's draw, the drafter's draw, the acceptance coin and the residual draw independent of each other. The target's
noise is keyed by the token alone. The rest is keyed by the round too: a token can be drafted again in a later round, and if it
met its old noise there, whatever was learnt from the old draft (a gate, a length rule) would foresee the new one.
"""

import torch

DOMAINS = {"target": 0, "draft": 1, "coin": 2, "residual": 3}
_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`_mix_int` on int64, whose products wrap; shifts are made logical by masking the copied sign bits away."""

    def shift(x, n):
        return (x >> n) & ((1 << (64 - n)) - 1)

    x = x + _signed(_GOLDEN)
    x = (x ^ shift(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ shift(x, 27)) * _signed(_MULTIPLIERS[1])
    return x ^ shift(x, 31)


def uniforms(seed: int, streams, indices, domain: str, size: int, device, rounds=None) -> torch.Tensor:
    """Uniforms in (0, 1), float64 [R, size], for rows of noise `streams` [R] at generated-token `indices` [R].

    `rounds` [R]: any number that never repeats within a row, for every domain but the target's.
    """
    keys = []
    for stream, index, turn in zip(streams, indices, rounds or [0] * len(indices), strict=True):
        key = _mix_int(int(seed) & _MASK)
        for part in (int(stream), int(index), DOMAINS[domain], int(turn)):
            key = _mix_int(key ^ part)
        keys.append(_signed(key))
    counter = torch.arange(size, device=device) * _signed(_GOLDEN)
    bits = _mix(torch.tensor(keys, device=device)[:, None] + counter)
    # 52 bits and a half: one more bit, and the largest value would round to 1.
    return (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


def gumbel(seed: int, streams, indices, domain: str, size: int, device, rounds=None) -> torch.Tensor:
    """Standard Gumbel noise, float64 [R, size]: argmax(log p + gumbel) is a draw from p."""
    return -torch.log(-torch.log(uniforms(seed, streams, indices, domain, size, device, rounds)))


def check_possible(scores: torch.Tensor) -> None:
    """Raise where processors left a row of `scores` [R, V] without any token to sample."""
    if not torch.isfinite(scores.max(-1).values).all():
        raise ValueError(
            "The logits processors left no token possible (every score of a row is -inf, or one is nan): a sampled token "
            "needs at least one finite score. Loosen the constraint that forbids everything."
        )


def keyed_scores(scores: torch.Tensor, seed: int, streams, indices, domain: str, rounds=None) -> torch.Tensor:
    """Scores [R, V] (log-probabilities up to a constant) plus keyed Gumbel noise, float32: their argmax is the draw.

    Raises:
        ValueError: when a row allows no token at all.
    """
    check_possible(scores)
    top = scores.double() - scores.max(-1, keepdim=True).values
    return (top + gumbel(seed, streams, indices, domain, scores.shape[-1], scores.device, rounds)).float()
