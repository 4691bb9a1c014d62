"""Draft trees as three flat tensors, and what is done with them whoever built them. Everything here is on the host."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..verification.tree import ancestors, depths

__all__ = [
    "Tree", "ancestors", "chain", "depths", "force", "graft", "locate", "pad", "path_to", "paths", "prune", "sampled", "tip",
]  # fmt: skip


class Tree(NamedTuple):
    """A draft tree without its anchor.

    A parent comes before its children, so the first m nodes are a tree; no two children of a node have the same token.
    Several trees are padded to [B, N]: a padding node has token 0, parent -1 and score -inf, which no real node has.

    Attributes:
        tokens (`torch.Tensor`): [N] token ids.
        parents (`torch.Tensor`): [N] node indices, -1 for the anchor.
        scores (`torch.Tensor`): [N] log-probability of the path from the anchor to the node, as the drafter sees it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def of(cls, tokens=(), parents=(), scores=(), dtype=torch.float32) -> "Tree":
        """A tree of plain numbers."""
        long = torch.long
        return cls(
            torch.tensor(tokens, dtype=long), torch.tensor(parents, dtype=long), torch.tensor(scores, dtype=dtype)
        )

    @property
    def lengths(self) -> list[int]:
        """Real nodes of each row of a padded tree."""
        return torch.isfinite(self.scores).sum(-1).tolist()

    def row(self, index: int) -> "Tree":
        """One tree of several, without its padding."""
        real = torch.isfinite(self.scores[index])
        return Tree(*(x[index][real] for x in self))

    def first(self, count: int) -> "Tree":
        """The first `count` nodes, which are a tree."""
        return Tree(*(x[..., :count] for x in self))


def pad(trees: Sequence[Tree]) -> Tree:
    """Several trees side by side, [B, N]."""
    columns = zip(*trees, strict=True)
    values = (0, -1, -torch.inf)
    return Tree(*(torch.nn.utils.rnn.pad_sequence(list(x), True, value) for x, value in zip(columns, values)))


def chain(tokens: torch.Tensor, log_q: torch.Tensor) -> Tree:
    """The tree with one branch: `tokens` [L] with their log-probabilities [L], each given those before it."""
    tokens = torch.as_tensor(tokens, dtype=torch.long)
    return Tree(tokens, torch.arange(-1, len(tokens) - 1), torch.as_tensor(log_q).cumsum(0))


def path_to(parents: torch.Tensor, node: int) -> list[int]:
    """The nodes from the anchor's child down to `node`, which is the last; none for the anchor (-1)."""
    found = []
    while node >= 0:
        found.append(node)
        node = int(parents[node])
    return found[::-1]


def paths(parents: torch.Tensor) -> list[list[int]]:
    """The way to each leaf of `parents` [N], in the order of the leaves."""
    above = parents.tolist()
    return [path_to(above, leaf) for leaf in sorted(set(range(len(above))) - set(above))]


def locate(tree: Tree, tokens: Sequence[int], at: int = -1) -> list[int]:
    """The nodes that `tokens` lead to below node `at`, as far as the tree goes."""
    children = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist()))}
    found = []
    for token in map(int, tokens):
        at = children.get((at, token))
        if at is None:
            break
        found.append(at)
    return found


def reach_and_sides(parents: Sequence[int], path: Sequence[int]) -> tuple[int, int]:
    """The depth of a tree, and how many nodes of `path` aren't their parent's first child."""
    depth, first = {-1: 0}, {}
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
        first.setdefault(parent, node)
    return max(depth.values()), sum(first[parents[node]] != node for node in path)


def tip(tree: Tree) -> int:
    """The best of the deepest nodes (the first of equals), where a further stage goes on; -1 in an empty tree."""
    if not len(tree.tokens):
        return -1
    depth = depths(tree.parents)[1:]
    return int(tree.scores.masked_fill(depth < depth.max(), -torch.inf).argmax())


# ---------------------------------------------------------------------- putting together, cutting


def graft(tree: Tree, branch: Tree, at: int = -1) -> Tree:
    """`tree` with `branch` below node `at`: a copied continuation, or the tree of a further drafting stage.

    Equal prefixes are merged, and a node keeps the better of its two scores, so that no child is above its parent. The
    nodes of `tree` keep their numbers; what the branch adds follows in its own order.

    Args:
        tree, branch ([`Tree`]): the branch's scores are those of the paths from `at` on.
        at (`int`): -1 for the anchor.
    """
    tokens, parents, scores = (x.tolist() for x in tree)
    known = {(p, t): i for i, (p, t) in enumerate(zip(parents, tokens))}
    above = scores[at] if at >= 0 else 0.0
    place = {-1: at}
    for i, (token, parent, score) in enumerate(zip(*(x.tolist() for x in branch))):
        key = place[parent], token
        if key in known:
            node = place[i] = known[key]
            scores[node] = max(scores[node], above + score)
            continue
        place[i] = known[key] = len(tokens)
        for values, value in zip((tokens, parents, scores), (token, key[0], above + score)):
            values.append(value)
    return Tree.of(tokens, parents, scores, torch.promote_types(tree.scores.dtype, branch.scores.dtype))


def keep(tree: Tree, nodes: torch.Tensor) -> Tree:
    """The tree of some of its nodes, `nodes` [M] in rising order, with every one's parent among them."""
    number = torch.full((len(tree.tokens) + 1,), -1)
    number[nodes + 1] = torch.arange(len(nodes))
    return Tree(tree.tokens[nodes], number[tree.parents[nodes] + 1], tree.scores[nodes])


def prune(tree: Tree, budget: int, depth_bonus: float = 0.0, forced: Sequence[int] = ()) -> Tree:
    """The `budget` best nodes, in the tree's order: by score plus `depth_bonus` per level, the earlier one of equals.

    Scores must not rise from parent to child, which makes this a tree again. Impossible nodes (-inf) are left out.

    Args:
        tree ([`Tree`]): one tree.
        budget (`int`): nodes kept.
        depth_bonus (`float`): at most 0; a negative one prefers nodes near the anchor.
        forced (`Sequence[int]`): nodes that stay whatever their score, even beyond the budget, with all above them.

    Raises:
        ValueError: a positive bonus, which would keep nodes without their parents.
    """
    if depth_bonus > 0:
        raise ValueError(
            f"depth_bonus={depth_bonus} prefers deep nodes, and the best nodes would lack their parents: set it to 0 "
            "or below."
        )
    keys = tree.scores.double() + depth_bonus * depths(tree.parents)[1:]
    possible = int(torch.isfinite(keys).sum())
    keys[list(forced)] = torch.inf
    best = keys.sort(dim=-1, descending=True, stable=True).indices
    return keep(tree, best[: max(min(budget, possible), len(forced))].sort().values)


def force(tree: Tree, branch: Tree, budget: int) -> Tree:
    """`tree` with all of `branch` in it (below the anchor) and the best of its other nodes, `budget` in all.

    A looped drafter's next stage hangs on the end of the best full-depth path, so that path must be in the tree.
    """
    merged = graft(tree, branch)
    nodes = set()
    for path in paths(branch.parents):
        nodes.update(locate(merged, branch.tokens[path]))
    return prune(merged, budget, forced=sorted(nodes))


# ---------------------------------------------------------------------- sampled children


def sampled(tree: Tree, log_q: torch.Tensor, draw: Callable) -> Tree:
    """The same shape with drawn tokens, for recursive rejection: child j of a node is the j-th drawn without
    replacement.

    The shape must have been built from `log_q` alone ([`ddtree`], [`jetspec`]), as it is then known before anything is
    drawn. A node of depth d (the anchor has 0) has its children drawn from softmax(log_q[d]); nodes that a law has no
    token for are left out.

    Args:
        tree ([`Tree`]): one tree.
        log_q (`torch.Tensor`): [k, Vd] log-probabilities the children are drawn from.
        draw (`Callable`): `draw(log_q [F, Vd], depth, count)` gives [F, count] ids, in the order drawn, for the F nodes
            of a depth that have children; see [`TreeNoise.children`].
    """
    log_q = log_q.log_softmax(-1)
    parents, depth = tree.parents.tolist(), depths(tree.parents).tolist()
    tokens, scores = [0] * len(parents), torch.zeros(len(parents) + 1, dtype=log_q.dtype)
    for d in range(max(depth)):
        children: dict[int, list[int]] = {}
        for node in (i for i in range(len(parents)) if depth[i + 1] == d + 1):
            children.setdefault(parents[node], []).append(node)
        ids = draw(log_q[d].expand(len(children), -1), d, max(map(len, children.values()))).cpu()
        for (parent, nodes), row in zip(children.items(), ids):
            drawn = row[: len(nodes)]
            scores[torch.tensor(nodes) + 1] = scores[parent + 1] + log_q[d, drawn.to(log_q.device)].cpu()
            for node, token in zip(nodes, drawn.tolist()):
                tokens[node] = token
    drawn = Tree(torch.tensor(tokens, dtype=torch.long), tree.parents, scores[1:])
    return keep(drawn, torch.isfinite(drawn.scores).nonzero()[:, 0])
