"""Builders of draft trees from what a drafter says: pure functions of log-probabilities, and of a step for causal
drafters.

A builder takes one row ([k, Vd], giving a [`Tree`] of [N]) or several ([B, k, Vd], giving a padded one of [B, N]); a
budget counts nodes without the anchor. Tokens are ids of the drafter's vocabulary. Equal scores stand in the order of
the paths, equal tokens of one position in the order of `torch.topk`.
"""

import heapq
import math
from collections.abc import Callable

import torch

from ..modeling.heads import select_memory
from .tree_parts import Tree, ancestors, chain, depths, force, graft, locate, pad, path_to, paths, prune, sampled, tip

__all__ = [
    "Tree", "ancestors", "chain", "dartree", "ddtree", "depths", "eagle2", "force", "graft", "head_step", "jetspec", "locate",
    "pad", "path_to", "paths", "prune", "recursive_expand", "sampled", "tip",
]  # fmt: skip


# ---------------------------------------------------------------------- product of marginals


def ddtree(log_probs: torch.Tensor, budget: int, full_depth: bool = False) -> Tree:
    """The `budget` most probable prefixes of a block whose positions are independent (DDTree, arXiv 2604.12989).

    Best first: the most probable prefix is popped, its next sibling and its first child are pushed; O(budget log
    budget) after the top-k of each position. The nodes come in falling order of their scores, so the first m are the
    tree of budget m.

    Args:
        log_probs (`torch.Tensor`): [k, Vd] or [B, k, Vd], temperature 1.
        budget (`int`): nodes, the anchor not counted.
        full_depth (`bool`): keep the most probable token of all k positions in the tree, even if that takes nodes of a
            higher score, or more nodes than the budget; looped drafting goes on from there ([`tip`]).

    Returns:
        [`Tree`]: [N] or padded [B, N].

    Raises:
        ValueError: log-probabilities of another shape, or a negative budget.
    """
    _check(log_probs, budget)
    if log_probs.dim() == 2:
        return ddtree(log_probs[None], budget, full_depth).row(0)
    values, ids = (x.tolist() for x in _top(log_probs, budget))
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    trees = [_best_first(v, i, budget, dtype) for v, i in zip(values, ids)]
    if full_depth and budget:
        best = [[position[0] for position in row] for row in (*ids, *values)]
        best = [chain(i, torch.tensor(v, dtype=dtype)) for i, v in zip(best, best[len(trees) :])]
        trees = [force(tree, path, budget) for tree, path in zip(trees, best)]
    return pad(trees)


def _best_first(values: list[list[float]], ids: list[list[int]], budget: int, dtype) -> Tree:
    nodes: list[tuple] = []
    heap = [(-values[0][0], (0,), -1, 0.0)] if budget and values else []
    while heap and len(nodes) < budget:
        negative, ranks, parent, above = heapq.heappop(heap)
        if negative == math.inf:
            break
        node, d, rank = len(nodes), len(ranks) - 1, ranks[-1]
        nodes.append((ids[d][rank], parent, -negative))
        if rank + 1 < len(values[d]):
            heapq.heappush(heap, (-(above + values[d][rank + 1]), (*ranks[:-1], rank + 1), parent, above))
        if d + 1 < len(values):
            heapq.heappush(heap, (negative - values[d + 1][0], (*ranks, 0), node, -negative))
    return Tree.of(*zip(*nodes), dtype=dtype)


def jetspec(log_probs: torch.Tensor, budget: int, width: int) -> Tree:
    """JetSpec's tree (arXiv 2606.18394): the best node is popped and its `width` best children are added at once.

    Args:
        log_probs (`torch.Tensor`): [k, Vd] or [B, k, Vd], temperature 1.
        budget (`int`): nodes, the anchor not counted (JetSpec's own number is one more).
        width (`int`): children of a node.

    Returns:
        [`Tree`]: [N] or padded [B, N], in the order added. Not always the most probable prefixes; those are `ddtree`'s.

    Raises:
        ValueError: log-probabilities of another shape, a negative budget, or a width below 1.
    """
    _check(log_probs, budget, width)
    if log_probs.dim() == 2:
        return jetspec(log_probs[None], budget, width).row(0)
    values, ids = (x.tolist() for x in _top(log_probs, min(width, budget)))
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return pad([_in_bulk(v, i, budget, dtype) for v, i in zip(values, ids)])


def _in_bulk(values: list[list[float]], ids: list[list[int]], budget: int, dtype) -> Tree:
    nodes: list[tuple] = []
    heap = [(0.0, -1, 0)]
    while heap and len(nodes) < budget:
        negative, parent, d = heapq.heappop(heap)
        if d == len(values):
            continue
        for value, token in zip(values[d], ids[d]):
            if value == -math.inf or len(nodes) == budget:
                break
            heapq.heappush(heap, (negative - value, len(nodes), d + 1))
            nodes.append((token, parent, value - negative))
    return Tree.of(*zip(*nodes), dtype=dtype)


# ---------------------------------------------------------------------- level by level


def dartree(
    base_logits: torch.Tensor,
    step: Callable,
    budget: int,
    width: int = 12,
    candidates: int = 64,
    depth_bonus: float = -0.2,
    fixed: bool = False,
    prefix_len: int = 0,
    draw: Callable | None = None,
    full_depth: bool = False,
) -> Tree:
    """A tree for a block drafter with a causal head (DARTree, magneto0124/DARTree): level by level, every path
    corrected.

    A node's children are the `candidates` best tokens of the position's base logits, with the head's correction for the
    path, normalised among themselves. Each level keeps the best by path score.

    Args:
        base_logits (`torch.Tensor`): [k, Vd] or [B, k, Vd], uncorrected, temperature 1.
        step (`Callable`): `step(memory, rows, tokens, depth, candidates)` gives corrected logits [B, F, C] of the
            `candidates` [B, C] below the F nodes of a level and the nodes' memory. `tokens` [B, F] are the nodes', and
            `rows` [B * F] where their parents stand in `memory`; at depth 0 the only node is the anchor and all three
            are `None`. See [`head_step`].
        budget (`int`): nodes, the anchor not counted.
        width (`int`): nodes kept per level, before the `budget` best of all are.
        candidates (`int`): tokens looked at per position.
        depth_bonus (`float`): added per level when the best of all are chosen; at most 0.
        fixed (`bool`): no choice at the end: a level is as wide as the rest of the budget divided by the rest of the
            levels.
        prefix_len (`int`): levels that use the base logits as they are (Domino's `pure_draft_prefix_len`, which its
            head knows itself).
        draw (`Callable`, *optional*): with `fixed` only, children drawn without replacement instead of the best ones:
            `draw(log_q [B, F, C], depth, count)` gives [B, F, count] indices into C in the order drawn. The laws it is
            given, one level after the other, are those of the anchor, of node 0 and so on. How many children a node has
            is decided by its law and the nodes above, before they are drawn.
        full_depth (`bool`): keep the best path of all k levels, as in [`ddtree`].

    Returns:
        [`Tree`]: [N] or padded [B, N], level by level, by score within one.

    Raises:
        ValueError: shapes or sizes that can't be, a positive `depth_bonus`, or `draw` without `fixed`.
    """
    _check(base_logits, budget, width, candidates)
    if draw is not None and not fixed:
        raise ValueError(
            "draw needs fixed=True: children that were drawn must not be cut afterwards by their own scores, because "
            "recursive rejection would then be biased."
        )
    single = base_logits.dim() == 2
    if single and draw is not None:
        draw_one, draw = draw, lambda log_q, depth, count: draw_one(log_q[0], depth, count)[None]
    logits = base_logits[None] if single else base_logits
    levels = list(_dar_levels(logits, step, budget, width, candidates, fixed, prefix_len, draw))
    trees = [_finish(tree, budget, depth_bonus, full_depth) for tree in _supertrees(levels, logits.shape[0])]
    return trees[0] if single else pad(trees)


def _dar_levels(logits, step, budget, width, candidates, fixed, prefix_len, draw):
    """Tokens, parents in the level before and scores, [B, F] each, of every level."""
    B, k, _ = logits.shape
    base, ids = _top(logits, candidates)
    memory = rows = tokens = None
    scores = base.new_zeros(B, 1)
    for d in range(k):
        wide = -(-budget // (k - d)) if fixed else width
        if wide <= 0:
            return
        corrected, memory = step(memory, rows, tokens, d, ids[:, d])
        log_q = (base[:, d, None].expand_as(corrected) if d < prefix_len else corrected).log_softmax(-1)
        log_q = log_q.nan_to_num(-torch.inf, neginf=-torch.inf)  # where a path leads nowhere
        log_q = log_q.expand(B, scores.shape[1], -1)
        ranked, order = log_q.sort(dim=-1, descending=True, stable=True)
        if draw is not None:  # no more than every row's laws have tokens for, so that laws and nodes stay side by side
            wide = min(wide, int(torch.isfinite(scores[..., None] + ranked).flatten(1).sum(1).min()))
        parents, ranks = _best_children(scores, ranked, wide)
        if draw is not None:
            order = draw(log_q, d, int(ranks.max()) + 1).to(order.device)
        at = torch.arange(B, device=ids.device)[:, None]
        chosen = order[at, parents, ranks]
        scores = scores.gather(1, parents) + log_q[at, parents, chosen]
        rows = (at * log_q.shape[1] + parents).flatten()
        tokens = ids[:, d].gather(1, chosen)
        budget -= tokens.shape[1]
        yield tokens, parents, scores


def eagle2(first_log_probs: torch.Tensor, expand: Callable, budget: int, depth: int = 7, width: int = 10) -> Tree:
    """The dynamic tree of EAGLE-2 and EAGLE-3 (arXiv 2406.16858, section 4) for a recursive drafter.

    The `width` best nodes of a level are expanded into `width` children each; of all nodes ever made the `budget` best
    stay.

    Args:
        first_log_probs (`torch.Tensor`): [Vd] or [B, Vd], behind the anchor.
        expand (`Callable`): `expand(tokens [B, F], rows [B * F], level)` runs the drafter on the frontier and gives its
            log-probabilities [B, F, Vd]. `rows` says where a node's parent stands among the nodes of the call before
            (of the B anchors, at level 1). See [`recursive_expand`].
        budget (`int`): nodes, the anchor not counted (the reference's `total_token` is one more).
        depth (`int`): expansions; the tree is at most `depth` + 1 levels deep.
        width (`int`): the reference's `top_k`.

    Returns:
        [`Tree`]: [N] or padded [B, N], in the order made.

    Raises:
        ValueError: log-probabilities of another shape, a negative budget, or a width below 1.
    """
    if first_log_probs.dim() not in (1, 2):
        raise ValueError(
            f"eagle2 got first_log_probs of shape {list(first_log_probs.shape)}: one row is [Vd], several are [B, Vd]."
        )
    _check(first_log_probs[..., None, :], budget, width)
    single = first_log_probs.dim() == 1
    first = first_log_probs[None] if single else first_log_probs
    trees = [prune(tree, budget) for tree in _supertrees(list(_eagle_levels(first, expand, depth, width)), len(first))]
    return trees[0] if single else pad(trees)


def _eagle_levels(first, expand, depth, width):
    """As `_dar_levels`; parents are numbers in the whole level before, of which only the frontier has children."""
    scores, tokens = _top(first, width)
    at = torch.arange(len(first), device=first.device)[:, None]
    yield tokens, torch.zeros_like(tokens), scores
    frontier = torch.arange(tokens.shape[1], device=first.device).expand_as(tokens)
    rows = at.expand_as(tokens).flatten()
    for level in range(1, depth + 1):
        values, ids = _top(expand(tokens, rows, level), width)
        made = (scores[..., None] + values).flatten(1)
        yield ids.flatten(1), frontier.repeat_interleave(values.shape[2], 1), made
        scores, frontier = (x[:, :width] for x in made.sort(dim=-1, descending=True, stable=True))
        tokens = ids.flatten(1).gather(1, frontier)
        rows = (at * values.shape[1] + frontier // values.shape[2]).flatten()


# ---------------------------------------------------------------------- steps of our drafters


def head_step(drafter, state, anchor: torch.Tensor) -> Callable:
    """The `step` of [`dartree`] for a block drafter: its markov, gated, rnn or domino head, or none.

    Args:
        drafter (`DSparkDrafter`): bound to its target.
        state (`BlockState`): of `drafter.start`, B rows; `state.base` is the `base_logits` to give to the builder.
        anchor (`torch.Tensor`): [B] target ids.
    """
    head = drafter.correction

    def step(memory, rows, tokens, depth, candidates):
        prev = anchor[:, None] if tokens is None else drafter.target_ids(tokens)
        F, prev = prev.shape[1], prev.flatten().to(candidates.device)
        logits = state.base[:, depth].gather(1, candidates)[:, None].expand(-1, F, -1)
        if head is None:
            return logits, None
        memory = select_memory(memory, rows)
        if depth == 0 and state.first is not None and getattr(head, "kind", None) == "rnn":
            _, memory = head.step(memory, prev, state.first, drafter.embed)
        hidden, ids = state.hidden[:, depth].repeat_interleave(F, 0), candidates.repeat_interleave(F, 0)
        bias, memory = head.step(memory, prev, hidden, drafter.embed, ids)
        return logits + bias.unflatten(0, (-1, F)).to(logits.dtype), memory

    return step


def recursive_expand(drafter, cache, state, anchor: torch.Tensor) -> tuple[torch.Tensor, Callable]:
    """What [`eagle2`] needs of a recursive drafter: `first_log_probs` [B, Vd] behind `anchor` [B], and `expand`.

    Each node of a frontier has a copy of its path's cache, so the drafter itself knows no trees. `cache` stays as it
    is.

    Args:
        drafter (`Eagle3Drafter`): bound to its target.
        cache (`DraftCache`), state (`ChainState`): of B rows, as `drafter.start` left them.
    """
    logits, _, state = drafter.step(cache, state, anchor)

    def expand(tokens, rows, level):
        nonlocal cache, state
        cache, state = cache.select(rows), state.select(rows)
        logits, _, state = drafter.step(cache, state, drafter.target_ids(tokens.flatten()))
        return logits.log_softmax(-1).unflatten(0, tokens.shape)

    return logits.log_softmax(-1), expand


# ---------------------------------------------------------------------- shared


def _check(log_probs, budget, *sizes) -> None:
    if log_probs.dim() not in (2, 3):
        raise ValueError(
            f"A tree was asked for of log-probabilities of shape {list(log_probs.shape)}: one row is [k, Vd], several "
            "are [B, k, Vd]."
        )
    if budget < 0 or min(sizes, default=1) < 1:
        raise ValueError(
            f"A tree can't have budget={budget} and widths {list(sizes)}: set a budget of at least 0 and widths of at "
            "least 1."
        )


def _top(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest [..., count] and their ids; the references, too, leave the order of equals to `topk`."""
    return tuple(log_probs.topk(min(count, log_probs.shape[-1]), -1))


def _best_children(scores: torch.Tensor, ranked: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parent and rank [B, count] of the best children: `scores` [B, F] of the parents, `ranked` [B, F, C] falling."""
    flat = (scores[..., None] + ranked).flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return flat // ranked.shape[2], flat % ranked.shape[2]


def _supertrees(levels: list[tuple], rows: int) -> list[Tree]:
    """All nodes of all levels, row by row, on the host. Parents become numbers in the whole tree."""
    if not levels:
        return [Tree.of()] * rows
    starts = [-1, 0]
    for tokens, _, _ in levels[:-1]:
        starts.append(starts[-1] + tokens.shape[1])
    tokens, parents, scores = (torch.cat(x, 1) for x in zip(*((t, p + s, v) for (t, p, v), s in zip(levels, starts))))
    # Doubles hold ids and scores alike: one copy to the host.
    packed = torch.stack([x.double() for x in (tokens, parents, scores)]).cpu()
    return [Tree(t.long(), p.long(), v.to(scores.dtype)) for t, p, v in packed.unbind(1)]


def _finish(tree: Tree, budget: int, depth_bonus: float, full_depth: bool) -> Tree:
    forced = path_to(tree.parents, tip(tree)) if full_depth else []
    return prune(tree, budget, depth_bonus, forced)
