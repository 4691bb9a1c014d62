"""A drafter's block, or its recursion, as a tree per row: built, kept inside the room, continued by further stages and copies."""

from collections.abc import Callable

import torch

from .draft import Draft
from .proposer import Context, Proposer
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
        ValueError: a tree that another kind of drafter makes.
    """
    if wanted == "auto":
        causal = getattr(drafter, "correction", None) is not None
        return "eagle2" if drafter.config.recursive else "dartree" if causal else "ddtree"
    able = KINDS[drafter.config.recursive]
    if drafter.config.max_block < 1 or wanted not in able:
        what = "drafts token by token" if drafter.config.recursive else "drafts a block at once"
        raise ValueError(f"tree={wanted!r} was set, and a {type(drafter).__name__} {what}: set tree to one of {able}, or 'auto'.")
    return wanted


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
        budget (`int`): most nodes of a stage. size: `size(trees)` says how many nodes of each row are worth verifying; it is asked
            before any node is drawn. branches: per row a copy to hang on the anchor, or None.
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

    def draft(self) -> Draft:
        proposer, context = self.proposer, self.context
        looped = proposer.gate is not None and not self.drawing and self.kind != "eagle2"
        trees, laws, state = self._stage(context.anchors, proposer.seed, None, looped)
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

    def _stage(self, anchors, seed, pseudo, full_depth):
        """Trees of one stage in target ids, the block's logits [A, K, Vd] where it has some, and the drafter's state."""
        drafter, cache = self.drafter, self.proposer.cache
        steps = min(self.proposer.block, max(self.context.room))
        state = drafter.start(cache, anchors, seed, pseudo, steps)
        if self.kind == "eagle2":
            first, expand = recursive_expand(drafter, cache, state, anchors)
            made = eagle2(first, expand, self.budget, steps - 1, min(EAGLE_WIDTH, self.budget))
            return self._on_host(made), None, state
        base = state.base[:, :steps]
        if self.drawing:
            base = self._processed(base)
        if self.kind == "dartree":
            made = dartree(base, head_step(drafter, state, anchors), self.budget, full_depth=full_depth)
        elif self.kind == "jetspec":
            made = jetspec(base.log_softmax(-1), self.budget, JETSPEC_WIDTH)
        else:
            made = ddtree(base.log_softmax(-1), self.budget, full_depth)
        return self._on_host(made), base, state

    def _on_host(self, made: Tree) -> list[Tree]:
        rows = [made.row(r) for r in range(self.rows)]
        ids = self.drafter.target_ids()
        ids = ids.cpu() if hasattr(self.drafter, "d2t") else None
        return [Tree(t.tokens.cpu() if ids is None else ids[t.tokens.cpu()], t.parents.cpu(), t.scores.cpu()) for t in rows]

    def _stop_ids(self) -> list[frozenset]:
        stops = [frozenset()] * self.rows
        for s in self.context.sampling:
            for r in s.rows:
                stops[r] = s.stop_ids
        return stops

    # ------------------------------------------------------------------ further stages (METHODS: DLoop with trees)

    def _further(self, trees: list[Tree], state):
        """Stages on the end of the best full-depth path, for all rows together, as long as the gate lets the surest row pass."""
        proposer, context, K = self.proposer, self.context, self.proposer.block
        stage, tips, before = 1, [tip(t) for t in trees], [0.0] * self.rows
        scores: list[list[float]] = [[] for _ in trees]
        while stage < proposer.speculation.max_draft_stages and min(context.room) > stage * K and self._whole(trees, tips, stage):
            for r, (tree, node) in enumerate(zip(trees, tips)):
                scores[r].append(float(tree.scores[node]) - before[r])
                before[r] = float(tree.scores[node])
            if not all(proposer.gate(scores, self.rows)):
                break
            anchors = torch.stack([t.tokens[node] for t, node in zip(trees, tips)]).to(context.ids.device)
            more, _, state = self._stage(anchors, None, state.pseudo, True)
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

    def _processed(self, base: torch.Tensor) -> torch.Tensor:
        """Base logits [A, K, Vd] after the user's processors, where those don't look at the prefix."""
        (s,) = self.context.sampling
        if s.scorer.empty or not s.scorer.prefix_free or hasattr(self.drafter, "d2t"):
            return base.float()
        return s.scorer.draft_scores(s.places, None, base.flatten(0, 1)).unflatten(0, base.shape[:2])

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


def within(tree: Tree, room: int, stop_ids: frozenset[int]) -> Tree:
    """The nodes that can become output: at most `room` deep, and not below a stop token."""
    seen = ancestors(tree.parents)[1:, 1:]
    stops = torch.tensor([t in stop_ids for t in tree.tokens.tolist()], dtype=torch.bool)
    below = (seen & stops & ~torch.eye(len(stops), dtype=torch.bool)).any(-1)
    good = (seen.sum(-1) <= room) & ~below
    return tree if bool(good.all()) else keep(tree, good.nonzero()[:, 0])


def branch(tokens: list[int], chances: list[float]) -> Tree | None:
    """A copy as a branch: `tokens` [n] with the chances [n] that the first 1..n are all accepted; None if there are none."""
    if not tokens:
        return None
    survival = torch.tensor(chances[: len(tokens)]).clamp_min(1e-9).log()
    return chain(torch.tensor(tokens), torch.diff(survival, prepend=torch.zeros(1)))
