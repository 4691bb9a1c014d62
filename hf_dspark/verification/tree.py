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
from .noise import check_possible, gumbel, uniforms


@dataclass(frozen=True)
class TreeVerdict:
    """`paths[r]`: row r's accepted nodes, from the anchor's child on. `next_token` [A] (host): the target's token after."""

    paths: list[list[int]]
    next_token: torch.Tensor

    @property
    def accepted(self) -> torch.Tensor:
        """[A] accepted drafts of each row."""
        return torch.tensor([len(path) for path in self.paths], dtype=torch.long)


class TreeNoise(Noise):
    """`Noise` that also tells siblings and cousins apart. With slot 0 it is the noise of a chain."""

    def _slots(self, rows, i, slots, domain, size, device) -> dict:
        start = [self.indices[r] for r in rows]
        return dict(
            seed=self.seed,
            streams=[self.streams[r] for r in rows],
            indices=[n + i for n in start],
            domain=domain,
            size=size,
            device=device,
            rounds=[n + (slot << 32) for n, slot in zip(start, slots)],  # an index of a token stays below 2^32
        )

    def coin(self, rows: list[int], i: int, device, slot: int = 0) -> torch.Tensor:
        """Uniforms [R] for accepting the child with number `slot` among its siblings, a draft at position i."""
        return uniforms(**self._slots(rows, i, [slot] * len(rows), "coin", 1, device))[:, 0]

    def children(self, log_q: torch.Tensor, row: int, i: int, count: int) -> torch.Tensor:
        """`count` children [F, count] of each of row `row`'s F nodes before position i, drawn without replacement.

        `log_q` [F, V] may be unnormalised. Taking the `count` largest of log q plus Gumbel noise, in order, is drawing one
        after the other without replacement (arXiv 1903.06059, section 2.3).
        """
        F, V = log_q.shape
        noise = gumbel(**self._slots([row] * F, i, list(range(F)), "draft", V, log_q.device))
        return (log_q.double() + noise).topk(count, -1).indices


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

    def choose(nodes, rows, i):
        scores = scores_at(nodes, rows)
        chosen = (scores.argmax(-1) if noise is None else noise.sample(scores, rows, i)).tolist()
        return [(children[r].get(node, {}).get(token), token) for r, node, token in zip(rows, nodes, chosen)]

    return _walk(len(lengths), choose)


def verify_match_at_hand(scores: torch.Tensor, tokens, parents, lengths: list[int], noise: Noise | None) -> TreeVerdict:
    """[`verify_match`] of scores [A, N + 1, V] that are all there, anchor first, with one copy to the host.

    It draws at every node, which an accelerator does at once; on the CPU the walk of `verify_match` costs less.
    """
    A, N = tokens.shape
    device = scores.device
    inside = torch.arange(N + 1) <= torch.tensor(lengths)[:, None]
    chosen = _draws(scores, inside, depths(parents), noise)
    seen = ancestors(parents).to(device)
    above = (parents + 1).to(device)
    hit = (tokens.to(device) == chosen.gather(1, above)) & inside[:, 1:].to(device)
    alive = ~(seen[:, 1:, 1:] & ~hit[:, None]).any(-1)
    last = (alive * torch.arange(1, N + 1, device=device)).amax(1, keepdim=True) if N else above.new_zeros(A, 1)
    *paths, following = torch.cat([alive.long(), chosen.gather(1, last)], 1).T.tolist()
    paths = [[node for node in range(N) if paths[node][r]] for r in range(A)]
    if -1 in following:
        r = following.index(-1)
        check_possible(scores[r, (paths[r] or [-1])[-1] + 1][None])
    return TreeVerdict(paths, torch.tensor(following, dtype=torch.long))


def _draws(scores, inside, depth, noise) -> torch.Tensor:
    """The target's token [A, N + 1] behind every node; -1 where no token is possible."""
    if noise is None:
        return scores.argmax(-1)
    possible = torch.isfinite(scores.amax(-1))  # a node off the path may be hopeless without harm
    scores = torch.where(possible[..., None], scores, 0.0)
    chosen = torch.zeros(scores.shape[:2], dtype=torch.long, device=scores.device)
    for i in range(int(depth.max()) + 1):
        rows, nodes = ((depth == i) & inside).nonzero(as_tuple=True)
        if len(rows):
            chosen[rows, nodes] = noise.sample(scores[rows, nodes], rows.tolist(), i)
    return torch.where(possible, chosen, -1)


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

    def choose(nodes, rows, i):
        scores = scores_at(nodes, rows)
        kids = [children[r].get(node, {}) for r, node in zip(rows, nodes)]
        out: list = [None] * len(rows)
        inner = [j for j, kid in enumerate(kids) if kid]
        leaves = [j for j, kid in enumerate(kids) if not kid]
        if leaves:
            drawn = noise.sample(scores[leaves], [rows[j] for j in leaves], i).tolist()
            for j, token in zip(leaves, drawn):
                out[j] = None, token
        if inner:
            at = [nodes[j] for j in inner], [rows[j] for j in inner]
            check_possible(scores[inner])
            p = scores[inner].softmax(-1)
            q = None if q_at is None else q_at(*at).to(p.device)
            for j, judged in zip(inner, judge_children(p, q, [kids[j] for j in inner], at[1], i, noise)):
                out[j] = judged
        return out

    return _walk(len(lengths), choose)


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


def _walk(rows: int, choose: Callable) -> TreeVerdict:
    """Descend in all rows together. `choose(nodes, rows, depth)` gives each row's next node, or None, and its token."""
    paths, following, alive, depth = [[] for _ in range(rows)], [0] * rows, list(range(rows)), 0
    while alive:
        nodes = [paths[r][-1] if paths[r] else -1 for r in alive]
        moved = []
        for r, (node, token) in zip(alive, choose(nodes, alive, depth)):
            following[r] = token
            if node is not None:
                paths[r].append(node)
                moved.append(r)
        alive, depth = moved, depth + 1
    return TreeVerdict(paths, torch.tensor(following, dtype=torch.long))
