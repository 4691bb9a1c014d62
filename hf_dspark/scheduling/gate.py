"""Whether another drafting stage pays: the break-even chance, and an estimate of the chance that learns while
decoding.

The gate after stage s looks at the blocks up to s, which are verified in any case, so it is exact. Source: DLoop
(arXiv 2610.07659) for the gate on a block's summed log-probability; the break-even point and the calibration are ours.
"""

import math

import torch
from torch import Tensor


def break_even(
    draft_seconds: float, verify_seconds: float, extra_verify_seconds: float, seconds_per_token: float
) -> float:
    """Chance of the drafts so far being accepted in full from which on one more stage pays.

    If they are, the stage saves a verification and gives up one bonus token; if not, it wasted a draft; either way the
    verification grows: loop iff f (T_v - t) >= (1 - f) T_d + dT.

    Args:
        draft_seconds: T_d, one drafting stage.
        verify_seconds: T_v, one verification.
        extra_verify_seconds: dT, what the stage's drafts add to it.
        seconds_per_token: t, current mean time of an emitted token.

    Returns:
        A number >= 0; above 1 (inf included) no stage pays.
    """
    saved = verify_seconds + draft_seconds - seconds_per_token
    return max(0.0, draft_seconds + extra_verify_seconds) / saved if saved > 0 else math.inf


class OnlineGate:
    """Chance that a block is accepted in full, from the summed log-probability the drafter gave to its tokens.

    A logistic model in z = logit(exp(summed log-probability)) with a slope, an intercept and one offset per stage, all
    Gaussian; the prior (slope 1, intercepts 0) takes the drafter at its word. Each verified block updates mean and
    covariance in closed form (one Newton step of the posterior, an extended Kalman filter). Later stages share
    everything but their offset, whose prior is narrow, so a stage that is rarely reached follows the common fit.
    Deterministic.

    Args:
        max_stages: stages beyond it share the last offset.
        memory: blocks after which old evidence has faded to a third; the filter never freezes.
    """

    def __init__(self, max_stages: int = 8, memory: float = 2000.0):
        self.memory = memory
        self._prior = torch.tensor([0.25, 1.0] + [0.25] * max_stages, dtype=torch.float64)
        self.mean = torch.zeros(2 + max_stages, dtype=torch.float64)
        self.mean[0] = 1.0
        self.covariance = self._prior.diag()

    def probability(self, log_prob: Tensor, stage: int) -> Tensor:
        """Estimated chance `[B]` (float64, CPU) that stage `stage` (0-based) is accepted in full if the stages before
        it were.

        Args:
            log_prob: `[B]` summed log-probability of the stage's tokens under the drafter's temperature-1 logits.
        """
        return (self._inputs(log_prob, stage) @ self.mean).sigmoid()

    def chain_probability(self, log_probs: Tensor) -> Tensor:
        """Estimated chance `[B]` that all stages drafted so far are accepted in full; log_probs `[B, S]`. Compare it
        with `break_even`."""
        chance = torch.ones(len(log_probs), dtype=torch.float64)
        for s in range(log_probs.shape[1]):
            chance = chance * self.probability(log_probs[:, s], s)
        return chance

    def observe(self, log_probs: Tensor, accepted: Tensor, verified: Tensor, block: int) -> None:
        """Learn from one round.

        Args:
            log_probs: `[B, S]` summed log-probabilities per stage; whatever stands beyond a row's last stage is
                ignored.
            accepted, verified: `[B]` drafts of the round.
            block: drafts per stage. A stage teaches if it was verified whole and everything before it was accepted.
        """
        for s in range(log_probs.shape[1]):
            use = ((accepted >= s * block) & (verified >= (s + 1) * block)).cpu()
            full = (accepted >= (s + 1) * block).cpu().double()
            for x, y in zip(self._inputs(log_probs.cpu()[use, s], s), full[use], strict=True):
                self._update(x, y)

    def _update(self, x, y):
        # Forgetting widens the covariance, but never beyond the prior's.
        c = self.covariance * (1 + 1 / self.memory)
        shrink = (self._prior / c.diagonal()).clamp(max=1.0).sqrt()
        c = c * shrink * shrink[:, None]
        p = (x @ self.mean).sigmoid()
        cx, v = c @ x, p * (1 - p)
        gain = cx / (1 + v * (x @ cx))
        self.mean = self.mean + gain * (y - p)
        self.covariance = c - v * gain[:, None] * cx

    def _inputs(self, log_prob: Tensor, stage: int) -> Tensor:
        log_prob = log_prob.detach().to("cpu", torch.float64).clamp(-30.0, -1e-3)
        x = torch.zeros(len(log_prob), len(self.mean), dtype=torch.float64)
        x[:, 0] = log_prob - torch.log(-torch.expm1(log_prob))
        x[:, 1] = x[:, 2 + min(stage, len(self.mean) - 3)] = 1.0
        return x
