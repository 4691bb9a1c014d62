"""What a copied draft is worth, learnt while decoding from how long the match was.

A copy's tokens follow from the committed text, and the expectation from rounds that are over. So a length chosen by it
depends on nothing that the round's own verification decides, which is what keeps such a choice exact.
"""

# Chance that draft 1, 2, 3, 4 and any later one is accepted if those before it were, for matches of at least so many
# tokens.
# Replayed on 663 answers of SmolLM2-135M-Instruct, the mean of greedy and sampled ones.
PRIOR = {
    1: (0.24, 0.54, 0.63, 0.69, 0.78),
    2: (0.47, 0.58, 0.65, 0.74, 0.80),
    3: (0.52, 0.62, 0.70, 0.75, 0.80),
    4: (0.61, 0.68, 0.71, 0.79, 0.83),
    5: (0.65, 0.73, 0.78, 0.82, 0.83),
    9: (0.72, 0.77, 0.80, 0.86, 0.90),
    17: (0.91, 0.88, 0.92, 0.95, 0.95),
    33: (0.98, 0.99, 0.98, 0.98, 0.99),
}


class CopyExpectation:
    """Survival chances of copied drafts by match length: faded counts of accepted drafts, started by a prior.

    Matches of 1, 2, 3, 4, 5-8, 9-16, 17-32 and more tokens are counted apart, and so are drafts 1 to 4 and all later
    ones. Give each source an expectation of its own: a match in another text is worth much less than one in the row's
        own.

    Args:
        prior: like `PRIOR`: least match length of each class, ascending from 1 -> chances by position.
        weight: drafts that the prior counts for, per class and position. Default 10.
        memory: drafts, per class and position, after which old ones have faded to a third. Default 500.
    """

    def __init__(self, prior: dict[int, tuple[float, ...]] | None = None, weight: float = 10.0, memory: float = 500.0):
        self.prior, self.weight, self.memory = prior or PRIOR, weight, memory
        self._hits = {least: [0.0] * len(chances) for least, chances in self.prior.items()}
        self._trials = {least: [0.0] * len(chances) for least, chances in self.prior.items()}

    def expected(self, match: int, length: int) -> list[float]:
        """Chances that drafts 1..k of a copy are all accepted.

        Args:
            match: tokens that matched, as in `Copy.match`; 0 if nothing did.
            length: drafts asked about.

        Returns:
            `length` numbers that never rise. Their sum is the expected number of accepted drafts.
        """
        if match < 1:
            return [0.0] * length
        least, survival, chances = self._class(match), 1.0, []
        prior, hits, trials = self.prior[least], self._hits[least], self._trials[least]
        for k in range(length):
            k = min(k, len(prior) - 1)
            survival *= (self.weight * prior[k] + hits[k]) / (self.weight + trials[k])
            chances.append(survival)
        return chances

    def observe(self, match: int, verified: int, accepted: int) -> None:
        """Learn from a copy once its round is over: from its drafts up to the first rejection.

        Args:
            match: as it was given to `expected`.
            verified: copied drafts that the target judged.
            accepted: how many of them were accepted.

        Raises:
            ValueError: more accepted than verified, or drafts without a match.
        """
        if not 0 <= accepted <= verified or (verified and match < 1):
            raise ValueError(
                f"match={match}, verified={verified}, accepted={accepted} is no round: give 0 <= accepted <= verified, "
                "and the match of the copy that was verified (at least 1)."
            )
        fade = 1 - 1 / self.memory
        for k in range(min(accepted + 1, verified)):
            least = self._class(match)
            hits, trials = self._hits[least], self._trials[least]
            position = min(k, len(hits) - 1)
            hits[position] = fade * hits[position] + (k < accepted)
            trials[position] = fade * trials[position] + 1

    def _class(self, match: int) -> int:
        return max(least for least in self.prior if least <= match)
