"""A drafter's block, or its recursion, as a tree per row: built, kept inside the room, continued by stages and
copies."""

import math
from collections.abc import Callable

import torch
from transformers import TemperatureLogitsWarper

from hf_dspark.verification.noise import possible

from .draft import Draft
from .proposer import Context, Proposer, Sampling
from .tree_parts import keep, pad
from .trees import (
    Tree,
    ancestors,
    chain,
    dartree,
    ddtree,
    depths,
    eagle2,
    graft,
    head_step,
    jetspec,
    path_to,
    prune,
    recursive_expand,
    sampled,
    tip,
)

JETSPEC_WIDTH, EAGLE_WIDTH = 7, 10  # the references' defaults
KINDS = {True: ("eagle2",), False: ("ddtree", "dartree", "jetspec")}  # by `recursive`


def kind_of(drafter, wanted: str) -> str:
    """The tree to build with `drafter`: what is `wanted`, or, for "auto", what suits its kind.

    Raises:
        ValueError: a tree that another kind of drafter makes, or none.
    """
    name = type(drafter).__name__
    if drafter.config.max_block < 1:
        raise ValueError(f"tree={wanted!r} was set, and a {name} only copies, one chain at a time: set tree=None.")
    if wanted == "auto":
        causal = getattr(drafter, "correction", None) is not None
        return "eagle2" if drafter.config.recursive else "dartree" if causal else "ddtree"
    able = KINDS[drafter.config.recursive]
    if wanted not in able:
        what = "drafts token by token" if drafter.config.recursive else "drafts a block at once"
        raise ValueError(f"tree={wanted!r} was set, and a {name} {what}: set tree to one of {able}, or 'auto'.")
    return wanted


def check_trees(target, drafter, speculation) -> None:
    """Refuse a tree that the drafter can't draft or the target can't verify, before any work.

    Raises:
        ValueError: naming what to set instead.
    """
    if speculation.tree is None:
        return
    kind_of(drafter, speculation.tree)
    kernel = target.config._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise ValueError(
            f"tree={speculation.tree!r} was set, and attn_implementation={kernel!r} takes no mask per token, which "
            "branches need: load the target with attn_implementation='sdpa', or set tree=None."
        )


def tree_notes(drafter, speculation) -> list[str]:
    """Knobs that trees don't heed."""
    if speculation.tree is None:
        return []
    notes, kind = [], kind_of(drafter, speculation.tree)
    if kind == "eagle2" and speculation.loop_gate is not None:
        gate = speculation.loop_gate
        notes.append(f"loop_gate={gate} was set, and trees of kind eagle2 are never looped: one stage was drafted.")
    unheeded = {"confidence_threshold": speculation.confidence_threshold > 0}
    unheeded["scheduler"] = speculation.scheduler is not None and speculation.tree_budget is not None
    for name in (name for name, given in unheeded.items() if given):
        value = getattr(speculation, name)
        notes.append(
            f"{name}={value!r} was set, and trees are verified whole: set tree_budget=None to let costs decide."
        )
    return notes


@torch.no_grad()
def propose_trees(
    proposer: Proposer,
    context: Context,
    kind: str,
    budget: int,
    size: Callable[[list[Tree]], int] | None = None,
    branches: list[Tree | None] | None = None,
) -> Draft:
    """A tree of drafts for each row; the drafter's cache is afterwards as it was before.

    Args:
        proposer, context: as for [`Proposer.propose`]. kind: see [`kind_of`].
        budget (`int`): most nodes of a stage. size: `size(trees)` says how many nodes of each row are worth verifying;
            it is asked before any node is drawn. branches: per row a copy to hang on the anchor, or None.
    """
    if min(proposer.block, max(context.room, default=0)) <= 0:
        return Draft.empty(len(context.room), context.ids.device, proposer.block, context.room)
    mark = proposer.cache.mark()
    try:
        return _Trees(proposer, context, kind, budget, size, branches).draft()
    finally:
        proposer.cache.rollback(mark)


class _Trees:
    """One round's trees, on their way."""

    def __init__(self, proposer, context, kind, budget, size, branches):
        self.proposer, self.context, self.kind, self.budget, self.size = proposer, context, kind, budget, size
        self.drafter, self.rows = proposer.drafter, len(context.room)
        self.branches = branches or [None] * self.rows
        # Children are drawn from laws only where a row samples under ratio verification, and the builder can.
        ratio = proposer.speculation.verification == "ratio"
        self.drawing = ratio and kind in ("ddtree", "jetspec") and any(s.noise is not None for s in context.sampling)
        self.drawing = self.drawing and len(context.sampling) == 1 and not any(self.branches)
        self.noise: dict[int, torch.Tensor] = {}  # Gumbel noise of the target's draw, by depth and sampling

    def draft(self) -> Draft:
        proposer, context = self.proposer, self.context
        looped = proposer.gate is not None and not self.drawing and self.kind != "eagle2"
        trees, laws, state = self._stage(context.anchors, proposer.seed, None, looped, 0)
        stages = [1] * self.rows
        if looped:
            trees, stages = self._further(trees, state)
        trees = [t if b is None else graft(t, b) for t, b in zip(trees, self.branches)]
        inside = zip(trees, context.room, self._stop_ids())
        trees = [within(tree, most, stops) for tree, most, stops in inside]
        if self.size is not None:
            most = self.size(trees)
            trees = [prune(tree, most) for tree in trees]
        if self.drawing:
            return self._drawn(trees, laws, stages)
        return self._as_draft(trees, None, stages)

    def _stage(self, anchors, seed, pseudo, full_depth, first: int):
        """Trees of one stage in target ids, the block's logits [A, K, Vd] where it has some, and the drafter's state;
        its first drafts are `first` + 1 deep."""
        drafter, cache = self.drafter, self.proposer.cache
        steps = min(self.proposer.block, max(self.context.room) - first)
        state = drafter.start(cache, anchors, seed, pseudo, steps)
        if self.kind == "eagle2":
            log_probs, expand = recursive_expand(drafter, cache, state, anchors)
            chances = self._log_probs(log_probs[:, None], 0)[:, 0]
            shown = lambda tokens, rows, level: self._log_probs(expand(tokens, rows, level), level)  # noqa: E731
            made = eagle2(chances, shown, self.budget, steps - 1, min(EAGLE_WIDTH, self.budget))
            return self._on_host(made), None, state
        positions = self._finite(state.base[:, :steps]).split(1, 1)
        base = torch.cat([self._scores(x, first + k) for k, x in enumerate(positions)], 1)
        if self.kind == "dartree":
            made = dartree(
                base, self._corrected(head_step(drafter, state, anchors), first), self.budget, full_depth=full_depth
            )
        elif self.kind == "jetspec":
            made = jetspec(_log_softmax(base), self.budget, JETSPEC_WIDTH)
        else:
            made = ddtree(_log_softmax(base), self.budget, full_depth)
        return self._on_host(made), base, state

    # ------------------------------------------------------------------ what children are chosen by

    def _finite(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd]; -inf where the drafter gives none to draft from."""
        fine = possible(logits)
        if bool(fine.all()):
            return logits
        self.proposer.unusable += int((~fine).sum())
        return torch.where(fine[..., None], logits, -torch.inf)

    def _log_probs(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        return _log_softmax(self._scores(self._finite(logits), depth))

    def _scores(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [A, F, Vd] of the drafts below nodes of a depth, as the target's own draw sees its logits: after the
        processors that don't look at the prefix, and with its noise where a row samples and no children are drawn. The
        children are then compared with that draw, so the noise they share makes them likely."""
        out = logits.float()
        for s in self.context.sampling:
            plain = s.scorer.empty or not s.scorer.prefix_free
            if plain and (s.noise is None or self.drawing):
                continue
            if (t := temperature_of(s.scorer)) is not None and not self.drawing:
                mine = logits[s.rows].float() / t
                if s.noise is not None:
                    mine = mine - mine.amax(-1, keepdim=True) + self._drafters_part(self._gumbel(s, depth))[:, None]
                out = out.index_copy(0, torch.tensor(s.rows, device=out.device), mine.to(out))
                continue
            mine = self._whole_vocabulary(logits[s.rows]).float()
            if not plain:
                places = [place for place in s.places for _ in range(mine.shape[1])]
                scored = s.scorer.draft_scores(places, None, mine.flatten(0, 1)).unflatten(0, mine.shape[:2])
                mine = torch.where(
                    possible(scored)[..., None], scored, mine
                )  # nothing allowed is in the drafter's vocabulary
            if s.noise is not None and not self.drawing:
                mine = mine - mine.amax(-1, keepdim=True) + self._gumbel(s, depth)[:, None]
            out = out.index_copy(0, torch.tensor(s.rows, device=out.device), self._drafters_part(mine).to(out))
        return out

    def _gumbel(self, s: Sampling, depth: int) -> torch.Tensor:
        """The Gumbel noise [R, V] that the target's draw at this depth adds to the scores of the rows of `s`."""
        key = depth, s.rows[0]
        if key not in self.noise:
            uniform = s.noise.uniforms(None, depth, "target", self.drafter.config.vocab_size, self.drafter.device)
            self.noise[key] = uniform.log_().neg_().log_().neg_().float()
        return self.noise[key]

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd] over the target's vocabulary [..., V]."""
        if not hasattr(self.drafter, "d2t"):
            return logits
        full = logits.new_full((*logits.shape[:-1], self.drafter.config.vocab_size), -torch.inf)
        return full.index_copy(-1, self.drafter.target_ids(), logits)

    def _drafters_part(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [..., V] of the drafter's own vocabulary [..., Vd]."""
        return scores[..., self.drafter.target_ids()] if hasattr(self.drafter, "d2t") else scores

    def _corrected(self, step: Callable, first: int) -> Callable:
        """The `step` of [`dartree`], its logits of the candidates as [`_scores`] of a depth shows them."""
        if all(s.noise is None and (s.scorer.empty or not s.scorer.prefix_free) for s in self.context.sampling):
            return step

        def cheaply(memory, rows, tokens, depth, candidates):
            """Without a look at the whole vocabulary, where the processors only scale."""
            logits, memory = step(memory, rows, tokens, depth, candidates)
            out = logits.float()
            for s in self.context.sampling:
                if s.noise is not None:
                    noise = self._gumbel(s, first + depth).gather(1, self.drafter.target_ids(candidates[s.rows]))
                    out[s.rows] = out[s.rows] / temperature_of(s.scorer) + noise[:, None]
            return out, memory

        def shown(memory, rows, tokens, depth, candidates):
            logits, memory = step(memory, rows, tokens, depth, candidates)
            wide = candidates[:, None].expand(-1, logits.shape[1], -1)
            full = logits.new_full((*logits.shape[:2], self.drafter.config.draft_vocab_size), -torch.inf)
            scores = self._scores(full.scatter(-1, wide, logits), first + depth)
            return scores.gather(-1, wide), memory

        return cheaply if all(temperature_of(s.scorer) is not None for s in self.context.sampling) else shown

    def _on_host(self, made: Tree) -> list[Tree]:
        rows = [made.row(r) for r in range(self.rows)]
        ids = self.drafter.target_ids
        return [Tree(ids(t.tokens.to(self.drafter.device)).cpu(), t.parents.cpu(), t.scores.cpu()) for t in rows]

    def _stop_ids(self) -> list[frozenset]:
        stops = [frozenset()] * self.rows
        for s in self.context.sampling:
            for r in s.rows:
                stops[r] = s.stop_ids
        return stops

    # ------------------------------------------------------------------ further stages (METHODS: DLoop with trees)

    def _further(self, trees: list[Tree], state):
        """Stages on the end of the best full-depth path, for all rows together, as long as the gate lets the surest row
        pass."""
        proposer, context, K = self.proposer, self.context, self.proposer.block
        stage, tips, before = 1, [tip(t) for t in trees], [0.0] * self.rows
        scores: list[list[float]] = [[] for _ in trees]
        while (
            stage < proposer.speculation.max_draft_stages
            and min(context.room) > stage * K
            and self._whole(trees, tips, stage)
        ):
            for r, (tree, node) in enumerate(zip(trees, tips)):
                scores[r].append(float(tree.scores[node]) - before[r])
                before[r] = float(tree.scores[node])
            if not all(proposer.gate(scores, self.rows)):
                break
            anchors = torch.stack([t.tokens[node] for t, node in zip(trees, tips)]).to(context.ids.device)
            more, _, state = self._stage(anchors, None, state.pseudo, True, stage * K)
            trees = [graft(t, m, node) for t, m, node in zip(trees, more, tips)]
            tips, stage = [tip(t) for t in trees], stage + 1
        return trees, [stage] * self.rows

    def _whole(self, trees, tips, stage: int) -> bool:
        """Whether every row's path has all drafts of its stages, and no stop token on it."""
        for tree, node, stops in zip(trees, tips, self._stop_ids()):
            way = path_to(tree.parents, node)
            if len(way) < stage * self.proposer.block or not stops.isdisjoint(tree.tokens[way].tolist()):
                return False
        return True

    # ------------------------------------------------------------------ children drawn from laws

    def _drawn(self, trees: list[Tree], base, stages) -> Draft:
        """The trees' shapes with children drawn without replacement, and the laws [A, N, V] they were drawn from."""
        (s,) = self.context.sampling
        ids, laws = self.drafter.target_ids().cpu(), []
        known = torch.full((self.drafter.config.vocab_size,), -1)
        known[ids] = torch.arange(len(ids))
        out = []
        for r, tree in enumerate(trees):
            shape = Tree(known[tree.tokens], tree.parents, tree.scores)
            log_q = base[r].float()
            drawn = sampled(shape, log_q, lambda q, depth, count, r=r: s.noise.children(q, r, depth, count))
            at = depths(drawn.parents)[1:] - 1
            law = torch.zeros(len(at), self.drafter.config.vocab_size)
            law[:, ids] = log_q.softmax(-1).cpu()[at]
            laws.append(law)
            out.append(Tree(ids[drawn.tokens], drawn.parents, drawn.scores))
        q = torch.nn.utils.rnn.pad_sequence(laws, True)
        return self._as_draft(out, q.to(self.context.ids.device), stages)

    def _as_draft(self, trees: list[Tree], q, stages) -> Draft:
        whole, device = pad(trees), self.context.ids.device
        above = torch.cat([torch.zeros(self.rows, 1), whole.scores], 1).gather(1, whole.parents + 1)
        return Draft(
            tokens=whole.tokens.to(device),
            lengths=whole.lengths,
            parents=whole.parents,
            q=q,
            log_q=(whole.scores - above).nan_to_num(0.0, 0.0, 0.0).to(device),
            stages=stages,
            block=self.proposer.block,
            room=self.context.room,
            sources=["tree"] * self.rows,
            expected=[float(t.scores.exp().sum()) for t in trees],
        )


def _log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [..., V]; -inf where there are no scores to make them of."""
    return scores.log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf)


def temperature_of(scorer) -> float | None:
    """The temperature by which a call's processors divide, if that is all they do; 1 where there are none."""
    if scorer.empty:
        return 1.0
    if not scorer.prefix_free or not all(type(p) is TemperatureLogitsWarper for p in scorer.shared):
        return None
    return math.prod(p.temperature for p in scorer.shared)


def within(tree: Tree, room: int, stop_ids: frozenset[int]) -> Tree:
    """The nodes that can become output: at most `room` deep, and not below a stop token."""
    seen = ancestors(tree.parents)[1:, 1:]
    stops = torch.tensor([t in stop_ids for t in tree.tokens.tolist()], dtype=torch.bool)
    below = (seen & stops & ~torch.eye(len(stops), dtype=torch.bool)).any(-1)
    good = (seen.sum(-1) <= room) & ~below
    return tree if bool(good.all()) else keep(tree, good.nonzero()[:, 0])


def branch(tokens: list[int], chances: list[float]) -> Tree | None:
    """A copy as a branch: its first `tokens`, as many as there are `chances` [n] that the first 1..n are all accepted; None
    if there are none."""
    if not chances:
        return None
    survival = torch.tensor(chances).clamp_min(1e-9).log()
    return chain(torch.tensor(tokens[: len(chances)]), torch.diff(survival, prepend=torch.zeros(1)))
