"""Counter-based noise: a hash of (seed, stream, index of the generated token, domain, round), the same on CPU and CUDA.

No generator state exists, so a token's noise doesn't depend on batch, drafts or what was rejected before it. The
domains keep the target's draw, the drafter's draw, the acceptance coin and the residual draw independent of each other.
The target's noise is keyed by the token alone. The rest is keyed by the round too: a token can be drafted again in a
later round, and if it met its old noise there, whatever was learnt from the old draft (a gate, a length rule) would
foresee the new one.

The hash runs on int64 tensors where the scores are, and nothing here waits for a device. Devices without float64 (MPS)
get the same hash, but fewer bits of it in float32: their draws follow the same law, and are not those of CPU and CUDA.
"""

from dataclasses import dataclass, field

import torch

DOMAINS = {"target": 0, "draft": 1, "coin": 2, "residual": 3}
_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64, whose products wrap; masks make the shifts logical. In place where it can
    be: a vocabulary of noise is large, and fresh memory is what it costs most."""

    def shift(n):
        return (x >> n).bitwise_and_((1 << (64 - n)) - 1)

    x = x + _signed(_GOLDEN)
    x = x.bitwise_xor_(shift(30)).mul_(_signed(_MULTIPLIERS[0]))
    x = x.bitwise_xor_(shift(27)).mul_(_signed(_MULTIPLIERS[1]))
    return x.bitwise_xor_(shift(31))


def _mix_int(x: int) -> int:
    """`_mix` on a Python integer."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 31)


def real_dtype(device) -> torch.dtype:
    """The widest float of a device: float64, and float32 where that doesn't exist."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def keys(seed: int, streams: torch.Tensor, indices: torch.Tensor, domains, rounds) -> torch.Tensor:
    """Hash keys, int64, of the shape that the four int64 tensors (or ints) broadcast to."""
    key = streams ^ _signed(_mix_int(int(seed) & _MASK))
    for part in (indices, domains, rounds):
        key = _mix(key) ^ part
    return _mix(key)


def uniforms_of(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Uniforms in (0, 1), `real_dtype` [..., size], for hash keys [...]."""
    counter = torch.arange(size, device=keys.device) * _signed(_GOLDEN)
    dtype = real_dtype(keys.device)
    # As many bits as the float holds, less one for the half: one more, and the largest value would round to 1.
    bits = 52 if dtype == torch.float64 else 23
    fraction = _mix(keys[..., None] + counter).bitwise_right_shift_(64 - bits).bitwise_and_((1 << bits) - 1)
    return fraction.to(dtype).add_(0.5).mul_(2.0**-bits)


def uniforms(seed: int, streams, indices, domain: str, size: int, device, rounds=None) -> torch.Tensor:
    """Uniforms in (0, 1), float64 [R, size], for rows of noise `streams` [R] at generated-token `indices` [R].

    `rounds` [R]: any number that never repeats within a row, for every domain but the target's.
    """
    streams, indices, rounds = (_integers(x, device) for x in (streams, indices, 0 if rounds is None else rounds))
    return uniforms_of(keys(seed, streams, indices, DOMAINS[domain], rounds), size)


def _integers(values, device) -> torch.Tensor:
    values = list(values) if isinstance(values, range) else values
    return torch.as_tensor(values, dtype=torch.long, device=device)


def perturbed(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Scores [..., V] plus standard Gumbel noise made of `uniform` [..., V], float32: their argmax is a draw from
    softmax."""
    gumbel = uniform.log().neg_().log_().neg_()
    return gumbel.add_(scores.to(gumbel.dtype) - scores.amax(-1, keepdim=True)).float()


def keyed_scores(scores: torch.Tensor, seed: int, streams, indices, domain: str, rounds=None) -> torch.Tensor:
    """Scores [R, V] (log-probabilities up to a constant) plus keyed Gumbel noise, float32: their argmax is the draw.

    Raises:
        ValueError: when a row allows no token at all.
    """
    check_possible(possible(scores).tolist())
    return perturbed(scores, uniforms(seed, streams, indices, domain, scores.shape[-1], scores.device, rounds))


def possible(scores: torch.Tensor) -> torch.Tensor:
    """Whether scores (or probabilities) [..., V] are a law to draw from, bool [...]: no nan, no inf, something above
    -inf."""
    return scores.amax(-1).isfinite()


def check_possible(rows: list[bool]) -> None:
    """Raise where processors left a row without any token to sample; `rows` says which have one.

    Raises:
        ValueError: with the rows' numbers in its attribute `rows`.
    """
    bad = [r for r, able in enumerate(rows) if not able]
    if bad:
        error = ValueError(
            "The logits processors left no token possible (every score of a row is -inf, or one is nan): a sampled "
            "token needs at least one finite score. Loosen the constraint that forbids everything."
        )
        error.rows = bad
        raise error


@dataclass
class Noise:
    """Keyed noise of the active rows in one round.

    In every method `rows` picks R of the active rows (a list, a tensor, or None for all), and `i` is the draft
    position: an int, or a tensor below `width` of shape [R] (a position per row) or [1 or R, N] (N positions per row).

    Args:
        seed (`int`): the key.
        streams ([A], int64): the rows' noise streams. Lists are taken; tensors on the device of the scores spare a
            copy.
        indices ([A], int64): the generated-token index at draft position 0, which also tells rounds apart.
        width (`int`, defaults to 32): draft positions that keys are made for at once.
    """

    seed: int
    streams: torch.Tensor
    indices: torch.Tensor
    width: int = 32
    _tables: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        self.streams, self.indices = (torch.as_tensor(x, dtype=torch.long) for x in (self.streams, self.indices))

    def select(self, rows: list[int]) -> "Noise":
        """The noise of rows [R] alone."""
        index = torch.tensor(rows, dtype=torch.long, device=self.streams.device)
        return Noise(self.seed, self.streams[index], self.indices[index], self.width)

    def widen(self, width: int) -> None:
        """Make room for draft positions below `width`."""
        if width > self.width:
            self.width = max(width, 2 * self.width)
            self._tables.clear()

    def _table(self, device) -> torch.Tensor:
        """Keys [4, A, width] of all domains and positions: hashing takes some forty small kernels, so once per
        round."""
        if device not in self._tables:
            streams, start = self.streams.to(device)[:, None], self.indices.to(device)[:, None]
            domains = torch.arange(len(DOMAINS), device=device)[:, None, None]
            indices = start + torch.arange(self.width, device=device)
            self._tables[device] = keys(self.seed, streams, indices, domains, self._rounds(start, domains))
        return self._tables[device]

    @staticmethod
    def _rounds(start, domains):
        return start * (domains != DOMAINS["target"])

    def uniforms(self, rows, i, domain: str, size: int, device) -> torch.Tensor:
        """Uniforms in (0, 1), [R, size] or [R, N, size]."""
        if isinstance(i, int):
            self.widen(i + 1)
        table = self._table(torch.device(device))[DOMAINS[domain]]
        if rows is not None:
            table = table[torch.as_tensor(rows, dtype=torch.long, device=table.device)]
        if isinstance(i, int):
            return uniforms_of(table[:, i], size)
        i = i.to(table.device)
        picked = table.gather(1, i[:, None] if i.dim() == 1 else i.expand(len(table), -1))
        return uniforms_of(picked[:, 0] if i.dim() == 1 else picked, size)

    def sample(self, scores: torch.Tensor, rows, i, domain: str = "target") -> torch.Tensor:
        """A draw [R] or [R, N] from softmax(scores [R, V] or [R, N, V])."""
        return perturbed(scores, self.uniforms(rows, i, domain, scores.shape[-1], scores.device)).argmax(-1)

    def sample_mass(self, mass: torch.Tensor, rows, i, domain: str) -> torch.Tensor:
        """A draw from unnormalised probabilities, shapes as for scores: the first id whose cumulative mass exceeds a
        uniform's share. Where a row is nan, some id of the vocabulary."""
        upto = mass.to(real_dtype(mass.device)).cumsum(-1)
        share = self.uniforms(rows, i, domain, 1, mass.device) * upto[..., -1:]
        return torch.searchsorted(upto, share, right=True)[..., 0].clamp_max(mass.shape[-1] - 1)

    def coin(self, rows, i, device) -> torch.Tensor:
        """Uniforms [R] or [R, N] for accepting draft i."""
        return self.uniforms(rows, i, "coin", 1, device)[..., 0]
