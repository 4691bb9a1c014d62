"""Which path of a draft tree is accepted, and the token after it. Every verifier gives exactly the target's law.

A tree is `tokens` [A, N] and `parents` [A, N] (host; -1 is the anchor, a parent comes before its children, and no two children
of a node have one token), of which `lengths[r]` nodes count in row r. Where the anchor takes part it is node -1, or entry 0 of
N + 1. Siblings stand in the order in which they were drawn.

`scores_at(nodes, rows)` gives the target's processed scores [R, V] behind node `nodes[j]` of row `rows[j]`. It is asked once
for each row and node of the accepted path, in order, and for no other node, because user processors hang on it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .chain import Noise, acceptance, residual
from .noise import uniforms


@dataclass(frozen=True)
class TreeVerdict:
    """What is accepted of each row's tree.

    Args:
        accepted ([A], int64): accepted drafts.
        next_token ([A], int64): the target's token after them.
        possible ([A], bool): whether that token could be drawn; where processors left nothing, `next_token` means nothing.
        path ([A, D], int64): the accepted nodes, from the anchor's child on, then -1.
    """

    accepted: torch.Tensor
    next_token: torch.Tensor
    possible: torch.Tensor
    path: torch.Tensor

    @property
    def paths(self) -> list[list[int]]:
        """The accepted nodes of each row."""
        return [[node for node in row if node >= 0] for row in self.path.tolist()]


class TreeNoise(Noise):
    """`Noise` that also tells siblings and cousins apart. With slot 0 it is the noise of a chain."""

    def _uniforms(self, rows, i, slots, domain, size, device) -> torch.Tensor:
        start = [int(self.indices[r]) for r in rows]
        streams = [int(self.streams[r]) for r in rows]
        rounds = [n + (slot << 32) for n, slot in zip(start, slots)]  # a token's index stays below 2^32
        return uniforms(self.seed, streams, [n + i for n in start], domain, size, device, rounds)

    def coin(self, rows, i, device, slot: int = 0) -> torch.Tensor:
        """Uniforms [R] for accepting the child with number `slot` among its siblings, a draft at position i."""
        if slot == 0:
            return super().coin(rows, i, device)
        return self._uniforms(rows, i, [slot] * len(rows), "coin", 1, device)[:, 0]

    def children(self, log_q: torch.Tensor, row: int, i: int, count: int) -> torch.Tensor:
        """`count` children [F, count] of each of row `row`'s F nodes before position i, drawn without replacement.

        `log_q` [F, V] may be unnormalised. Taking the `count` largest of log q plus Gumbel noise, in order, is drawing one
        after the other without replacement (arXiv 1903.06059, section 2.3).
        """
        F, V = log_q.shape
        gumbel = -torch.log(-torch.log(self._uniforms([row] * F, i, range(F), "draft", V, log_q.device)))
        return (log_q.to(gumbel.dtype) + gumbel).topk(count, -1).indices


# ---------------------------------------------------------------------- structure


def depths(parents: torch.Tensor) -> torch.Tensor:
    """Depth [..., N + 1] of the anchor (0) and of each node of `parents` [..., N]: the position behind the anchor's."""
    return ancestors(parents).sum(-1) - 1


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes each node sees: itself and those above it.

    Args:
        parents (`torch.Tensor`): [..., N], -1 for the anchor.

    Returns:
        `torch.Tensor`: bool [..., N + 1, N + 1] on the same device; row and column 0 are the anchor's.
    """
    above = torch.nn.functional.pad(parents + 1, (1, 0))
    node = torch.arange(above.shape[-1], device=parents.device).expand_as(above)
    seen = torch.zeros(*above.shape, above.shape[-1], dtype=torch.bool, device=parents.device)
    for _ in range(above.shape[-1]):  # one turn per level
        seen.scatter_(-1, node[..., None], True)
        if not node.any():
            break
        node = above.gather(-1, node)
    return seen


# ---------------------------------------------------------------------- target's draw compared with the children


def verify_match(scores_at: Callable, tokens, parents, lengths: list[int], noise: Noise | None) -> TreeVerdict:
    """Draw the target's token and descend into the child that has it, if there is one. Greedy when `noise` is None.

    Exact for any tree, however it was made and cut, because the drafts never enter the draw; with keyed noise the text is that
    of keyed sampling, as all nodes of one depth share the noise of their position. Arguments as in the module's docstring.
    """
    children = children_of(tokens, parents, lengths)

    def choose(scores, nodes, rows, i):
        chosen = (scores.argmax(-1) if noise is None else noise.sample(scores, rows, i)).tolist()
        return [(children[r].get(node, {}).get(token), token) for r, node, token in zip(rows, nodes, chosen)]

    return _walk(scores_at, choose, len(lengths), noise is not None)


def match_all(scores: torch.Tensor, tokens, parents, lengths: list[int], noise: Noise | None) -> TreeVerdict:
    """[`verify_match`] of scores [A, N + 1, V] that are all there, anchor first: all on their device, without waiting for it.

    It draws at every node, which an accelerator does at once; on the CPU the walk of `verify_match` costs less.
    """
    A, N = tokens.shape
    device, depth = scores.device, depths(parents)
    inside = torch.arange(N + 1) <= torch.tensor(lengths, dtype=torch.long)[:, None]
    chosen, able = _draws(scores, inside, depth, noise)
    above, seen = (parents + 1).to(device), ancestors(parents).to(device)
    hit = (tokens.to(device) == chosen.gather(1, above)) & able.gather(1, above) & inside[:, 1:].to(device)
    alive = ~(seen[:, 1:, 1:] & ~hit[:, None]).any(-1)
    node = torch.arange(N, device=device)
    path = torch.where(alive, node, N).sort(-1).values[:, : int(depth.max())]
    last = torch.where(alive, node + 1, 0).amax(1, keepdim=True) if N else above.new_zeros(A, 1)
    following, able = chosen.gather(1, last)[:, 0], able.gather(1, last)[:, 0]
    return TreeVerdict(alive.sum(1), following, able, torch.where(path < N, path, -1))


def _draws(scores, inside, depth, noise) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's token [A, N + 1] behind every node, and whether there is one."""
    if noise is None:
        return scores.argmax(-1), torch.ones_like(scores[..., 0], dtype=torch.bool)
    able = _possible(scores)
    scores = torch.where(able[..., None], scores, 0.0)  # a node off the path may be hopeless without harm
    chosen = torch.zeros(scores.shape[:2], dtype=torch.long, device=scores.device)
    for i in range(int(depth.max()) + 1):
        rows, nodes = ((depth == i) & inside).nonzero(as_tuple=True)
        if len(rows):
            chosen[rows, nodes] = noise.sample(scores[rows, nodes], rows.tolist(), i)
    return chosen, able


def _possible(scores: torch.Tensor) -> torch.Tensor:
    return scores.amax(-1).isfinite()


# ---------------------------------------------------------------------- recursive rejection


def verify_ratio(
    scores_at: Callable, tokens, parents, lengths: list[int], q_at: Callable | None, noise: TreeNoise
) -> TreeVerdict:
    """Recursive rejection without replacement (Sequoia, arXiv 2402.12374; RSD, arXiv 2402.14160).

    Children are judged in the order in which they were drawn. After a rejection the target's law is what is left of it beyond
    q, and q is without the rejected token. How many children a node has may depend on q and on the nodes above, never on the
    children themselves: a tree cut afterwards by its own scores would be biased.

    Args:
        scores_at (`Callable`), tokens, parents (`torch.Tensor`), lengths (`list[int]`): as in the module's docstring.
        q_at (`Callable`, *optional*): `q_at(nodes, rows)` gives the laws [R, V] that the nodes' children were drawn from,
            without replacement. `None` for children that no draw decided (the most probable ones, copies): each is accepted
            with the target's probability of it, which is exact for any tree.
        noise (`TreeNoise`): of the rows.
    """
    children = children_of(tokens, parents, lengths)

    def choose(scores, nodes, rows, i):
        kids = [children[r].get(node, {}) for r, node in zip(rows, nodes)]
        out: list = [None] * len(rows)
        leaves = [j for j, kid in enumerate(kids) if not kid]
        if leaves:
            drawn = noise.sample(scores[leaves], [rows[j] for j in leaves], i).tolist()
            for j, token in zip(leaves, drawn):
                out[j] = None, token
        inner = [j for j, kid in enumerate(kids) if kid]
        if inner:
            p, at = scores[inner].softmax(-1), [rows[j] for j in inner]
            q = None if q_at is None else q_at([nodes[j] for j in inner], at).to(p.device)
            for j, judged in zip(inner, judge_children(p, q, [kids[j] for j in inner], at, i, noise)):
                out[j] = judged
        return out

    return _walk(scores_at, choose, len(lengths), True)


def judge_children(p, q, kids: list[dict], rows: list[int], i: int, noise: TreeNoise) -> list[tuple[int | None, int]]:
    """For each of R nodes its accepted child, or None, and the token (the child's, or drawn from what all rejections left).

    `p` [R, V]: the target's laws. `q` [R, V] or None: as in [`verify_ratio`]. `kids[j]`: token to node, in the order drawn.
    """
    out: list = [None] * len(kids)
    mass, alive = p, list(range(len(kids)))
    for slot in range(max(len(kid) for kid in kids)):
        alive = [j for j in alive if slot < len(kids[j])]
        if not alive:
            break
        x = torch.tensor([list(kids[j])[slot] for j in alive], device=p.device)
        # The first sibling meets p and q as they came, so that a chain is judged as `chain.verify_ratio` judges it.
        p_s = mass[alive] if slot == 0 else mass[alive] / mass[alive].sum(-1, keepdim=True)
        q_s = None
        if q is not None:
            q_s = q[alive] if slot == 0 else q[alive] / q[alive].sum(-1, keepdim=True)
        hits = (noise.coin([rows[j] for j in alive], i, p.device, slot) < acceptance(p_s, q_s, x)).tolist()
        index = torch.tensor(alive, device=p.device)
        mass = mass.index_copy(0, index, residual(p_s, q_s, x))
        if q is not None:
            q = q.index_copy(0, index, q_s.scatter(-1, x[:, None], 0.0))
        for j, hit, token in zip(alive, hits, x.tolist()):
            if hit:
                out[j] = kids[j][token], token
        alive = [j for j, hit in zip(alive, hits) if not hit]
    left = [j for j, judged in enumerate(out) if judged is None]
    if left:
        drawn = noise.sample_mass(mass[left], [rows[j] for j in left], i, "residual").tolist()
        for j, token in zip(left, drawn):
            out[j] = None, token
    return out


# ---------------------------------------------------------------------- walking


def children_of(tokens, parents, lengths: list[int]) -> list[dict[int, dict[int, int]]]:
    """Per row: node (-1 the anchor) to its children, which are token to node, in order."""
    out = []
    for row_tokens, row_parents, length in zip(tokens.tolist(), parents.tolist(), lengths):
        children: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(row_tokens[:length], row_parents)):
            children.setdefault(parent, {}).setdefault(token, node)
        out.append(children)
    return out


def _walk(scores_at: Callable, choose: Callable, count: int, draws: bool) -> TreeVerdict:
    """Descend in all `count` rows together. `choose(scores, nodes, rows, depth)` gives each row's next node, or None, and its
    token. A row that meets scores without any possible token ends there, if `draws` are made from them.
    """
    paths, following, able = [[] for _ in range(count)], [0] * count, [True] * count
    rows, depth = list(range(count)), 0
    while rows:
        nodes = [paths[r][-1] if paths[r] else -1 for r in rows]
        scores = scores_at(nodes, rows)
        fine = _possible(scores).tolist() if draws else [True] * len(rows)
        if not all(fine):
            for r, has in zip(rows, fine):
                able[r] = has
            some = [j for j, has in enumerate(fine) if has]
            scores, nodes, rows = scores[some], [nodes[j] for j in some], [rows[j] for j in some]
        chosen = choose(scores, nodes, rows, depth) if rows else []
        moved = []
        for r, (node, token) in zip(rows, chosen):
            following[r] = token
            if node is not None:
                paths[r].append(node)
                moved.append(r)
        rows, depth = moved, depth + 1
    deepest = max(map(len, paths), default=0)
    padded = [path + [-1] * (deepest - len(path)) for path in paths]
    return TreeVerdict(
        torch.tensor([len(path) for path in paths], dtype=torch.long),
        torch.tensor(following, dtype=torch.long),
        torch.tensor(able, dtype=torch.bool),
        torch.tensor(padded, dtype=torch.long).view(count, deepest),
    )
