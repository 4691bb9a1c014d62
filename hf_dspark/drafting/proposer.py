"""Drafter + context + knobs + noise -> drafts. The decode loop and the stock engine drive the same proposer."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hf_dspark.modeling import SpeculationConfig
from hf_dspark.verification.chain import Noise
from hf_dspark.verification.noise import possible, real_dtype
from hf_dspark.verification.probabilities import Scorer

from .draft import Draft


@dataclass
class Sampling:
    """How some active rows draw: `rows` [R] among them, their numbers `places` [R] in `scorer`, and `noise` or None.

    `errors` {active row: exception} collects what processors raise, so that one row's fault isn't its neighbours'.
    """

    rows: list[int]
    places: list[int]
    scorer: Scorer
    noise: Noise | None
    stop_ids: frozenset[int]
    errors: dict[int, Exception] = field(default_factory=dict)


@dataclass
class Context:
    """What drafting may know of the A active rows.

    `rows` [A] their callers' names; `anchors` [A] their last committed tokens; `ids` [A, capacity] the committed
    tokens, `lengths` [A] of each; `room` [A] most drafts worth making; `sampling`: one entry for the rows of each call.
    """

    rows: list
    anchors: torch.Tensor
    ids: torch.Tensor
    lengths: list[int]
    room: list[int]
    sampling: list[Sampling]


class Proposer:
    """Drafts for a batch of rows; holds the drafter's cache.

    Args:
        drafter: a bound drafter. speculation ([`SpeculationConfig`]): the call's knobs.
        first_positions ([B]): true positions of the first features to come. cache: a cache to continue, instead.
        gate: for DLoop, `gate(scores[R][S], active rows) -> [R]`: which rows draft another stage, given the summed
            log-probabilities of their stages so far.
        estimate: `estimate(log_probs[A, Vd], before[A, k], k) -> [A]`: a confidence logit for drafters without the
            head, from the draft law and the log-probabilities of the drafts before; never from the draft it judges.
    """

    PATIENCE = 64  # tokens to wait with, which bounds the memory they take

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
        self.unusable = 0  # laws that weren't finite
        self._waiting: list[tuple] = []  # features and next tokens: what isn't drafted from needn't be read yet
        trained, wanted = drafter.config.max_block, speculation.num_draft_tokens
        longest = trained if drafter.config.fixed_block else wanted
        self.block = trained if wanted is None else min(wanted, longest)
        self.temperatures = drafter.config.confidence_temperatures

    def notes(self) -> list[str]:
        """What was asked of this drafter that it can't give."""
        wanted, found = self.speculation.num_draft_tokens, []
        if self.unusable:
            found.append(
                f"{self.unusable} times the drafter gave logits that aren't finite, and nothing was drafted from them; "
                "the output is the target's all the same. Check its weights, or load it in float32."
            )
        if wanted is None or wanted <= self.block:
            return found
        return found + [
            f"num_draft_tokens={wanted} was set, and this drafter's block has {self.block} drafts, so it drafted {self.block} "
            "per stage: set loop_gate to draft more than one stage."
        ]

    # ------------------------------------------------------------------ committed tokens

    def observe(self, features: torch.Tensor, next_tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Extend the drafter's context: of the features [A, T, m*D] of the tokens fed, and of the token after each [A,
        T], the first `counts` [A] (on the host)."""
        low, high = (int(x) for x in torch.aminmax(counts))
        features, next_tokens = features[:, :high], next_tokens[:, :high]
        if low == high:
            self._waiting.append((features, next_tokens))
            if sum(f.shape[1] for f, _ in self._waiting) >= self.PATIENCE:
                self._catch_up()
        else:
            self._catch_up()
            self._extend(features, next_tokens, counts)

    def _extend(self, features, next_tokens, counts) -> None:
        valid = torch.arange(features.shape[1]) < counts[:, None]
        self._seed = self.drafter.extend(self._cache, features, next_tokens, valid)

    def _catch_up(self) -> None:
        if self._waiting:
            features, next_tokens = (torch.cat(part, 1) for part in zip(*self._waiting))
            self._waiting.clear()
            self._extend(features, next_tokens, torch.full(next_tokens.shape[:1], next_tokens.shape[1]))

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

    def keep(self, order: list[int]) -> None:
        """Let active row i be what row `order[i]` was, and the rest go."""
        seed = self.seed
        self.cache.keep(order)
        if seed is not None:
            self._seed = seed[torch.tensor(order, dtype=torch.long, device=seed.device)]

    def append(self, other: "Proposer") -> None:
        """Admit another proposer's rows below ours."""
        mine, theirs = self.seed, other.seed
        self.cache.append(other.cache)
        if mine is not None:
            self._seed = torch.cat([mine, theirs])

    # ------------------------------------------------------------------ drafting

    @torch.no_grad()
    def propose(self, context: Context) -> Draft:
        """Draft behind the committed tokens of `context`. The drafter's cache is afterwards as it was before."""
        if min(self.block, max(context.room, default=0)) <= 0:
            return Draft.empty(len(context.room), context.ids.device, self.block, context.room)
        mark = self.cache.mark()
        try:
            return self._stages(context)
        finally:
            self.cache.rollback(mark)

    def _stages(self, context: Context) -> Draft:
        active = list(range(len(context.room)))
        stage, cache = 1, self.cache
        block = self._stage(context, active, cache, context.anchors, self.seed, None, [])
        parts, lengths, stages = [(active, block)], list(block.lengths), [1] * len(active)
        scores: list[list[float]] = [[] for _ in active]
        while stage < self._max_stages() and block.state is not None:
            able = [j for j, r in enumerate(active) if block.whole[j] and context.room[r] > lengths[r]]
            for j in able:
                scores[active[j]].append(block.sums[j])
            passed = self.gate([scores[active[j]] for j in able], len(lengths)) if able else []
            on = [j for j, yes in zip(able, passed) if yes]
            if not on:
                break
            if len(on) < len(active):  # rows that stop leave a copy behind; pseudo-context never outlives the round
                index = torch.tensor(on)
                cache, block.state = cache.select(index), block.state.select(index.to(block.state.pseudo.device))
            active = [active[j] for j in on]
            anchors, before = block.tokens[on, -1], self._before(parts, active)
            block = self._stage(context, active, cache, anchors, None, block.state.pseudo, before)
            for j, r in enumerate(active):
                lengths[r] += block.lengths[j]
                stages[r] += 1
            parts.append((active, block))
            stage += 1
        return self._join(context, parts, lengths, stages)

    def _max_stages(self) -> int:
        return self.speculation.max_draft_stages if self.gate is not None else 1

    @staticmethod
    def _before(parts, active) -> list[torch.Tensor]:
        """The drafts [R] of the rows `active`, position by position, of all stages so far."""
        columns = []
        for rows, block in parts:
            places = {r: j for j, r in enumerate(rows)}
            columns += block.tokens[[places[r] for r in active]].unbind(1)
        return columns

    def _stage(self, context, active, cache, anchors, seed, pseudo, before) -> "_Block":
        """One block for rows `active`; `before` are the drafts [R] of earlier stages."""
        room = [max(context.room[r] - len(before), 0) for r in active]
        steps = min(self.block, max(room))
        state, prev = self.drafter.start(cache, anchors, seed, pseudo, steps), anchors
        tokens, qs, log_qs, confidences, able = list(before), [], [], [], []
        sampling = self._sampling_of(context, active)
        for k in range(steps):
            logits, confidence, state = self.drafter.step(cache, state, prev)
            log_probs = logits.log_softmax(-1)
            able.append(possible(logits))
            confidences.append(self._confidence(confidence, log_probs, log_qs, k))
            prev, q, log_q = self._choose(context, active, sampling, tokens, logits, log_probs)
            tokens.append(prev)
            qs.append(q)
            log_qs.append(log_q)
            # A block is paid for as a whole; a recursive drafter spends a forward per draft, which is worth a look.
            if self.drafter.config.recursive and self.speculation.confidence_threshold > 0:
                cut = self._cut(torch.stack(tokens[len(before) :], 1), confidences, able, room, sampling)
                if int(cut.max()) <= k:
                    break
        return self._block(tokens[len(before) :], qs, log_qs, confidences, able, room, sampling, state)

    def _block(self, tokens, qs, log_qs, confidences, able, room, sampling, state) -> "_Block":
        """The steps side by side, and what the host must know of them, in one copy."""
        tokens, log_q = torch.stack(tokens, 1), torch.stack(log_qs, 1)
        lengths = self._cut(tokens, confidences, able, room, sampling)
        ended = _stops(tokens, sampling).any(1)
        able, real = torch.stack(able, 1), real_dtype(tokens.device)
        log_q = torch.where(able, log_q, 0.0)
        facts = [lengths.to(real), ended.to(real), (~able).sum(1).to(lengths.device, real)]
        if self.gate is not None:
            facts.append(log_q.to(real).sum(1))
        lengths, ended, unusable, *sums = torch.stack(facts).tolist()
        self.unusable += int(sum(unusable))
        lengths = [int(n) for n in lengths]
        whole = [n == self.block and not end for n, end in zip(lengths, ended)]
        q = None if qs[0] is None else torch.stack(qs, 1)
        confidence = None if confidences[0] is None else torch.where(able, torch.stack(confidences, 1), 0.0)
        return _Block(tokens, lengths, q, log_q, confidence, whole, sums[0] if sums else [], state)

    def _cut(self, tokens, confidences, able, room, sampling) -> torch.Tensor:
        """Drafts [R] to verify of each row so far.

        A draft is cut off from the first confidence below the threshold on, or the first law that isn't finite
        (`able`), which look at no draft they decide about; and nothing is drafted behind a stop token, which itself
        stays.
        """
        most = torch.tensor(room).clamp(max=tokens.shape[1]).to(tokens.device)
        stops = _stops(tokens, sampling)
        going = ((stops.long().cumsum(1) - stops.long()) == 0) & torch.stack(able, 1).to(stops.device)
        threshold = self.speculation.confidence_threshold
        if threshold > 0 and confidences[0] is not None:
            sure = torch.sigmoid(torch.stack(confidences, 1)) >= threshold
            going = going & sure.to(going.device)
        return torch.minimum(going.long().cumprod(1).sum(1), most)

    def _confidence(self, logit, log_probs, log_qs, k: int) -> torch.Tensor | None:
        """Logit [A] of the chance that draft k is accepted if those before it are; known before draft k is."""
        if logit is not None:
            t = 1.0 if self.temperatures is None else self.temperatures[min(k, len(self.temperatures) - 1)]
            return logit / t
        if self.estimate is None:
            return None
        before = torch.stack(log_qs, 1) if log_qs else log_probs.new_zeros(len(log_probs), 0)
        return self.estimate(log_probs, before, k)

    # ------------------------------------------------------------------ one draft

    @staticmethod
    def _sampling_of(context, active) -> list[Sampling]:
        """The context's sampling, its rows counted among `active`."""
        if len(active) == len(context.room):
            return context.sampling
        place, out = {r: j for j, r in enumerate(active)}, []
        for s in context.sampling:
            mine = [i for i, r in enumerate(s.rows) if r in place]
            if mine:
                rows = [place[s.rows[i]] for i in mine]
                noise = None if s.noise is None else s.noise.select(mine)
                out.append(Sampling(rows, [s.places[i] for i in mine], s.scorer, noise, s.stop_ids, s.errors))
        return out

    def _choose(self, context, active, sampling, before, logits, log_probs):
        """The next draft of rows `active` from draft logits [R, Vd]: tokens [R], q [R, V] or None, log-probabilities
        [R]."""
        if all(s.noise is None and s.scorer.empty for s in sampling):
            draft_ids = logits.argmax(-1)
            tokens = self.drafter.target_ids(draft_ids).to(context.ids.device)
            return tokens, None, log_probs.gather(-1, draft_ids[:, None])[:, 0]
        if hasattr(self.drafter, "d2t"):
            full = logits.new_full((len(active), self.drafter.config.vocab_size), -torch.inf)
            index = self.drafter.target_ids()
            logits, log_probs = full.index_copy(1, index, logits), full.index_copy(1, index, log_probs)
        if len(sampling) == 1:
            tokens, q = self._draw(context, active, sampling[0], before, logits)
        else:
            tokens, q = self._draw_all(context, active, sampling, before, logits)
        chosen = log_probs.gather(-1, tokens.to(log_probs.device)[:, None])[:, 0]
        return tokens.to(context.ids.device), q, chosen

    def _draw_all(self, context, active, sampling, before, logits):
        """As `_draw` for rows that draw in different ways: where some have a law, the others' drafts are sure."""
        tokens, laws = logits.new_zeros(len(active), dtype=torch.long), {}
        for s in sampling:
            drawn, q = self._draw(context, active, s, [b[s.rows] for b in before], logits[s.rows])
            tokens[s.rows] = drawn
            if q is not None:
                laws[tuple(s.rows)] = q
        if not laws:
            return tokens, None
        q = torch.nn.functional.one_hot(tokens, logits.shape[-1]).float()
        for rows, law in laws.items():
            q[list(rows)] = law
        return tokens, q

    def _draw(self, context, active, s: Sampling, before, logits):
        """Tokens [R] and q [R, V] or None of one sampling's rows, from logits [R, V] over the target's vocabulary."""
        scores, k = logits.float(), len(before)
        if not s.scorer.prefix_free:
            live = self._undecided(context, active, s, before)
            if live:
                prefixes = [self._prefix(context, active[s.rows[i]], [b[i] for b in before]) for i in live]
                try:
                    scored = s.scorer.draft_scores([s.places[i] for i in live], prefixes, logits[live])
                    scores = scores.index_copy(0, torch.tensor(live, device=scores.device), scored)
                except Exception as error:
                    s.errors.update((active[s.rows[i]], error) for i in live)
        elif not s.scorer.empty:
            scores = s.scorer.draft_scores(s.places, None, logits)
        hopeless = ~torch.isfinite(scores).any(-1, keepdim=True)  # nothing allowed is in the drafter's vocabulary
        scores = torch.where(hopeless, logits.float(), scores)
        rows = list(range(len(s.rows)))
        if s.noise is None:
            return scores.argmax(-1), None
        if self.speculation.verification == "match":
            return s.noise.sample(scores, rows, k, "target"), None  # shared noise raises acceptance
        q = scores.softmax(-1)
        return s.noise.sample_mass(q, rows, k, "draft"), q

    @staticmethod
    def _prefix(context, r: int, drafted) -> torch.Tensor:
        committed = context.ids[r, : context.lengths[r]]
        return torch.cat([committed, torch.stack(drafted)])[None] if drafted else committed[None]

    @staticmethod
    def _undecided(context, active, s: Sampling, before) -> list[int]:
        """Rows of `s` whose next draft may be verified, so that processors aren't asked about a prefix that can't
        be."""
        drafted = torch.stack(before, 1).tolist() if before else [[]] * len(s.rows)
        room = [context.room[active[j]] for j in s.rows]
        return [i for i, row in enumerate(drafted) if len(row) < room[i] and s.stop_ids.isdisjoint(row)]

    def _join(self, context, parts, lengths, stages) -> Draft:
        """Lay the stages of each row side by side; a row without a later stage holds zeros there, beyond its length."""
        (rows, first), rest = parts[0], parts[1:]

        def joined(name):
            columns = [getattr(first, name)]
            if columns[0] is None:
                return None
            for active, block in rest:
                value = getattr(block, name)
                wide = value.new_zeros(len(rows), *value.shape[1:])
                wide[active] = value
                columns.append(wide)
            return torch.cat(columns, 1) if rest else columns[0]

        return Draft(
            tokens=joined("tokens"),
            lengths=lengths,
            q=joined("q"),
            log_q=joined("log_q"),
            confidence=joined("confidence"),
            stages=stages,
            block=self.block,
            room=context.room,
        )


@dataclass
class _Block:
    tokens: torch.Tensor
    lengths: list[int]
    q: torch.Tensor | None
    log_q: torch.Tensor
    confidence: torch.Tensor | None
    whole: list[bool]
    sums: list[float]
    state: object


def _at(rows: list[int], count: int):
    """An index for `rows` of `count`: a slice where they are all, which copies nothing."""
    return slice(None) if len(rows) == count else rows


def _stops(tokens: torch.Tensor, sampling: list[Sampling]) -> torch.Tensor:
    """Which drafts [R, L] are stop tokens of their row."""
    stops = torch.zeros_like(tokens, dtype=torch.bool)
    for s in sampling:
        if s.stop_ids:
            rows = _at(s.rows, len(tokens))
            stops[rows] = torch.isin(tokens[rows], torch.tensor(sorted(s.stop_ids), device=tokens.device))
    return stops
