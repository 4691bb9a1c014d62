"""Drafter + cache + knobs + noise -> drafts. The decode loop and the stock engine drive the same proposer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hf_dspark.modeling import SpeculationConfig
from hf_dspark.verification.chain import Noise
from hf_dspark.verification.probabilities import Scorer


@dataclass
class Draft:
    """What one round proposes for A active rows.

    `tokens` [A, L] target ids; `lengths` [A] drafts to verify; `q` [A, L, V] the distributions they were drawn from, or None
    for deterministic drafts; `log_q` [A, L] log-probabilities of the tokens at temperature 1, unwarped; `confidence` [A, L]
    or None; `stages` [A] drafting stages; `stage_length` drafts of a whole stage; `room` [A] most drafts that could have been,
    settled before the first of them (None: no limit).
    """

    tokens: torch.Tensor
    lengths: list[int]
    q: torch.Tensor | None
    log_q: torch.Tensor
    confidence: torch.Tensor | None
    stages: list[int]
    stage_length: int
    room: list[int] | None = None


@dataclass
class Context:
    """What drafting may know of the active rows.

    `rows` [A] output rows; `ids` [A, capacity] token buffer, drafts are written behind each row's `lengths` [A] committed
    tokens; `room` [A] most drafts worth making; `stop_ids` end a draft; `scorer` and `noise` as for the target.
    """

    rows: list[int]
    ids: torch.Tensor
    lengths: list[int]
    room: list[int]
    stop_ids: frozenset[int]
    scorer: Scorer
    noise: Noise | None


class Proposer:
    """Drafts for a batch of rows; holds the drafter's cache.

    Args:
        drafter: a bound drafter. speculation ([`SpeculationConfig`]): the call's knobs.
        first_positions ([B]): true positions of the first features to come. cache: a cache to continue, instead.
        gate: for DLoop, `gate(scores[R][S], active rows) -> [R]`: which rows draft another stage, given the summed
            log-probabilities of their stages so far.
        estimate: `estimate(log_probs[A, Vd], before[A, k], k) -> [A]`: a confidence for drafters without the head, from the
            draft law and the log-probabilities of the drafts before; never from the draft it judges.
    """

    PATIENCE = 64  # plain steps to wait with, which bounds the memory they take

    def __init__(
        self,
        drafter,
        speculation: SpeculationConfig,
        first_positions: torch.Tensor,
        cache=None,
        gate: Callable | None = None,
        estimate: Callable | None = None,
    ):
        self.drafter, self.speculation, self.gate, self.estimate = drafter, speculation, gate, estimate
        self._cache = drafter.new_cache(first_positions) if cache is None else cache
        self._seed: torch.Tensor | None = None
        self._waiting: list[tuple] = []  # features and next tokens of plain steps: what isn't drafted from needn't be read yet
        trained, wanted = drafter.config.max_block, speculation.num_draft_tokens
        longest = trained if drafter.config.fixed_block else wanted
        self.block = trained if wanted is None else min(wanted, longest)
        self.temperatures = drafter.config.confidence_temperatures

    def notes(self) -> list[str]:
        """What was asked of this drafter that it can't give."""
        wanted = self.speculation.num_draft_tokens
        if wanted is None or wanted <= self.block:
            return []
        return [
            f"num_draft_tokens={wanted} was set, and this drafter's block has {self.block} drafts, so it drafted {self.block} "
            "per stage: set loop_gate to draft more than one stage."
        ]

    # ------------------------------------------------------------------ committed tokens

    def observe(self, features: torch.Tensor, next_tokens: torch.Tensor, valid: torch.Tensor) -> None:
        """Extend the drafter's context: features [A, T, m*D] of the tokens fed, the token after each [A, T], which count."""
        if features.shape[1] == 1 and valid.all():
            self._waiting.append((features, next_tokens))
            if len(self._waiting) < self.PATIENCE:
                return
            self._catch_up()
        else:
            self._catch_up()
            self._seed = self.drafter.extend(self._cache, features, next_tokens, valid)

    def _catch_up(self) -> None:
        if self._waiting:
            features, next_tokens = (torch.cat(part, 1) for part in zip(*self._waiting))
            self._waiting.clear()
            every = torch.ones(next_tokens.shape, dtype=torch.bool)
            self._seed = self.drafter.extend(self._cache, features, next_tokens, every)

    @property
    def cache(self):
        """The drafter's, with all that was observed."""
        self._catch_up()
        return self._cache

    @property
    def seed(self) -> torch.Tensor | None:
        """[A, D], where the recursion begins; recursive drafters only."""
        self._catch_up()
        return self._seed

    def select(self, rows: list[int]) -> None:
        """Keep only these active rows."""
        index = torch.tensor(rows, dtype=torch.long)
        seed, self._cache = self.seed, self.cache.select(index)
        self._seed = None if seed is None else seed[index.to(seed.device)]

    # ------------------------------------------------------------------ drafting

    @torch.no_grad()
    def propose(self, context: Context) -> Draft:
        """Draft behind the committed tokens of `context`. The drafter's cache is afterwards as it was before."""
        if min(self.block, max(context.room, default=0)) <= 0:
            rows, empty = len(context.rows), context.ids.new_zeros(len(context.rows), 0)
            return Draft(empty, [0] * rows, None, empty.float(), None, [1] * rows, self.block)
        mark = self.cache.mark()
        try:
            return replace(self._stages(context), room=context.room)
        finally:
            self.cache.rollback(mark)

    def _stages(self, context: Context) -> Draft:
        active = list(range(len(context.rows)))
        anchors = context.ids[active, [n - 1 for n in context.lengths]]
        stage, cache = 1, self.cache
        first = self._stage(context, active, cache, anchors, self.seed, None, 0)
        parts, lengths, stages = [(active, first)], list(first.lengths), [1] * len(active)
        latest, scores = first, [[] for _ in active]
        while latest.state is not None and stage < self._max_stages():
            able = [j for j, r in enumerate(active) if latest.whole[j] and context.room[r] > lengths[r]]
            for j in able:
                scores[active[j]].append(float(latest.log_q[j].sum()))
            passed = self.gate([scores[active[j]] for j in able], len(lengths)) if able else []
            go = [j for j, yes in zip(able, passed) if yes]
            if not go:
                break
            if len(go) < len(active):  # rows that stop leave a copy behind; pseudo-context never outlives the round
                index = torch.tensor(go)
                cache, latest.state = cache.select(index), latest.state.select(index.to(latest.state.pseudo.device))
            active = [active[j] for j in go]
            anchors = latest.tokens[go, -1]
            latest = self._stage(context, active, cache, anchors, None, latest.state.pseudo, stage * self.block)
            for j, r in enumerate(active):
                lengths[r] += latest.lengths[j]
                stages[r] += 1
            parts.append((active, latest))
            stage += 1
        return self._join(parts, lengths, stages)

    def _max_stages(self) -> int:
        return self.speculation.max_draft_stages if self.gate is not None else 1

    def _stage(self, context, active, cache, anchors, seed, pseudo, offset) -> "_Block":
        """One block for rows `active`; `offset` drafts lie before it."""
        room = [context.room[r] - offset for r in active]
        steps = min(self.block, max(room))
        state, prev = self.drafter.start(cache, anchors, seed, pseudo, steps), anchors
        tokens, qs, log_qs, confidences = [], [], [], []
        for k in range(steps):
            logits, confidence, state = self.drafter.step(cache, state, prev)
            log_probs = logits.log_softmax(-1)
            confidence = self._confidence(confidence, log_probs, log_qs, k)
            prev, q, log_q = self._choose(context, active, offset + k, logits, log_probs)
            for kept, new in ((tokens, prev), (qs, q), (log_qs, log_q), (confidences, confidence)):
                kept.append(new)
            # A block is paid for as a whole; a recursive drafter spends a forward per draft, which is worth a look.
            if not self.drafter.config.fixed_block and max(self._cut(tokens, confidences, room, context.stop_ids)[0]) <= k:
                break
        lengths, ended = self._cut(tokens, confidences, room, context.stop_ids)
        whole = [n == self.block and not end for n, end in zip(lengths, ended)]
        q = None if qs[0] is None else torch.stack(qs, 1)
        conf = None if confidences[0] is None else torch.stack(confidences, 1)
        return _Block(torch.stack(tokens, 1), lengths, q, torch.stack(log_qs, 1), conf, whole, state)

    def _cut(self, tokens, confidences, room, stop_ids) -> tuple[list[int], list[bool]]:
        """Drafts to verify of each row so far, and whether a stop token is the last of them.

        A draft goes from the first confidence below the threshold on, which looks at no draft it decides about; and nothing
        is drafted behind a stop token, which itself stays.
        """
        lengths, ended = [min(len(tokens), max(n, 0)) for n in room], [False] * len(room)
        if self.speculation.confidence_threshold > 0 and confidences[0] is not None:
            sure = torch.stack(confidences, 1) >= self.speculation.confidence_threshold
            lengths = [min(n, m) for n, m in zip(lengths, sure.long().cumprod(1).sum(1).tolist())]
        if stop_ids:
            for j, row in enumerate(torch.stack(tokens, 1).tolist()):
                stop = next((k for k, token in enumerate(row[: lengths[j]]) if token in stop_ids), None)
                if stop is not None:
                    lengths[j], ended[j] = stop + 1, True
        return lengths, ended

    def _confidence(self, logit, log_probs, log_qs, k: int) -> torch.Tensor | None:
        """Chance [A] that draft k is accepted if those before it are; known before draft k is."""
        if logit is not None:
            t = 1.0 if self.temperatures is None else self.temperatures[min(k, len(self.temperatures) - 1)]
            return torch.sigmoid(logit / t)
        if self.estimate is None:
            return None
        before = torch.stack(log_qs, 1) if log_qs else log_probs.new_zeros(len(log_probs), 0)
        return self.estimate(log_probs, before, k)

    def _choose(self, context: Context, active, k, logits, log_probs):
        """Draft k of rows `active` from draft logits [A, Vd]: token [A], q [A, V] or None, log-probability [A]."""
        drafter = self.drafter
        if context.noise is None and context.scorer.empty:
            draft_ids = logits.argmax(-1)
            tokens, q = drafter.target_ids(draft_ids), None
            chosen = log_probs.gather(-1, draft_ids[:, None])[:, 0]
        else:
            tokens, q, chosen = self._choose_scored(context, active, k, logits, log_probs)
        tokens = tokens.to(context.ids.device)
        # A row without room drafts along with the others, into the one column behind its room.
        columns = [context.lengths[r] + min(k, context.room[r]) for r in active]
        context.ids[active, columns] = tokens
        return tokens, q, chosen

    def _choose_scored(self, context, active, k, logits, log_probs):
        if hasattr(self.drafter, "d2t"):
            full = logits.new_full((len(active), self.drafter.config.vocab_size), -torch.inf)
            index = self.drafter.target_ids()
            logits, log_probs = full.index_copy(1, index, logits), full.index_copy(1, index, log_probs)
        scores, live = logits.float(), list(range(len(active)))
        if not context.scorer.prefix_free:
            live = [j for j in live if not self._decided(context, active[j], k)]
        if live:
            prefixes = [context.ids[r : r + 1, : context.lengths[r] + k] for r in (active[j] for j in live)]
            rows = [context.rows[active[j]] for j in live]
            scores = scores.index_copy(
                0, torch.tensor(live, device=scores.device), context.scorer.draft_scores(rows, prefixes, logits[live])
            )
        hopeless = ~torch.isfinite(scores).any(-1, keepdim=True)  # nothing allowed is in the drafter's vocabulary
        scores = torch.where(hopeless, logits.float(), scores)
        if context.noise is None:
            tokens, q = scores.argmax(-1), None
        elif self.speculation.verification == "match":
            tokens, q = context.noise.sample(scores, active, k, "target"), None  # shared noise raises acceptance
        else:
            q = scores.softmax(-1)
            tokens = context.noise.sample_mass(q, active, k, "draft")
        return tokens, q, log_probs.gather(-1, tokens[:, None])[:, 0]

    @staticmethod
    def _decided(context: Context, r: int, k: int) -> bool:
        """Whether draft k of row `r` won't be verified, so that processors aren't asked about a prefix that can't be."""
        drafted = context.ids[r, context.lengths[r] : context.lengths[r] + k]
        return k >= context.room[r] or not context.stop_ids.isdisjoint(drafted.tolist())

    def _join(self, parts, lengths, stages) -> Draft:
        """Lay the stages of each row side by side; a row without a later stage holds zeros there, beyond its length."""
        (rows, first), rest = parts[0], parts[1:]
        if not rest:
            return Draft(first.tokens, lengths, first.q, first.log_q, first.confidence, stages, self.block)

        def joined(name):
            columns = [getattr(first, name)]
            if columns[0] is None:
                return None
            for active, block in rest:
                value = getattr(block, name)
                wide = value.new_zeros(len(rows), *value.shape[1:])
                wide[active] = value
                columns.append(wide)
            return torch.cat(columns, 1)

        return Draft(joined("tokens"), lengths, joined("q"), joined("log_q"), joined("confidence"), stages, self.block)


@dataclass
class _Block:
    tokens: torch.Tensor
    lengths: list[int]
    q: torch.Tensor | None
    log_q: torch.Tensor
    confidence: torch.Tensor | None
    whole: list[bool]
    state: object
