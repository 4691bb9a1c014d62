"""The drafts of a batch and the target's logits become a verdict, each call's rows by its own sampling."""

import torch

from hf_dspark.drafting.draft import Draft
from hf_dspark.drafting.proposer import Sampling
from hf_dspark.verification.chain import Verdict
from hf_dspark.verification.noise import Noise
from hf_dspark.verification.table import VERIFIERS

from .batch import Batch

WITHOUT_WAITING = {"cpu"}


def sampling_of(batch: Batch) -> list[Sampling]:
    """How the rows of a batch draw in this round."""
    out = []
    for group in batch.groups:
        rows, settings, noise = [batch.rows[r] for r in group.rows], group.settings, None
        if settings.do_sample:
            facts = torch.tensor([[row.request.stream, row.generated] for row in rows]).to(batch.device)
            noise = Noise(settings.seed, facts[:, 0], facts[:, 1])
        places = [row.request.place for row in rows]
        out.append(Sampling(group.rows, places, settings.scorer, noise, settings.stop_ids))
    return out


class PrefixScores:
    """Processed scores of rows, on demand: the scorer is asked once per row and position, on the true prefix.

    Args:
        batch, sampling, draft: of the round; drafted [A][L] the draft tokens. logits: [A, L + 1, V] the target's.
        kept: per active row, {position: scores [V]} of everything asked for.
    """

    def __init__(self, batch: Batch, sampling: Sampling, draft: Draft, drafted, logits: torch.Tensor, kept: list[dict]):
        self.batch, self.sampling, self.draft, self.logits, self.kept = batch, sampling, draft, logits, kept
        self.drafted = drafted

    def __call__(self, i: int, rows: list[int]) -> torch.Tensor:
        """[R, V] at draft position i of the rows [R] of `sampling`."""
        sampling, active = self.sampling, [self.sampling.rows[r] for r in rows]
        scores = self.logits[active, i].float()
        live = list(range(len(active)))
        if sampling.scorer.prefix_free:
            scores, live = sampling.scorer.target_scores(None, None, scores), []
        try:
            # Behind the end of a text nothing is decided any more, and processors may not expect to be asked.
            live = [j for j in live if not any(self._ends(active[j], k) for k in range(i))]
            if live:
                prefixes = [self.batch.prefix(active[j], self.draft.tokens[active[j], :i]) for j in live]
                places = [sampling.places[rows[j]] for j in live]
                scores[live] = sampling.scorer.target_scores(places, prefixes, scores[live])
        except Exception as error:
            sampling.errors.update((active[j], error) for j in live)
        for r, s in zip(active, scores):
            if self.batch.rows[r].outputs.wants_scores:
                self.kept[r][i] = s
        return scores

    def _ends(self, r: int, k: int) -> bool:
        """Whether row r ends with draft k."""
        stopped = self.batch.rows[r].stopped if self.sampling.scorer.own else None
        return self.drafted[r][k] in self.sampling.stop_ids or (stopped is not None and stopped(k))


def judge(batch: Batch, sampling: list[Sampling], draft: Draft, lengths: list[int], logits: torch.Tensor, verification: str):
    """Verify the first `lengths` [A] drafts of each row by target logits [A, L + 1, V].

    Returns:
        accepted drafts of each row `list[int]`, the target's token after them `list[int]`, the draft tokens `list[list[int]]`,
        and the processed scores {position: [V]} of each row where the caller wants them.
    """
    count = len(batch.rows)
    kept: list[dict] = [{} for _ in range(count)]
    drafted = None
    if not all(s.scorer.prefix_free and not batch.rows[s.rows[0]].settings.criteria for s in sampling):
        drafted = draft.tokens.tolist()
        for row, tokens, seen in zip(batch.rows, drafted, kept):
            row.ask(tokens, seen)
    verdicts = [_verdict(batch, s, draft, drafted, lengths, logits, verification, kept) for s in sampling]
    order = [r for s in sampling for r in s.rows]
    able = [torch.ones_like(v.accepted, dtype=torch.bool) if v.possible is None else v.possible for v in verdicts]
    joined = Verdict(
        torch.cat([v.accepted.to(batch.device) for v in verdicts]),
        torch.cat([v.next_token.to(batch.device) for v in verdicts]),
        torch.cat([a.to(batch.device) for a in able]),
    )
    tokens = draft.tokens if len(sampling) == 1 else draft.tokens[order]
    try:
        accepted, following, drafted = joined.read(tokens)
    except ValueError as error:  # a row allows no token: it ends here, the others go on
        joined.possible = None
        accepted, following, drafted = joined.read(tokens)
        for j in error.rows:
            _owner(sampling, order[j]).errors.setdefault(order[j], error)
    for s in sampling:
        for r, error in s.errors.items():
            batch.rows[r].error = batch.rows[r].error or error
    place = {r: j for j, r in enumerate(order)}
    back = [place[r] for r in range(count)]
    return [accepted[j] for j in back], [following[j] for j in back], [drafted[j] for j in back], kept


def _owner(sampling: list[Sampling], row: int) -> Sampling:
    return next(s for s in sampling if row in s.rows)


def _verdict(batch, s: Sampling, draft, drafted, lengths, logits, verification, kept) -> Verdict:
    whole, width = len(s.rows) == len(batch.rows), max(lengths) + 1
    tokens = draft.tokens if whole else draft.tokens[s.rows]
    q = draft.q if whole or draft.q is None else draft.q[s.rows]
    mine = [lengths[r] for r in s.rows]
    verifier = VERIFIERS["match" if s.noise is None else verification]
    # Without a device to wait for, looking at a row's positions one by one saves those behind its first rejection.
    if not s.scorer.prefix_free or (s.noise is not None and logits.device.type in WITHOUT_WAITING):
        scores_at = PrefixScores(batch, s, draft, drafted, logits, kept)
        return verifier.lazy(scores_at, tokens, q, mine, s.noise)
    scores = logits[:, :width] if whole else logits[s.rows, :width]
    if not s.scorer.empty:
        scores = s.scorer.target_scores(None, None, scores.flatten(0, 1)).unflatten(0, scores.shape[:2])
    for j, r in enumerate(s.rows):
        if batch.rows[r].outputs.wants_scores:
            kept[r].update(enumerate(scores[j].float()))
    return verifier.dense(scores.float(), tokens, q, torch.tensor(mine).to(batch.device), s.noise)
