"""Which path of a draft tree is accepted, and the token after it. Every verifier gives exactly the target's law.

A tree is `tokens` [A, N] and `parents` [A, N] (host; -1 is the anchor, a parent comes before its children, and no two
children of a node have one token), of which `lengths[r]` nodes count in row r. Where the anchor takes part it is node
-1, or entry 0 of N + 1. Siblings stand in the order in which they were drawn. `q` [A, N, V] has the law each node was
drawn from, the same for siblings, or is None for nodes that no draw decided.

As for chains there are two forms of each verdict. The lazy one asks for scores on the way, because the user's
processors hang on them: `scores_at(nodes, rows)` gives the target's processed scores [R, V] behind node `nodes[j]` of
row `rows[j]`. It is called once for each row and node of the accepted path, in order, and for no other node. The dense
one takes the scores of the anchor and all nodes [A, N + 1, V] and computes on their device without waiting for it. A
row that meets a node without any possible token ends there, with `possible` False. The verdict's `path` has the
accepted nodes and then -1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .chain import Verdict, acceptance, residual
from .noise import DOMAINS, Noise, possible, uniforms


@dataclass
class TreeNoise(Noise):
    """[`Noise`] that also tells siblings and cousins apart. `slot` is a node's number among them; slot 0 is a chain's
    noise."""

    slot: int = 0
    _siblings: dict = field(default_factory=dict, repr=False, compare=False)

    def _rounds(self, start, domains):
        return _rounds(start, self.slot) * (domains != DOMAINS["target"])

    def coin(self, rows, i, device, slot: int = 0) -> torch.Tensor:
        """Uniforms [R] or [R, N] for accepting a draft at position i that is number `slot` of its siblings."""
        if slot == self.slot:
            return super().coin(rows, i, device)
        if slot not in self._siblings:
            self._siblings[slot] = TreeNoise(self.seed, self.streams, self.indices, slot=slot)
        self._siblings[slot].widen(self.width)
        return self._siblings[slot].coin(rows, i, device, slot)

    def children(self, log_q: torch.Tensor, row: int, i: int, count: int) -> torch.Tensor:
        """`count` children [F, count] of each of row `row`'s F nodes before position i, drawn without replacement.

        `log_q` [F, V] may be unnormalised. Taking the `count` largest of log q plus Gumbel noise, in order, is drawing
        one after the other without replacement (arXiv 1903.06059, section 2.3).
        """
        F, V = log_q.shape
        start, stream = int(self.indices[row]), int(self.streams[row])
        rounds = [_rounds(start, slot) for slot in range(F)]
        noise = uniforms(self.seed, [stream] * F, [start + i] * F, "draft", V, log_q.device, rounds)
        return (log_q.to(noise.dtype) - (-noise.log()).log()).topk(count, -1).indices


def _rounds(start, slot: int):
    """A number for a round and a slot; the index of a token, which tells rounds apart, stays below 2^32."""
    return start + (slot << 32)


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


def verify_match(scores_at: Callable, tokens, parents, q, lengths: list[int], noise: Noise | None) -> Verdict:
    """Draw the target's token and descend into the child that has it, if there is one. Greedy when `noise` is None.

    Exact for any tree, however it was made and cut, because the drafts never enter the draw; with keyed noise the text
    is that of keyed sampling, as all nodes of one depth share the noise of their position. Arguments as in the module's
    docstring; `q` isn't read.
    """
    children = children_of(tokens, parents, lengths)

    def choose(scores, nodes, rows, i):
        chosen = (scores.argmax(-1) if noise is None else noise.sample(scores, rows, i)).tolist()
        return [(children[r].get(node, {}).get(token), token) for r, node, token in zip(rows, nodes, chosen)]

    return _walk(scores_at, choose, tokens, noise is not None)


def match_all(scores: torch.Tensor, tokens, parents, q, lengths: torch.Tensor, noise: Noise | None) -> Verdict:
    """[`verify_match`] from the scores of all nodes [A, N + 1, V], `lengths` [A] a tensor; the rest as there.

    It draws at every node, which an accelerator does at once; on the CPU the walk costs less.
    """
    depth, above = depths(parents), (parents + 1).to(scores.device)
    if noise is None:
        chosen, able = scores.argmax(-1), None
    else:
        noise.widen(int(depth.max()) + 1)
        chosen, able = noise.sample(scores, None, depth.to(scores.device)), possible(scores)
    hit = tokens.to(scores.device) == chosen.gather(1, above)
    last, path = _descend(hit, able, parents, lengths, int(depth.max()))
    return Verdict((path >= 0).sum(1), _at(chosen, last), None if able is None else _at(able, last), path)


# ---------------------------------------------------------------------- recursive rejection


def verify_ratio(scores_at: Callable, tokens, parents, q, lengths: list[int], noise: TreeNoise) -> Verdict:
    """Recursive rejection without replacement (Sequoia, arXiv 2402.12374; RSD, arXiv 2402.14160).

    Children are judged in the order in which they were drawn. After a rejection the target's law is what is left of it
    beyond q, and q is without the rejected token. How many children a node has may depend on q and on the nodes above,
    never on the children themselves: a tree cut afterwards by its own scores would be biased. With `q` None each child
    is accepted with the target's probability of it, which is exact for any tree. Arguments as in the module's
    docstring.
    """
    children = children_of(tokens, parents, lengths)

    def choose(scores, nodes, rows, i):
        kids = [children[r].get(node, {}) for r, node in zip(rows, nodes)]
        out: list = [None] * len(rows)
        leaves = [j for j, kid in enumerate(kids) if not kid]
        if leaves:
            for j, token in zip(leaves, noise.sample(scores[leaves], [rows[j] for j in leaves], i).tolist()):
                out[j] = None, token
        inner = [j for j, kid in enumerate(kids) if kid]
        if inner:
            at, kids = [rows[j] for j in inner], [kids[j] for j in inner]
            law = None if q is None else q[at, [next(iter(kid.values())) for kid in kids]]
            for j, judged in zip(inner, _judge_rows(scores[inner].softmax(-1), law, kids, at, i, noise)):
                out[j] = judged
        return out

    return _walk(scores_at, choose, tokens, True)


def _judge_rows(p, q, kids: list[dict], rows: list[int], i: int, noise) -> list[tuple[int | None, int]]:
    """The accepted child (`kids[j]`: token to node) or None, and the token, of each row at draft position i."""
    x = [torch.tensor(list(kid), device=p.device) for kid in kids]
    x = torch.nn.utils.rnn.pad_sequence(x, True, -1)
    slots, mass = judge(p, q, x.clamp_min(0), x >= 0, lambda slot: noise.coin(rows, i, p.device, slot))
    slots = slots.tolist()
    out = [(None, 0) if slot < 0 else list(kid.items())[slot][::-1] for slot, kid in zip(slots, kids)]
    left = [j for j, slot in enumerate(slots) if slot < 0]
    if left:
        for j, token in zip(left, noise.sample_mass(mass[left], [rows[j] for j in left], i, "residual").tolist()):
            out[j] = None, token
    return out


def judge(p, q, tokens, real, coin: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """Which child of each of R nodes is accepted, and the mass [R, V] a token is drawn from where none is.

    Args:
        p (`torch.Tensor`): [R, V] the target's laws.
        q (`torch.Tensor`, *optional*): [R, V] the laws that the children were drawn from, without replacement.
        tokens, real (`torch.Tensor`): [R, C] the children in the order drawn, and which of them there are (the first
            ones).
        coin (`Callable`): `coin(slot)` gives the uniforms [R] for child number `slot`.

    Returns:
        `torch.Tensor`: [R] the child's number, -1 for none; and the mass.
    """
    accepted, mass = torch.full((len(p),), -1, device=p.device), p
    q = None if q is None else q.to(p.device)
    for slot in range(tokens.shape[1]):
        trying = real[:, slot] & (accepted < 0)
        if p.device.type == "cpu" and not trying.any():  # elsewhere, to look would be to wait
            break
        x = tokens[:, slot]
        # The first sibling meets p and q as they came, so that a chain is judged as `chain.verify_ratio` judges it.
        p_s = mass if slot == 0 else mass / mass.sum(-1, keepdim=True)
        q_s = q if slot == 0 or q is None else q / q.sum(-1, keepdim=True)
        hit = trying & (coin(slot) < acceptance(p_s, q_s, x))
        rejected = (trying & ~hit)[:, None]
        accepted = torch.where(hit, slot, accepted)
        mass = torch.where(rejected, residual(p_s, q_s, x), mass)
        q = None if q is None else torch.where(rejected, q_s.scatter(-1, x[:, None], 0.0), q)
    return accepted, mass


def ratio_all(scores: torch.Tensor, tokens, parents, q, lengths: torch.Tensor, noise: TreeNoise) -> Verdict:
    """[`verify_ratio`] from the scores of all nodes [A, N + 1, V], `lengths` [A] a tensor; the rest as there.

    It holds a few tensors of that size; on the CPU the walk costs less.
    """
    device, depth, (A, N) = scores.device, depths(parents), tokens.shape
    noise.widen(int(depth.max()) + 1)
    family, places, able = _family(parents).to(device), depth.to(device), possible(scores)
    real = (family >= 0) & (family < lengths.to(device)[:, None, None])
    if not N:
        last, path = torch.zeros(A, dtype=torch.long, device=device), real[:, 0, :0].long()
        return Verdict(last, noise.sample(scores[:, 0], None, 0), able[:, 0], path)
    kids = family.clamp_min(0)
    x = tokens.to(device).gather(1, kids.flatten(1)).view_as(kids)
    law = None if q is None else q.to(device)[torch.arange(A, device=device)[:, None], kids[..., 0]].flatten(0, 1)
    coin = lambda slot: noise.coin(None, places, device, slot).flatten()  # noqa: E731
    slots, mass = judge(scores.softmax(-1).flatten(0, 1), law, x.flatten(0, 1), real.flatten(0, 1), coin)
    slots, mass = slots.view(A, N + 1), mass.view_as(scores)
    chosen = torch.where(slots < 0, -1, family.gather(2, slots.clamp_min(0)[..., None])[..., 0])
    hit = chosen.gather(1, (parents + 1).to(device)) == torch.arange(N, device=device)
    last, path = _descend(hit, able, parents, lengths, int(depth.max()))
    accepted = (path >= 0).sum(1)
    bonus = noise.sample(_at(scores, last), None, accepted)
    rest = noise.sample_mass(_at(mass, last), None, accepted, "residual")
    return Verdict(accepted, torch.where(_at(real, last)[:, 0], rest, bonus), _at(able, last), path)


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


def _family(parents: torch.Tensor) -> torch.Tensor:
    """The children [A, N + 1, C] of the anchor and each node, in order, then -1; C is at least 1."""
    A, N = parents.shape
    rows: list[list[list[int]]] = [[[] for _ in range(N + 1)] for _ in range(A)]
    for row, above in zip(rows, parents.tolist()):
        for node, parent in enumerate(above):
            row[parent + 1].append(node)
    most = max((len(kids) for row in rows for kids in row), default=0)
    return torch.tensor([[kids + [-1] * (max(most, 1) - len(kids)) for kids in row] for row in rows], dtype=torch.long)


def _descend(hit, able, parents, lengths, deepest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last accepted node's entry [A] (0 is the anchor) and the path [A, deepest], where `hit` [A, N] says which
    nodes are accepted if their parents are, and `able` [A, N + 1] (or None) behind which nodes there is a law."""
    device, N = hit.device, parents.shape[1]
    node = torch.arange(N, device=device)
    hit = hit & (node < lengths.to(device)[:, None])
    if able is not None:
        hit = hit & able.gather(1, (parents + 1).to(device))
    below = ancestors(parents)[:, 1:, 1:].to(device)
    alive = ~(below & ~hit[:, None]).any(-1)
    last = torch.cat([torch.zeros_like(alive[:, :1].sum(1, keepdim=True)), torch.where(alive, node + 1, 0)], 1).amax(1)
    path = torch.where(alive, node, N).sort(-1).values[:, :deepest]
    return last, torch.where(path < N, path, -1)


def _at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(len(values), device=values.device), places]


def _walk(scores_at: Callable, choose: Callable, tokens: torch.Tensor, draws: bool) -> Verdict:
    """Descend in all rows of `tokens` [A, N] together.

    `choose(scores, nodes, rows, depth)` gives each row's next node, or None, and its token. A row that meets scores
    without any possible token ends there, if `draws` are made from them.
    """
    count = len(tokens)
    paths, following, able = [[] for _ in range(count)], [0] * count, [True] * count
    rows, depth = list(range(count)), 0
    while rows:
        nodes = [paths[r][-1] if paths[r] else -1 for r in rows]
        scores = scores_at(nodes, rows)
        fine = possible(scores).tolist() if draws else [True] * len(rows)
        for r, has in zip(rows, fine):
            able[r] = has
        if not all(fine):
            some = [j for j, has in enumerate(fine) if has]
            scores, nodes, rows = scores[some], [nodes[j] for j in some], [rows[j] for j in some]
        moved = []
        for r, (node, token) in zip(rows, choose(scores, nodes, rows, depth) if rows else []):
            following[r] = token
            if node is not None:
                paths[r].append(node)
                moved.append(r)
        rows, depth = moved, depth + 1
    deepest = max(map(len, paths), default=0)
    padded = [path + [-1] * (deepest - len(path)) for path in paths]
    facts = [len(path) for path in paths], following, able, padded
    accepted, following, able, path = (torch.tensor(x, device=tokens.device) for x in facts)
    return Verdict(accepted.long(), following.long(), able.bool() if draws else None, path.long().view(count, deepest))
