"""The drafts of a batch and the target's logits become a verdict, each call's rows by its own sampling."""

import torch

from hf_dspark.drafting.draft import Draft
from hf_dspark.verification.chain import Noise, Verdict, verify_block, verify_match, verify_ratio

from .batch import Batch, Group

VERIFIERS = {"ratio": verify_ratio, "block": verify_block, "match": verify_match}


def noise_of(batch: Batch, group: Group) -> Noise | None:
    """Keyed noise of a group's rows in this round; None where they are decoded greedily."""
    if not group.settings.do_sample:
        return None
    rows = [batch.rows[r] for r in group.rows]
    return Noise(group.settings.seed, [row.request.stream for row in rows], [row.generated for row in rows])


class PrefixScores:
    """Processed scores of a group's rows, on demand: the scorer is asked once per row and position, on the true prefix.

    Args:
        batch, group, draft: of the round. logits: [A, L + 1, V] the target's.
        kept: per active row, {position: scores [V]} of everything asked for; filled if `keep`.
    """

    def __init__(self, batch: Batch, group: Group, draft: Draft, logits: torch.Tensor, kept: list[dict], keep: bool):
        self.batch, self.group, self.draft, self.logits = batch, group, draft, logits
        self.kept, self.keep = kept, keep
        self.stop_ids = group.settings.stop_ids
        free = group.settings.scorer.prefix_free
        self.drafted = None if free or not self.stop_ids else draft.tokens.tolist()

    def __call__(self, i: int, rows: list[int]) -> torch.Tensor:
        """[R, V] at draft position i of the group's rows [R]."""
        scorer, active = self.group.settings.scorer, [self.group.rows[r] for r in rows]
        scores = self.logits[active, i].float()
        if scorer.prefix_free:
            scores = scorer.target_scores(None, None, scores)
        else:
            # Behind a stop token nothing is decided any more, and processors may not expect to be asked.
            live = [j for j, r in enumerate(active) if not (i and self.drafted and self.drafted[r][i - 1] in self.stop_ids)]
            if live:
                prefixes = [self.batch.prefix(active[j], self.draft.tokens[active[j], :i]) for j in live]
                places = [self.batch.rows[active[j]].request.place for j in live]
                scores[live] = scorer.target_scores(places, prefixes, scores[live])
        if self.keep:
            for r, s in zip(active, scores):
                self.kept[r][i] = s
        return scores


def judge(batch: Batch, draft: Draft, lengths: list[int], logits: torch.Tensor, verification: str):
    """Verify the first `lengths` [A] drafts of each row by target logits [A, L + 1, V].

    Returns:
        accepted drafts of each row `list[int]`, the target's token after them `list[int]`, and the processed scores
        {position: [V]} of each row where the caller wants them.
    """
    count = len(batch.rows)
    accepted, following, kept = [0] * count, [0] * count, [{} for _ in range(count)]
    for group in batch.groups:
        wants = any(batch.rows[r].outputs.wants_scores for r in group.rows)
        scores = PrefixScores(batch, group, draft, logits, kept, wants)
        verdict = _verify(group, draft, lengths, scores, noise_of(batch, group), verification)
        for r, a, t in zip(group.rows, verdict.accepted.tolist(), verdict.next_token.tolist()):
            accepted[r], following[r] = a, t
    return accepted, following, kept


def _verify(group, draft, lengths, scores, noise, verification) -> Verdict:
    tokens, mine = draft.tokens[group.rows], [lengths[r] for r in group.rows]
    if noise is None or verification == "match":
        return verify_match(scores, tokens, mine, noise)
    q = None if draft.q is None else draft.q[group.rows].to(scores.logits.device)
    return VERIFIERS[verification](scores, tokens, q, mine, noise)
