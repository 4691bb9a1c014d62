"""Confidences corrected while decoding, by what became of earlier drafts."""

import math

import torch

LIMIT = math.log(0.999 / 0.001)  # beyond it a head is as sure as it is taken to be


class Correction:
    """What confidences turned out to be worth: a logistic fit of acceptance to their logits, with a slope, an intercept
    and one offset per position, updated draft by draft (an extended Kalman filter; the offsets are kept independent).

    Args:
        positions: of a chain; the last offset serves all further ones. memory: drafts after which the past has faded.
    """

    SLOPE, INTERCEPT, OFFSET = 0.25, 1.0, 0.1  # prior variances

    def __init__(self, positions: int, memory: float = 2000.0):
        self.memory = memory
        self.slope, self.intercept, self.offsets = 1.0, 0.0, [0.0] * max(positions, 1)
        self._common = self.SLOPE, 0.0, self.INTERCEPT  # covariance of slope and intercept
        self._own = [self.OFFSET] * len(self.offsets)

    def __call__(self, confidence: torch.Tensor) -> torch.Tensor:
        """Corrected chances [A, L], float64, of confidence logits `confidence` [A, L]."""
        last = len(self.offsets) - 1
        offsets = torch.tensor([self.offsets[min(k, last)] for k in range(confidence.shape[1])], dtype=torch.float64)
        return torch.sigmoid(self.slope * _logits(confidence) + self.intercept + offsets)

    def observe(self, confidence: torch.Tensor, verified: list[int], accepted: list[int]) -> None:
        """Learn from each row's drafts up to its first rejection."""
        for logits, n, a in zip(_logits(confidence).tolist(), verified, accepted):
            for k in range(min(a + 1, n)):
                self._update(logits[k], min(k, len(self.offsets) - 1), k < a)

    def _update(self, z: float, k: int, hit: bool) -> None:
        p = 1 / (1 + math.exp(-self.slope * z - self.intercept - self.offsets[k]))
        (ss, si, ii), own = self._grown(), min(self.OFFSET, self._own[k] * (1 + 1 / self.memory))
        # One Newton step of the posterior: the gain is covariance times input, the inputs being z, 1 and 1.
        to_slope, to_intercept, spread = ss * z + si, si * z + ii, p * (1 - p)
        scale = 1 + spread * (to_slope * z + to_intercept + own)
        step, weight = (hit - p) / scale, spread / scale
        self.slope, self.intercept = self.slope + to_slope * step, self.intercept + to_intercept * step
        self.offsets[k] += own * step
        ss, si, ii = ss - weight * to_slope**2, si - weight * to_slope * to_intercept, ii - weight * to_intercept**2
        self._common, self._own[k] = (ss, si, ii), own * (1 - weight * own)

    def _grown(self) -> tuple[float, float, float]:
        """The common covariance with a little forgotten, but never wider than the prior."""
        ss, si, ii = (x * (1 + 1 / self.memory) for x in self._common)
        a, b = min(1.0, self.SLOPE / ss) ** 0.5, min(1.0, self.INTERCEPT / ii) ** 0.5
        return ss * a * a, si * a * b, ii * b * b


def _logits(confidence: torch.Tensor) -> torch.Tensor:
    return confidence.detach().cpu().double().clamp(-LIMIT, LIMIT)
