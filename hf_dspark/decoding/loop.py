"""The one decode loop: rows are admitted, and every step drafts, verifies and commits for all that are at work."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.utils import logging

from hf_dspark.drafting.copies import LONGEST, offers, shortest_match, with_copies
from hf_dspark.drafting.draft import Draft
from hf_dspark.drafting.proposer import Context, Proposer
from hf_dspark.drafting.tree_drafts import branch, kind_of, propose_trees, tree_notes
from hf_dspark.drafting.tree_parts import reach_and_sides
from hf_dspark.modeling import SpeculationConfig
from hf_dspark.scheduling.headless import survival_estimate
from hf_dspark.scheduling.policy import AutoGate, StaticGate
from hf_dspark.verification.tree import ancestors

from .batch import Batch, Commit, Request
from .cache import TargetCache, drafter_key
from .judge import judge, sampling_of
from .outputs import Seconds
from .prefill import Prefill
from .target import Target

logger = logging.get_logger("hf_dspark")
TREE_BUDGET = 32  # nodes of a stage where costs decide


class Cancelled(Exception):
    """A request was taken out before its end."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What an observer is shown after each round. Entry i of every list is the row of `commits[i]`; the seconds are
    those of all rows together. `verified` drafts of each row, and `accepted` of them before the commit cut anything
    off."""

    draft: Draft
    verified: list[int]
    accepted: list[int]
    commits: list[Commit]
    seconds: Seconds


class DecodeLoop:
    """Writes the texts of requests with a bound drafter.

    Args:
        target ([`Target`]): with its tap active. drafter: bound to it. speculation: the knobs.
        policy (*optional*): measures and decides, for what is set to "auto".
        observer (*optional*): shown every [`Round`].
        prefill_chunk (`int`, *optional*): most prompt tokens of a row per forward.
        keep_cache (`bool`): whether ended rows leave their caches behind, for `final_cache`.
    """

    def __init__(
        self,
        target: Target,
        drafter,
        speculation: SpeculationConfig,
        policy=None,
        observer: Callable[[Round], None] | None = None,
        prefill_chunk: int | None = None,
        keep_cache: bool = False,
    ):
        self.target, self.drafter, self.speculation = target, drafter, speculation
        self.policy, self.observer = policy, observer
        self.prefill_chunk, self.keep_cache = prefill_chunk, keep_cache
        self.memory = None if speculation.copy is None else getattr(drafter, "copy_memory", None)
        if self.memory is not None:
            self.memory.bind(target.config.vocab_size)
        self.tree = None if speculation.tree is None else kind_of(drafter, speculation.tree)
        self.seconds, self.finished = Seconds(), {}
        self.batch = self._batch([], None)
        self.coming: list[Prefill] = []

    # ------------------------------------------------------------------ what a caller does

    @property
    def active(self) -> int:
        """Rows at work, those whose prompts are still being read included."""
        return len(self.batch.rows) + sum(len(p.requests) for p in self.coming)

    def admit(self, requests: list[Request], cache: Callable[[], TargetCache | None] = lambda: None) -> None:
        """Let rows in; the next steps read their prompts. When their turn comes, `cache()` may give a cache that holds
        their first tokens already."""
        self.coming.append(Prefill(self.target, requests, self.prefill_chunk, lambda: self._batch(requests, cache())))

    def cancel(self, key) -> bool:
        """Take the row of this key out; whether there was one. One whose prompt is read together with others' leaves,
        with an error, when they are read."""
        rows = [i for i, row in enumerate(self.batch.rows) if row.request.key == key]
        if rows:
            self.batch.retire(rows)
            return True
        for prefill in self.coming:
            rows = [i for i, request in enumerate(prefill.requests) if request.key == key]
            if not rows:
                continue
            prefill.cancelled[rows[0]] = Cancelled(f"request {key!r} was cancelled")
            if len(prefill.cancelled) == len(prefill.requests):
                self.coming.remove(prefill)
            return True
        return False

    @torch.no_grad()
    def step(self) -> list[Commit]:
        """Read prompts that wait, `prefill_chunk` tokens of them, and run a round of the rows that were at work; what
        became output."""
        rows_at_work, read, commits = bool(self.batch.rows), 0, []
        while self.coming and (self.prefill_chunk is None or read < self.prefill_chunk):
            more, tokens = self._read_prompts()
            commits, read = commits + more, read + tokens
        if rows_at_work:
            commits += self._round()
        return commits

    def notes(self) -> list[str]:
        """What was asked of the drafter that it can't give, and what the policy decided."""
        found = self.batch.proposer.notes() + tree_notes(self.drafter, self.speculation)
        return found + ([] if self.policy is None else [self.policy.note()])

    def final_cache(self) -> TargetCache:
        """The ended rows' caches in the order of their keys, the drafter's carried along. Needs `keep_cache`."""
        first, *rest = [self.finished[key] for key in sorted(self.finished)]
        whole, draft = first
        for cache, context in rest:
            whole.append(cache)
            draft.append(context)
        whole.draft, whole.drafter = draft, drafter_key(self.drafter)
        return whole

    # ------------------------------------------------------------------ prompts

    def _batch(self, requests: list[Request], cache: TargetCache | None) -> Batch:
        cache = self.target.new_cache(len(requests)) if cache is None else cache
        carried = cache.draft if cache.drafter == drafter_key(self.drafter) else None
        if carried is not None and not torch.equal(carried.first + carried.lengths, cache.lengths):
            carried = None
        cache.draft = cache.columns = None
        gate = self.speculation.loop_gate
        if gate is not None:
            gate = AutoGate(self.policy) if gate == "auto" else StaticGate(gate)
        estimate = survival_estimate(self.drafter)
        proposer = Proposer(self.drafter, self.speculation, cache.lengths, carried, gate, estimate)
        return Batch(requests, cache, proposer, self.target.device, copying=shortest_match(self.speculation.copy))

    def _read_prompts(self) -> tuple[list[Commit], int]:
        """A chunk of the first prompts that wait; once they are read, their rows have a first token and join the
        others. What became output, and the tokens read. What goes wrong is these rows' own affair."""
        began, prefill = time.perf_counter(), self.coming[0]
        try:
            out, begin, end = prefill.advance()
        except Exception as error:
            self.coming.pop(0)
            return [Commit(request.key, [], "error", error) for request in prefill.requests], 1
        batch = prefill.batch
        batch.rows[0].outputs.add_states(out, end - begin, begin)
        commits = []
        if not prefill.windows:
            self.coming.pop(0)
            logits, features = prefill.finish()
            draft = Draft.empty(len(batch.rows), batch.device)
            commits, new = self._commit(batch, sampling_of(batch), draft, draft.lengths, logits)[:2]
            batch.proposer.observe(features, new, torch.ones(len(new), dtype=torch.long))
            self._retire(batch, commits)
            self.batch.admit(batch)
        self.seconds.prefill += time.perf_counter() - began
        return commits, (end - begin) * len(prefill.requests)

    # ------------------------------------------------------------------ a round

    def _round(self) -> list[Commit]:
        batch, clock = self.batch, Laps()
        context = self._context(batch)
        draft, verified, copies = self._draft(batch, context)
        clock.lap()
        width = max(verified) + 1
        fed = torch.cat([batch.anchors[:, None], draft.tokens[:, : width - 1]], 1)
        ends = [n + length for n, length in zip(batch.lengths, verified)]
        self.target.restart(batch.ids, batch.cache, batch.lengths)
        tree = None if draft.parents is None else ancestors(draft.parents[:, : width - 1])
        widths, flags = [1 + n for n in verified], batch.rows[0].outputs.flags
        out = self.target.forward(fed, batch.cache, ends, tree=tree, widths=None if flags else widths, **flags)
        fed_each = self.target.fed / len(batch.rows)
        commits, new, judged = self._commit(
            batch, context.sampling, draft, verified, out.logits.to(batch.device), clock
        )
        batch.rows[0].outputs.add_states(out, len(commits[0].tokens), int(batch.cache.lengths[0]))
        clock.lap()
        counts = torch.tensor([len(c.tokens) for c in commits])
        features = self.target.tap.features(self.drafter.device)
        if judged.path is not None:
            batch.cache.settle_path(judged.path)
            features = along(features, judged.path)
        batch.cache.advance(counts)
        batch.proposer.observe(features[:, : new.shape[1]], new, counts)
        clock.lap()
        self._retire(batch, commits)
        propose, verify, commit, observe, retire = clock.laps()
        seconds = Seconds(draft=propose + observe, verify=verify, overhead=commit + retire)
        self.seconds.add(seconds)
        if self.policy is not None:
            self.policy.observe(draft, verified, judged.accepted, fed_each, seconds.draft, seconds.verify)
            if copies:
                self.policy.observe_copies(copies, [c.tokens for c in commits])
        if self.observer is not None:
            self.observer(
                Round(draft=draft, verified=verified, accepted=judged.accepted, commits=commits, seconds=seconds)
            )
        return commits

    def _draft(self, batch: Batch, context: Context) -> tuple[Draft, list[int], list]:
        """What the round proposes, how much of it is verified, and what the rows could have copied."""
        if self.policy is not None:
            context_length = sum(context.lengths) / len(batch.rows)
            self.policy.begin(len(batch.rows), context_length, len(batch.rows) > 1 and self.target.packs)
        scheduler, room = self.speculation.scheduler, context.room
        copies = self._offers(batch, room)
        if self.tree is not None and (self.speculation.tree != "auto" or self.policy.use_tree()):
            draft = self._draft_trees(batch, context, copies)
            return draft, draft.lengths, copies
        lengths, planned = self._choose(copies, len(room), scheduler == "auto")
        if planned < batch.proposer.block or any(lengths):
            context.room = [0 if n else min(most, planned) for n, most in zip(lengths, room)]
        draft = with_copies(batch.proposer.propose(context), copies, lengths, room)
        if scheduler is None:
            return draft, draft.lengths, copies
        return draft, self.policy.prune(draft) if scheduler == "auto" else self.policy.allot(draft), copies

    def _draft_trees(self, batch: Batch, context: Context, copies: list) -> Draft:
        """A tree per row, with what the row could copy as a branch; its size by the policy where none was set."""
        knobs, branches, size = self.speculation, None, None
        if knobs.copy is not None:
            price = self.policy.node_price()
            branches = []
            for copy, source in copies:
                chances = self.policy.copying[source].expected(copy.match, len(copy.tokens))
                branches.append(branch(copy.tokens, [c for c in chances if c >= price]))  # they never rise
        if knobs.tree_budget is None:
            size = self.policy.tree_size
        budget = knobs.tree_budget or TREE_BUDGET
        return propose_trees(batch.proposer, context, self.tree, budget, size, branches)

    def _offers(self, batch: Batch, room: list[int]) -> list:
        """What each row could copy; empty where copies are off."""
        copy = self.speculation.copy
        if copy is None:
            return []
        limit = LONGEST if copy == "auto" else copy
        return offers([row.copies for row in batch.rows], [row.tokens for row in batch.rows], room, self.memory, limit)

    def _choose(self, copies: list, rows: int, scheduled: bool) -> tuple[list[int], int]:
        """How much of its copy each row takes, and the drafts planned for each of the others."""
        if self.speculation.copy == "auto":
            return self.policy.choose(copies, scheduled)
        lengths = [len(c.tokens) for c, _ in copies] or [0] * rows
        return lengths, 0 if all(lengths) else self.policy.plan() if scheduled else self.batch.proposer.block

    def _context(self, batch: Batch) -> Context:
        room = [min(row.left - 1, self.target.room(row.n), self.target.draft_room(row.n)) for row in batch.rows]
        keys = [row.request.key for row in batch.rows]
        return Context(keys, batch.anchors, batch.ids, batch.lengths, room, sampling_of(batch))

    def _commit(self, batch: Batch, sampling, draft: Draft, verified: list[int], logits: torch.Tensor, clock=None):
        """Judge the drafts and take what is verified: the commits, their tokens [A, T], and the judgement."""
        judged = judge(batch, sampling, draft, verified, logits, self.speculation.verification)
        if clock is not None:
            clock.lap()
        rows = list(batch.rows)
        commits, new = batch.commit(judged.tokens)
        for i, (row, commit) in enumerate(zip(rows, commits)):
            count = len(commit.tokens)
            row.outputs.add(logits[i] if judged.path is None else along(logits[i : i + 1], judged.path[i : i + 1])[0],
                            judged.scores[i], count)  # fmt: skip
            self._warn_beyond_training(row.n)
            if clock is not None:
                survived = min(judged.accepted[i], count)
                verdicts = verified[i] if count == len(judged.tokens[i]) else survived
                reach, sides = verdicts, 0
                if judged.path is not None:
                    parents, path = draft.parents[i, : verified[i]], judged.path[i, :survived]
                    deepest, sides = reach_and_sides(parents.tolist(), path.tolist())
                    reach = deepest if count == len(judged.tokens[i]) else survived
                row.outputs.add_round(count, verdicts, survived, draft.stages[i], draft.sources[i], reach, sides)
        return commits, new, judged

    def _warn_beyond_training(self, length: int) -> None:
        trained = self.drafter.config.trained_length
        if trained is not None and length > trained:
            logger.warning_once(
                f"A text is longer than the {trained} tokens this drafter was trained on: the output stays exact, but "
                "fewer drafts may be accepted. Train on longer texts, or set scheduler='auto' to draft less."
            )

    def _retire(self, batch: Batch, commits: list[Commit]) -> None:
        """Drop ended rows from everything that is per active row."""
        ended = [i for i, c in enumerate(commits) if c.reason is not None]
        if self.memory is not None and self.memory.learns:
            for i in ended:
                self.memory.add(batch.rows[i].tokens)
        if self.keep_cache:
            for i in ended:
                key = commits[i].key
                self.finished[key] = batch.cache.select([i]), batch.proposer.cache.select(torch.tensor([i]))
        if ended:
            batch.retire(ended)


def along(values: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Of values [A, N + 1, ...] of the anchor and the nodes: the anchor's and those of the `path` [A, L] (-1 is
    filling)."""
    places = torch.nn.functional.pad(path.clamp_min(0) + 1, (1, 0)).to(values.device)
    return values[torch.arange(len(values), device=values.device)[:, None], places]


class Laps:
    """Seconds between calls of `lap`."""

    def __init__(self):
        self.times = [time.perf_counter()]

    def lap(self) -> None:
        self.times.append(time.perf_counter())

    def laps(self) -> list[float]:
        self.lap()
        return [b - a for a, b in zip(self.times, self.times[1:])]
