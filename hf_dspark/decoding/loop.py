"""The one decode loop: prefill, then rounds of draft, verify, commit, for rows of any lengths, as a generator of commits."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers.utils import logging

from hf_dspark.drafting.proposer import Context, Draft, Proposer
from hf_dspark.modeling import SpeculationConfig
from hf_dspark.verification.chain import Noise, Verdict, verify_block, verify_match, verify_ratio
from hf_dspark.verification.commit import commit, row_stopped
from hf_dspark.verification.probabilities import Scorer

from .cache import TargetCache, drafter_key
from .outputs import Recorder, SpeculationStats
from .policy import AutoGate, Policy, StaticGate, survival_estimate
from .target import Target

logger = logging.get_logger("hf_dspark")


@dataclass
class Request:
    """One output row: its unpadded prompt [n], noise stream, budget of new tokens, and the columns `shown` to criteria."""

    row: int
    prompt: torch.Tensor
    budget: int
    shown: torch.Tensor


@dataclass
class Settings:
    """What holds for all rows of a call."""

    do_sample: bool
    seed: int
    stop_ids: frozenset[int]
    criteria: object
    prefill_chunk: int | None = None


@dataclass
class Commit:
    """Tokens that became output in a round."""

    row: int
    tokens: list[int]
    reason: str | None


@dataclass
class Round:
    """What an observer is shown after each round. Row i of `draft` and `verdict` is the row of `commits[i]`; the seconds are
    those of all rows together."""

    draft: Draft
    verdict: Verdict
    commits: list[Commit]
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float


class Slot:
    """A row at work: `n` committed tokens, the first `start` of them its prompt."""

    def __init__(self, request: Request):
        self.request, self.row = request, request.row
        self.start = self.n = len(request.prompt)

    @property
    def generated(self) -> int:
        return self.n - self.start

    @property
    def left(self) -> int:
        return self.request.budget - self.generated


class DecodeLoop:
    """Decodes requests with a bound drafter. Iterate over `run()`; everything else is its parts.

    Args:
        target ([`Target`]): with its tap active. drafter: bound to it. speculation, settings: the call's knobs.
        requests: one per row. cache: the target's, holding each row's first tokens already (usually none).
        scorer, recorder, stats: shared with the caller. policy: measures and decides, for what is set to "auto".
    """

    def __init__(
        self,
        target: Target,
        drafter,
        speculation: SpeculationConfig,
        settings: Settings,
        requests: list[Request],
        cache: TargetCache,
        scorer: Scorer,
        recorder: Recorder,
        stats: SpeculationStats,
        keep_cache: bool = False,
        policy: Policy | None = None,
    ):
        self.target, self.drafter, self.speculation, self.settings = target, drafter, speculation, settings
        self.scorer, self.recorder, self.stats, self.cache = scorer, recorder, stats, cache
        self.slots = [Slot(r) for r in requests]
        room = max(len(r.prompt) + r.budget for r in requests)
        self.ids = torch.zeros(len(requests), room + 1, dtype=torch.long, device=target.device)
        for i, request in enumerate(requests):
            self.ids[i, : len(request.prompt)] = request.prompt
        carried = cache.draft if cache.drafter == drafter_key(drafter) else None
        if carried is not None and not torch.equal(carried.first + carried.lengths, cache.lengths):
            carried = None
        self.policy = policy
        self.proposer = Proposer(drafter, speculation, cache.lengths, carried, self._gate(), survival_estimate(drafter))
        self.keep_cache, self.finished = keep_cache, {}
        # A callable that is shown every `Round`; set on the drafter, as the one object a caller shares with this loop.
        self.observer = getattr(drafter, "observer", None)

    def _gate(self):
        gate = self.speculation.loop_gate
        if gate is None:
            return None
        return AutoGate(self.policy) if gate == "auto" else StaticGate(gate)

    # ------------------------------------------------------------------ the generator

    def run(self) -> Iterator[list[Commit]]:
        """Yields the commits of the prefill, then of each round, until every row has ended."""
        began = time.perf_counter()
        commits = self._prefill()
        self.stats.prefill_seconds += time.perf_counter() - began
        yield commits
        while self.slots:
            yield self._round()

    def final_cache(self) -> TargetCache:
        """The rows' caches in output order, the drafter's carried along. Needs `keep_cache`."""
        rows = [self.finished[row] for row in sorted(self.finished)]
        whole, draft = rows[0]
        for cache, context in rows[1:]:
            whole.append(cache)
            draft.append(context)
        whole.draft, whole.drafter = draft, drafter_key(self.drafter)
        return whole

    # ------------------------------------------------------------------ prefill

    def _prefill(self) -> list[Commit]:
        past, n = self.cache.lengths, torch.tensor([s.n for s in self.slots])
        rest = n - past
        if (rest < 1).any():
            raise ValueError(
                f"past_key_values already holds {past.tolist()} tokens of prompts of {n.tolist()}, which leaves nothing to "
                "feed: pass input_ids that go on at least one token beyond the cache."
            )
        total = int(rest.max())
        chunk = self.settings.prefill_chunk or total
        logits, features = [None] * len(n), [None] * len(n)
        for begin in range(0, total, chunk):
            end = min(begin + chunk, total)
            self._prefill_chunk(past, rest, begin, end, logits, features)
        self.cache.lengths = n
        verdict, scores = self._verify(torch.stack(logits)[:, None], _no_draft(self.ids, len(n)))
        commits = self._commit(verdict, _no_draft(self.ids, len(n)), torch.stack(logits)[:, None], scores, first=True)
        tokens = torch.tensor([[c.tokens[0]] for c in commits], device=self.ids.device)
        self.proposer.observe(torch.stack(features)[:, None], tokens, torch.ones(len(n), 1, dtype=torch.bool))
        self._retire(commits)
        return commits

    def _prefill_chunk(self, past, rest, begin, end, logits, features) -> None:
        """Feed tokens begin..end of every row's rest. All rows write the same number of slots: what lies beyond a short row's
        end is never attended and later overwritten. Each row's last feature waits for the token that follows it."""
        device = self.ids.device
        columns = (past[:, None] + torch.arange(begin, end + 1)).clamp_max(self.ids.shape[1] - 1).to(device)
        ids = self.ids.gather(1, columns)
        ending = [r for r, m in enumerate(rest.tolist()) if begin < m <= end]
        keep = sorted({int(rest[r]) - 1 - begin for r in ending}) or [0]
        self.cache.lengths = past + begin
        keep_at = torch.tensor(keep, device=device)
        out = self.target.forward(ids[:, :-1], self.cache, past + rest, keep_at, **self.recorder.flags)
        self.recorder.add_states(out, end - begin, begin)
        tapped = self.target.tap.features(self.drafter.device)
        for r in ending:
            last = int(rest[r]) - 1 - begin
            logits[r], features[r] = out.logits[r, keep.index(last)].to(device), tapped[r, last]
        valid = torch.arange(begin, end) < (rest - 1)[:, None]
        if valid.any():
            self.proposer.observe(tapped, ids[:, 1:], valid)

    # ------------------------------------------------------------------ a round

    def _round(self) -> list[Commit]:
        clock = [time.perf_counter()]
        context = self._context()
        if self.policy is not None:
            self.policy.begin(len(self.slots), sum(context.lengths) / len(self.slots))
        if self.speculation.scheduler is not None:
            planned = self.policy.plan()
            context.room = [min(room, planned) if planned < self.proposer.block else room for room in context.room]
        draft = self.proposer.propose(context)
        if self.speculation.scheduler is not None:
            draft.lengths = self.policy.prune(draft)
        clock.append(time.perf_counter())
        self.target.restart(self.ids, self.cache, [s.n for s in self.slots])
        fed = self._fed(max(draft.lengths))
        ends = [s.n + length for s, length in zip(self.slots, draft.lengths)]
        out = self.target.forward(fed, self.cache, ends, **self.recorder.flags)
        logits = out.logits.to(self.ids.device)
        clock.append(time.perf_counter())
        verdict, scores = self._verify(logits, draft)
        commits = self._commit(verdict, draft, logits, scores)
        self.recorder.add_states(out, len(commits[0].tokens), int(self.cache.lengths[0]))
        clock.append(time.perf_counter())
        self._observe(commits, fed.shape[1])
        clock.append(time.perf_counter())
        self._retire(commits)
        clock.append(time.perf_counter())
        propose, verify, commit_, observe, retire = (b - a for a, b in zip(clock, clock[1:]))
        self.stats.draft_seconds += propose + observe
        self.stats.verify_seconds += verify
        self.stats.overhead_seconds += commit_ + retire
        if self.policy is not None:
            accepted = verdict.accepted.tolist()
            self.policy.observe(draft, draft.lengths, accepted, fed.shape[1], propose + observe, verify)
        if self.observer is not None:
            self.observer(Round(draft, verdict, commits, propose + observe, verify, commit_ + retire))
        return commits

    def _context(self) -> Context:
        limit = getattr(self.target.config, "max_position_embeddings", None) or 0
        room = [min(s.left - 1, limit - s.n) if limit >= s.n else s.left - 1 for s in self.slots]
        room = [min(most, self.target.draft_room(s.n)) for most, s in zip(room, self.slots)]
        return Context(
            rows=[s.row for s in self.slots],
            ids=self.ids,
            lengths=[s.n for s in self.slots],
            room=room,
            stop_ids=self.settings.stop_ids,
            scorer=self.scorer,
            noise=self._noise(),
        )

    def _noise(self) -> Noise | None:
        if not self.settings.do_sample:
            return None
        return Noise(self.settings.seed, [s.row for s in self.slots], [s.generated for s in self.slots])

    def _fed(self, length: int) -> torch.Tensor:
        """The anchor and `length` drafts of each row, [A, length + 1]."""
        n = torch.tensor([s.n for s in self.slots], device=self.ids.device)
        return self.ids.gather(1, (n[:, None] - 1 + torch.arange(length + 1, device=n.device)).clamp_max(self.ids.shape[1] - 1))

    def _verify(self, logits: torch.Tensor, draft: Draft) -> tuple[Verdict, list[dict]]:
        """Judge the drafts by target logits [A, L+1, V]; processed scores are kept per row and position if asked for."""
        kept: list[dict] = [{} for _ in self.slots]

        drafted, stop_ids = draft.tokens.tolist(), self.settings.stop_ids

        def scores_at(i, rows):
            scores = logits[rows, i].float()
            # Behind a stop token nothing is decided any more, and processors may not expect to be asked.
            live = [j for j, r in enumerate(rows) if not i or drafted[r][i - 1] not in stop_ids]
            if live:
                prefixes = [self.ids[r : r + 1, : self.slots[r].n + i] for r in (rows[j] for j in live)]
                scores[live] = self.scorer.target_scores([self.slots[rows[j]].row for j in live], prefixes, scores[live])
            if self.recorder.wants_scores:
                for r, s in zip(rows, scores):
                    kept[r][i] = s
            return scores

        noise = self._noise()
        if noise is None or self.speculation.verification == "match":
            return verify_match(scores_at, draft.tokens, draft.lengths, noise), kept
        verify = verify_block if self.speculation.verification == "block" else verify_ratio
        q = None if draft.q is None else draft.q.to(logits.device)
        return verify(scores_at, draft.tokens, q, draft.lengths, noise), kept

    def _commit(self, verdict, draft, logits, scores, first=False) -> list[Commit]:
        accepted, following = verdict.accepted.tolist(), verdict.next_token.tolist()
        drafted, commits = draft.tokens.tolist(), []
        for i, slot in enumerate(self.slots):
            self.ids[i, slot.n + accepted[i]] = following[i]
            tokens = drafted[i][: accepted[i]] + [following[i]]
            stopped = None
            if self.settings.criteria:
                new = self.ids[i, slot.start : slot.n + len(tokens)]
                row = torch.cat([slot.request.shown, new])[None]
                seen = None
                if self.recorder.wants_scores:
                    seen = self.recorder.scores[slot.row] + [scores[i][k] for k in range(len(tokens))]
                stopped = row_stopped(self.settings.criteria, row, len(slot.request.shown) + slot.generated, seen)
            kept, reason = commit(tokens, self.settings.stop_ids, slot.left, stopped)
            self.recorder.add(slot.row, logits[i], scores[i], len(kept))
            slot.n += len(kept)
            self._warn_beyond_training(slot.n)
            if not first:
                survived = min(accepted[i], len(kept))
                verified = draft.lengths[i] if len(kept) == len(tokens) else survived
                self.stats.add(slot.row, len(kept), verified, survived, draft.stages[i])
            commits.append(Commit(slot.row, kept, reason))
        return commits

    def _warn_beyond_training(self, length: int) -> None:
        trained = self.drafter.config.trained_length
        if trained is not None and length > trained:
            logger.warning_once(
                f"A text is longer than the {trained} tokens this drafter was trained on: the output stays exact, but fewer "
                "drafts may be accepted. Train on longer texts, or set scheduler='auto' to draft less."
            )

    def _observe(self, commits: list[Commit], fed: int) -> None:
        """Count the committed tokens in both caches; the last committed token is the new anchor and has no entry yet."""
        counts = torch.tensor([len(c.tokens) for c in commits])
        features = self.target.tap.features(self.drafter.device)
        before = torch.tensor([s.n for s in self.slots]) - counts
        columns = (before[:, None] + torch.arange(fed)).clamp_max(self.ids.shape[1] - 1).to(self.ids.device)
        self.cache.advance(counts)
        self.proposer.observe(features, self.ids.gather(1, columns), torch.arange(fed) < counts[:, None])

    def _retire(self, commits: list[Commit]) -> None:
        """Drop ended rows from everything that is per active row."""
        keep = [i for i, c in enumerate(commits) if c.reason is None]
        if len(keep) == len(commits):
            return
        if self.keep_cache:
            for i, c in enumerate(commits):
                if c.reason is not None:
                    index = torch.tensor([i])
                    self.finished[c.row] = (self.cache.select([i]), self.proposer.cache.select(index))
        self.slots = [self.slots[i] for i in keep]
        if keep:
            self.cache, self.ids = self.cache.select(keep), self.ids[keep]
            self.proposer.select(keep)


def _no_draft(ids: torch.Tensor, rows: int) -> Draft:
    """The prefill's draft: nothing, so that the first token takes the path of every other."""
    empty = ids.new_zeros(rows, 0)
    return Draft(empty, [0] * rows, None, empty.float(), None, [0] * rows, 0)
