"""Whether drafting pays at all: a drafter that costs time drafts less, then nothing, and is tried again at growing
intervals.

Decisions use acceptance history and measured costs only, so they are exact with every verification.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from .cost import OnlineCost

FIRST_GAP = 16  # plain rounds before the first probe, half of it while there is hope
PROBE_ROUNDS = 4
BUDGET = 0.03  # share of the time that probing may cost


def worth_drafting(
    tau: float, draft_seconds: float, verify_seconds: float, plain_seconds: float, margin: float = 0.0
) -> bool:
    """Whether a round (tau tokens per row in draft + verify seconds) beats plain steps (one token each) by more than
    `margin`."""
    return tau * plain_seconds > (draft_seconds + verify_seconds) * (1 + margin)


def draft_length(survival: Sequence[float], seconds: Sequence[float], margin: float = BUDGET) -> int:
    """Drafts per row with the most expected tokens per second, 0 for plain decoding.

    Args:
        survival: K mean chances that drafts 1..k are all accepted, from past rounds.
        seconds: K + 1 times of a round of 0..K drafts per row, draft and verification.
        margin: plain decoding must win by this much to be chosen, so that noise does not switch a drafter off;
            negative: drafts must.
    """
    rates = round_rates(survival, seconds)
    rates[0] /= 1 + margin
    return max(range(len(rates)), key=rates.__getitem__)


def round_rates(survival: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Expected tokens per second and row of rounds of 0..K drafts, see [`draft_length`]."""
    return [tau / s for tau, s in zip(accumulate(survival, initial=1.0), seconds, strict=True)]


@dataclass(frozen=True)
class DraftState:
    """What to do this round (`length` drafts, 0: a plain step) and what is planned if the drafter keeps losing: `wait`
    plain rounds, then `probe` rounds that draft all the same. `gap` is the wait's length, doubled by probes that
    leave no hope."""

    length: int = 0
    gap: int = FIRST_GAP // 2
    wait: int = 0
    probe: int = 0


def next_state(state: DraftState, best: int, probe_length: int, loss: float, hopeful: bool = False) -> DraftState:
    """One step of the on-off automaton.

    Args:
        best: `draft_length` by the current estimates; positive turns drafting on at once.
        probe_length: drafts to try while probing.
        loss: what a probing round costs more than the plain steps it replaces, in plain steps. The first wait is long
            enough for probing to stay within `BUDGET`, whatever the drafter costs.
        hopeful: the estimates are uncertain enough for drafting to pay after all: the wait isn't doubled.
    """
    if best > 0:
        return DraftState(best, gap=max(FIRST_GAP // 2, state.gap // 2))
    if state.wait:
        return replace(state, length=0, wait=state.wait - 1)
    if state.probe:
        return replace(state, length=probe_length, probe=state.probe - 1)
    gap = max(state.gap if hopeful else 2 * state.gap, math.ceil(PROBE_ROUNDS * max(loss, 0.0) / BUDGET))
    return DraftState(0, gap, wait=gap - 1, probe=PROBE_ROUNDS)


class AcceptanceHistory:
    """Conditional acceptance per draft position over recent rounds, and the survival it implies.

    A position's prior is the estimate of the position before it (the first one's is `prior`), worth `weight`
    observations. So a position that was not tried lately keeps a plausible estimate. `prior` itself fades like
    an old round.

    Args:
        max_length: K.
        decay: weight of a round relative to the next.
    """

    def __init__(self, max_length: int, prior: float = 0.7, weight: float = 2.0, decay: float = 0.97):
        self.weight, self.decay = weight, decay
        self._accepted, self._reached = [0.0] * max_length, [0.0] * max_length
        if max_length:
            self._accepted[0], self._reached[0] = weight * prior, weight

    def observe(self, accepted: Sequence[int] | Tensor, verified: Sequence[int] | Tensor) -> None:
        """Accepted and verified drafts of each row, `[B]`, of one round."""
        self.fade(self.decay)
        for a, n in zip(map(int, accepted), map(int, verified), strict=True):
            for k in range(min(a + 1, n, len(self._reached))):
                self._reached[k] += 1
                self._accepted[k] += k < a

    def expect(self, chances: Sequence[Sequence[float]]) -> None:
        """As [`observe`], from the chances `[B][K]` of one round's drafts: they vary less than what becomes of the
        drafts, and tell of those that nobody verifies."""
        self.fade(self.decay)
        for row in chances:
            reached = 1.0
            for k, chance in enumerate(row[: len(self._reached)]):
                self._reached[k] += reached
                reached *= chance
                self._accepted[k] += reached

    def fade(self, factor: float) -> None:
        """Trust everything seen so far `factor` times as much."""
        self._accepted = [factor * x for x in self._accepted]
        self._reached = [factor * x for x in self._reached]

    def conditional(self) -> list[float]:
        """K chances that draft k is accepted if the drafts before it were."""
        chances, weight, before = [], 0.0, 0.0
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            before = (accepted + weight * before) / (reached + weight)
            chances.append(before)
            weight = self.weight
        return chances

    def survival(self, optimism: float = 0.0) -> list[float]:
        """K chances that drafts 1..k are all accepted, every draft `optimism` standard errors likelier than it was."""
        chances, product = [], 1.0
        for chance, reached in zip(self.conditional(), self._reached, strict=True):
            product *= min(1.0, chance + optimism * (chance * (1 - chance) / (reached + self.weight)) ** 0.5)
            chances.append(product)
        return chances


class DraftThrottle:
    """Chooses the number of drafts round by round. Its owner feeds `cost` with timings, and after every drafted round
    `observe`s it or lets `history` expect it.

    What drafting is compared with is measured too: a few plain steps at the start, then one in `PLAIN_EVERY` rounds, or
    as rarely as it takes to lose no more than `PLAIN_SHARE` of the time by it.

    Args:
        max_length: most drafts per row.
        cost: costs of this machine, shared with whoever measures.
    """

    PLAIN_STEPS, PLAIN_EVERY, PLAIN_SHARE = 4, 64, 0.005
    FEW_ROWS = 2  # more rows end with one that lags far behind their mean: drafts that only break even lose time there

    def __init__(self, max_length: int, cost: OnlineCost):
        self.max_length, self.cost = max_length, cost
        self.history = AcceptanceHistory(max_length)
        self.state = DraftState(max_length)
        self.measuring = False  # whether the latest plain step was taken for its time
        self._drafted, self._gap = 0, self.PLAIN_EVERY  # rounds since the last plain step, and to the next

    def next_length(self, rows: int = 1, context: float = 0) -> int:
        """Drafts per row for the coming round of `rows` rows; 0 is a plain step."""
        self.measuring = self.cost.plain_steps() < self.PLAIN_STEPS or self._drafted >= self._gap
        if self.measuring:
            self._drafted = 0
            return 0
        waited, survival, seconds = self.state.wait, self.history.survival(), self._seconds(rows, context)
        rates = round_rates(survival, seconds)
        probe = max(range(1, len(rates)), key=rates.__getitem__, default=0)  # the least bad
        loss = seconds[probe] / seconds[0] - 1 - sum(survival[:probe])
        margin = BUDGET if rows <= self.FEW_ROWS else -BUDGET
        hopeful = draft_length(self.history.survival(1.0), seconds, margin) > 0
        self.state = next_state(self.state, draft_length(survival, seconds, margin), probe, loss, hopeful)
        if waited and not self.state.wait and not self.state.length:
            self.history.fade(0.5)  # so that the probe's few rounds outweigh what is long past
        length = self.state.length
        lost = 1 - rates[0] / rates[length]  # share of a plain step's time
        self._gap = max(self.PLAIN_EVERY, lost * seconds[0] / (self.PLAIN_SHARE * seconds[length]))
        self._drafted = self._drafted + 1 if length else 0
        return length

    def rate(self, rows: int = 1, context: float = 0) -> float:
        """Tokens per second, of all rows, that the best number of drafts is expected to give: what a second is
        worth."""
        return rows * max(round_rates(self.history.survival(), self._seconds(rows, context)))

    def _seconds(self, rows: int, context: float) -> list[float]:
        verify = [self.cost.verify_seconds(rows * (1 + k), rows, context) for k in range(self.max_length + 1)]
        draft = [self.cost.draft_seconds(rows, context, k) if k else 0.0 for k in range(self.max_length + 1)]
        return [d + v for d, v in zip(draft, verify, strict=True)]

    def observe(self, accepted: Sequence[int] | Tensor, verified: Sequence[int] | Tensor) -> None:
        """Accepted and verified drafts of each row, `[B]`, of a round that drafted."""
        self.history.observe(accepted, verified)
