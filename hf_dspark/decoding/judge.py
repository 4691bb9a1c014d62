"""The drafts of a batch and the target's logits become a verdict, each call's rows by its own sampling."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_dspark.drafting.draft import Draft
from hf_dspark.drafting.proposer import Sampling
from hf_dspark.drafting.tree_parts import path_to
from hf_dspark.verification.chain import Verdict
from hf_dspark.verification.table import TREE_VERIFIERS, VERIFIERS
from hf_dspark.verification.tree import TreeNoise

from .batch import Batch

WITHOUT_WAITING = {"cpu"}


def sampling_of(batch: Batch) -> list[Sampling]:
    """How the rows of a batch draw in this round."""
    out = []
    for group in batch.groups:
        rows, settings, noise = [batch.rows[r] for r in group.rows], group.settings, None
        if settings.do_sample:
            facts = torch.tensor([[row.request.stream, row.generated] for row in rows]).to(batch.device)
            noise = TreeNoise(settings.seed, facts[:, 0], facts[:, 1])
        places = [row.request.place for row in rows]
        out.append(Sampling(group.rows, places, settings.scorer, noise, settings.stop_ids))
    return out


class PrefixScores:
    """Processed scores of rows, on demand: the scorer is asked once per row and position, on the true prefix.

    Args:
        batch, sampling, draft: of the round; drafted [A][L] the draft tokens. logits: [A, L + 1, V] the target's.
        kept: per active row, {drafts accepted before: scores [V]} of everything asked for.
    """

    def __init__(self, batch: Batch, sampling: Sampling, draft: Draft, drafted, logits: torch.Tensor, kept: list[dict]):
        self.batch, self.sampling, self.draft, self.logits, self.kept = batch, sampling, draft, logits, kept
        self.drafted = drafted
        self.parents = None if draft.parents is None else draft.parents.tolist()

    def __call__(self, where, rows: list[int]) -> torch.Tensor:
        """[R, V] of the rows [R] of `sampling`, behind the first `where` drafts of a chain, or behind the nodes `where`
        [R]."""
        sampling, active = self.sampling, [self.sampling.rows[r] for r in rows]
        nodes = [where - 1] * len(rows) if isinstance(where, int) else where
        scores, live = self.logits[active, [node + 1 for node in nodes]].float(), list(range(len(active)))
        ways = [self._way(r, node) for r, node in zip(active, nodes)]
        if sampling.scorer.prefix_free:
            scores, live = sampling.scorer.target_scores(None, None, scores), []
        try:
            # Behind the end of a text nothing is decided any more, and processors may not expect to be asked.
            live = [j for j in live if not self._ended(active[j], ways[j])]
            if live:
                prefixes = [self.batch.prefix(active[j], self.draft.tokens[active[j], ways[j]]) for j in live]
                places = [sampling.places[rows[j]] for j in live]
                scores[live] = sampling.scorer.target_scores(places, prefixes, scores[live])
        except Exception as error:
            sampling.errors.update((active[j], error) for j in live)
        for r, way, s in zip(active, ways, scores):
            if self.batch.rows[r].outputs.wants_scores:
                self.kept[r][len(way)] = s
        return scores

    def _way(self, r: int, node: int) -> list[int]:
        """The nodes from the anchor to `node`, the anchor left out."""
        return list(range(node + 1)) if self.parents is None else path_to(self.parents[r], node)

    def _ended(self, r: int, way: list[int]) -> bool:
        """Whether row r ends with one of the drafts on the way."""
        stopped = self.batch.rows[r].stopped if self.sampling.scorer.own else None
        if stopped is not None and self.parents is not None:
            self.batch.rows[r].fill([self.drafted[r][node] for node in way])
        for k, node in enumerate(way):
            if self.drafted[r][node] in self.sampling.stop_ids or (stopped is not None and stopped(k)):
                return True
        return False


@dataclass
class Judgement:
    """What became of a round's drafts.

    Args:
        accepted (`list[int]`): [A] drafts. tokens (`list[list[int]]`): [A] they and the target's token after them.
        scores (`list[dict]`): [A] processed scores {drafts before: [V]} where a caller wants them.
        path (`torch.Tensor`, *optional*): [A, L] on the host, the accepted nodes of trees, then -1; None for chains.
    """

    accepted: list[int]
    tokens: list[list[int]]
    scores: list[dict]
    path: torch.Tensor | None


def judge(
    batch: Batch, sampling: list[Sampling], draft: Draft, lengths: list[int], logits, verification: str
) -> Judgement:
    """Verify the first `lengths` [A] drafts of each row by target logits [A, L + 1, V]."""
    count = len(batch.rows)
    kept: list[dict] = [{} for _ in range(count)]
    drafted = None
    if not all(s.scorer.prefix_free and not batch.rows[s.rows[0]].settings.criteria for s in sampling):
        drafted = draft.tokens.tolist()
        for row, tokens, seen in zip(batch.rows, drafted, kept):
            row.ask(tokens, seen)
    verdicts = [_verdict(batch, s, draft, drafted, lengths, logits, verification, kept) for s in sampling]
    order = [r for s in sampling for r in s.rows]
    accepted, following, drafted, *paths = _read(batch, sampling, order, verdicts, draft)
    place = {r: j for j, r in enumerate(order)}
    tokens, path = [], None
    if paths:
        path = torch.tensor([paths[0][place[r]] for r in range(count)], dtype=torch.long).view(count, -1)
    for r in range(count):
        j = place[r]
        way = range(accepted[j]) if path is None else path[r, : accepted[j]].tolist()
        tokens.append([drafted[j][node] for node in way] + [following[j]])
    return Judgement([accepted[place[r]] for r in range(count)], tokens, kept, path)


def _read(batch, sampling, order: list[int], verdicts: list[Verdict], draft):
    """The verdicts on the host, in one copy; rows whose processors failed or left nothing get an error of their own."""
    device = batch.device
    able = [torch.ones_like(v.accepted, dtype=torch.bool) if v.possible is None else v.possible for v in verdicts]
    parts = [torch.cat([x.to(device) for x in part]) for part in zip(*((v.accepted, v.next_token) for v in verdicts))]
    joined = Verdict(*parts, torch.cat([a.to(device) for a in able]))
    more = [draft.tokens if len(sampling) == 1 else draft.tokens[order]]
    if draft.parents is not None:
        deepest = max(v.path.shape[1] for v in verdicts)
        more.append(torch.cat([F.pad(v.path.to(device), (0, deepest - v.path.shape[1]), value=-1) for v in verdicts]))
    try:
        out = joined.read(*more)
    except ValueError as error:  # a row allows no token: it ends here, the others go on
        joined.possible = None
        out = joined.read(*more)
        for j in error.rows:
            next(s for s in sampling if order[j] in s.rows).errors.setdefault(order[j], error)
    for s in sampling:
        for r, error in s.errors.items():
            batch.rows[r].error = batch.rows[r].error or error
    return out


def _verdict(batch, s: Sampling, draft, drafted, lengths, logits, verification, kept) -> Verdict:
    whole, width = len(s.rows) == len(batch.rows), max(lengths) + 1
    tokens = draft.tokens if whole else draft.tokens[s.rows]
    q = draft.q if whole or draft.q is None else draft.q[s.rows]
    mine = [lengths[r] for r in s.rows]
    if draft.parents is None:
        verifier, shape = VERIFIERS["match" if s.noise is None else verification], (tokens,)
    else:  # whatever isn't drawn from a law is best compared with the target's own draw
        verifier, shape = TREE_VERIFIERS["match" if q is None else "ratio"], (tokens, draft.parents[s.rows])
    # Without a device to wait for, looking at a row's positions one by one saves those behind its first rejection.
    if not s.scorer.prefix_free or (s.noise is not None and logits.device.type in WITHOUT_WAITING):
        scores_at = PrefixScores(batch, s, draft, drafted, logits, kept)
        return verifier.lazy(scores_at, *shape, q, mine, s.noise)
    scores = logits[:, :width] if whole else logits[s.rows, :width]
    if not s.scorer.empty:
        scores = s.scorer.target_scores(None, None, scores.flatten(0, 1)).unflatten(0, scores.shape[:2])
    scores = scores.float()
    if draft.parents is not None:
        shape = tuple(x[:, : width - 1] for x in shape)
    verdict = verifier.dense(scores, *shape, q, torch.tensor(mine).to(batch.device), s.noise)
    for j, r in enumerate(s.rows):
        if batch.rows[r].outputs.wants_scores:
            way = range(1, width) if verdict.path is None else (verdict.path[j] + 1).tolist()
            kept[r].update({k: scores[j, node] for k, node in enumerate([0, *way])})
    return verdict
