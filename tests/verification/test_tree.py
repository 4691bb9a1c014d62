"""Walking draft trees: keyed tokens, chains as trees, rows of a batch, and what may be asked of the target."""

from collections import Counter

import pytest
import torch
from oracles import chi_square

from hf_dspark.drafting import trees
from hf_dspark.verification import chain
from hf_dspark.verification import tree as verification
from hf_dspark.verification.chain import Noise
from hf_dspark.verification.noise import keyed_scores
from hf_dspark.verification.tree import TreeNoise, match_all, verify_match, verify_ratio

V = 5


class Target:
    """Random scores for every text of every row."""

    def __init__(self, seed=0, sharp=1.5):
        self.seed, self.sharp = seed, sharp

    def scores(self, row, text):
        key = hash((self.seed, row, *text)) % (1 << 40)
        return self.sharp * torch.randn(V, generator=torch.Generator().manual_seed(key))


def random_trees(seed, rows, target, texts):
    """Ragged trees, from the target's own laws with an error, so that walks go deep; one row may have none."""
    generator, made = torch.Generator().manual_seed(seed), []
    for r in range(rows):
        text, laws = list(texts[r]), []
        for _ in range(4):
            laws.append(target.scores(r, text) + 0.7 * torch.randn(V, generator=generator))
            text.append(int(laws[-1].argmax()))
        made.append(trees.ddtree(torch.stack(laws).log_softmax(-1), (seed + 5 * r) % 12))
    return trees.pad(made)


def paths_of(batch):
    """Per row: the tokens from the anchor to every node, the anchor (an empty path) first."""
    found = []
    for r, n in enumerate(batch.lengths):
        row = [()]
        for token, parent in zip(batch.tokens[r, :n].tolist(), batch.parents[r, :n].tolist()):
            row.append((*row[parent + 1], token))
        found.append(row)
    return found


class Asked:
    """`scores_at` that holds the caller to the true path: the anchor first, then children of what was asked before."""

    def __init__(self, target, texts, batch):
        self.target, self.texts, self.found, self.seen = target, texts, paths_of(batch), [[] for _ in texts]

    def __call__(self, nodes, rows):
        assert len(set(rows)) == len(rows) == len(nodes)
        for node, r in zip(nodes, rows):
            path = self.found[r][node + 1]
            assert path[:-1] == self.seen[r][-1] if self.seen[r] else node == -1
            self.seen[r].append(path)
        return torch.stack([self.target.scores(r, self.texts[r] + self.found[r][n + 1]) for n, r in zip(nodes, rows)])


def all_scores(target, texts, batch):
    """[A, N + 1, V]; what padding nodes get is of no matter."""
    full = torch.full((len(texts), batch.tokens.shape[1] + 1, V), torch.nan)
    for r, row in enumerate(paths_of(batch)):
        for i, path in enumerate(row):
            full[r, i] = target.scores(r, texts[r] + path)
    return full


def keyed_text(target, row, length, seed, stream):
    text = ()
    for n in range(length):
        scores = target.scores(row, text)[None]
        text += ((int(scores.argmax()) if seed is None else int(keyed_scores(scores, seed, [stream], [n], "target").argmax())),)
    return text


@pytest.mark.parametrize("seed", [None, 11])
def test_rounds_of_trees_write_the_text_of_keyed_sampling(seed):
    target, streams = Target(), [0, 4, 9]
    texts, reference = [()] * 3, [keyed_text(target, r, 60, seed, streams[r]) for r in range(3)]
    deepest = 0
    for turn in range(12):
        batch = random_trees(turn, 3, target, texts)
        noise = None if seed is None else TreeNoise(seed, streams, [len(t) for t in texts])
        asked = Asked(target, texts, batch)
        verdict = verify_match(asked, batch.tokens, batch.parents, batch.lengths, noise)
        at_hand = match_all(
            all_scores(target, texts, batch), batch.tokens, batch.parents, batch.lengths, noise
        )
        assert verdict.paths == at_hand.paths and torch.equal(verdict.next_token, at_hand.next_token)
        assert [len(s) for s in asked.seen] == [a + 1 for a in verdict.accepted.tolist()]
        for r in range(3):
            texts[r] += (*batch.tokens[r, verdict.paths[r]].tolist(), int(verdict.next_token[r]))
            assert texts[r] == reference[r][: len(texts[r])]
        deepest = max(deepest, *verdict.accepted.tolist())
    assert deepest >= 3 and min(map(len, texts)) > 16


def test_a_node_off_the_path_may_be_hopeless_but_not_one_on_it():
    tree = trees.pad([trees.chain([1, 2], torch.zeros(2))])
    scores = torch.zeros(1, 3, V)
    noise = TreeNoise(0, [0], [0])
    token = int(noise.sample(scores[:, 0], [0], 0))
    scores[:, 2] = -torch.inf
    off = match_all(scores, torch.tensor([[1 - (token == 1), 2]]), tree.parents, [2], noise)
    assert off.paths == [[]] and off.next_token.tolist() == [token]
    assert off.possible.all()
    scores[:, 1] = -torch.inf
    lazy = lambda scores, *rest: verify_match(lambda n, r: scores[r, [x + 1 for x in n]], *rest)  # noqa: E731
    ratio = lambda scores, *rest: verify_ratio(lambda n, r: scores[r, [x + 1 for x in n]], *rest[:3], None, rest[3])  # noqa: E731
    scores[:, 0, token] += 60  # accepted by any verifier
    for verify in (match_all, lazy, ratio):
        on = verify(scores, torch.tensor([[token, 2]]), tree.parents, [2], noise)
        assert on.paths == [[0]] and on.possible.tolist() == [False]
    nothing = scores[:, :1].clone().fill_(torch.nan)
    assert not match_all(nothing, tree.tokens[:, :0], tree.parents[:, :0], [0], noise).possible


@pytest.mark.parametrize("noise", [None, TreeNoise(1, [0, 1], [4, 4])])
def test_rows_without_any_draft_get_the_targets_token(noise):
    scores, none = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(6)), torch.zeros(2, 0, dtype=torch.long)
    verdict = match_all(scores, none, none, [0, 0], noise)
    expected = scores[:, 0].argmax(-1) if noise is None else noise.sample(scores[:, 0], [0, 1], 0)
    assert verdict.paths == [[], []] and torch.equal(verdict.next_token, expected)
    lazy = verify_match(lambda nodes, rows: scores[rows, 0], none, none, [0, 0], noise)
    assert lazy.paths == [[], []] and torch.equal(lazy.next_token, expected)
    assert lazy.accepted.tolist() == [0, 0]


def chains(seed, rows=150, L=3):
    generator = torch.Generator().manual_seed(seed)
    q = (1.5 * torch.randn(rows, L, V, generator=generator)).softmax(-1)
    near = torch.nn.functional.pad(q, (0, 0, 0, 1), value=1 / V).log()
    p = (near + torch.randn(rows, L + 1, V, generator=generator)).softmax(-1)
    tokens = torch.stack([torch.multinomial(q[:, i], 1, generator=generator)[:, 0] for i in range(L)], 1)
    return p.log(), q, tokens, torch.randint(0, L + 1, (rows,), generator=generator).tolist()


@pytest.mark.parametrize("kind", ["greedy", "match", "ratio one-hot", "ratio"])
def test_a_chain_is_judged_as_a_chain(kind):
    scores, q, tokens, lengths = chains(1)
    rows = len(lengths)
    keys = 3, list(range(rows)), [r % 7 for r in range(rows)]
    parents = torch.arange(-1, tokens.shape[1] - 1).expand_as(tokens)
    in_chain, in_tree = (lambda i, rows: scores[rows, i]), (lambda nodes, rows: scores[rows, [n + 1 for n in nodes]])
    if "ratio" in kind:
        given = (q, lambda nodes, rows: q[rows, [n + 1 for n in nodes]]) if kind == "ratio" else (None, None)
        flat = chain.verify_ratio(in_chain, tokens, given[0], lengths, Noise(*keys))
        deep = verify_ratio(in_tree, tokens, parents, lengths, given[1], TreeNoise(*keys))
    else:
        noise = None if kind == "greedy" else Noise(*keys)
        flat = chain.verify_match(in_chain, tokens, lengths, noise)
        deep = verify_match(in_tree, tokens, parents, lengths, noise)
    assert torch.equal(flat.accepted, deep.accepted) and torch.equal(flat.next_token, deep.next_token)
    assert all(path == list(range(len(path))) for path in deep.paths)
    assert len(set(flat.accepted.tolist())) == 4


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_with_trees_are_judged_as_if_alone(sampled):
    target, texts = Target(3), [(r,) for r in range(30)]
    batch, q_at = random_trees(7, 30, target, texts), None
    noise = TreeNoise(5, [2 * r for r in range(30)], [r % 4 for r in range(30)])
    if sampled:
        log_q = torch.randn(4, V, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
        rows = []
        for r in range(30):
            draw = lambda law, depth, count, r=r: noise.children(law, r, depth, count)  # noqa: E731
            rows.append(trees.sampled(trees.ddtree(log_q, r % 9), log_q, draw))
        batch = trees.pad(rows)
        depth = trees.depths(batch.parents)
        q_at = lambda nodes, rows: log_q.exp()[depth[rows, [n + 1 for n in nodes]]]  # noqa: E731
    asked = Asked(target, texts, batch)
    together = verify_ratio(asked, batch.tokens, batch.parents, batch.lengths, q_at, noise)
    assert [len(s) for s in asked.seen] == [a + 1 for a in together.accepted.tolist()]
    for r, n in enumerate(batch.lengths):
        one = trees.pad([batch.row(r)])
        alone = verify_ratio(
            lambda nodes, rows: asked.target.scores(r, texts[r] + asked.found[r][nodes[0] + 1])[None],  # noqa: B023
            one.tokens, one.parents, [n], q_at and (lambda nodes, rows: q_at(nodes, [r])),  # noqa: B023
            TreeNoise(5, [noise.streams[r]], [noise.indices[r]]),
        )  # fmt: skip
        assert alone.paths == [together.paths[r]] and alone.next_token[0] == together.next_token[r]
    assert {0, 1, 2} <= set(together.accepted.tolist())


def test_siblings_and_cousins_have_noise_of_their_own():
    noise = TreeNoise(1, [0, 1], [3, 3])
    coins = torch.stack([noise.coin([0, 1], i, "cpu", slot) for i in range(3) for slot in range(4)])
    assert len(coins.flatten().unique()) == 24
    assert torch.equal(noise.coin([0, 1], 2, "cpu"), Noise(1, [0, 1], [3, 3]).coin([0, 1], 2, "cpu"))
    flat = torch.zeros(50, V)
    assert len(noise.children(flat, 0, 0, V).unique(dim=0)) > 20
    later = TreeNoise(1, [0, 1], [2, 2])  # the same token, drafted in an earlier round
    assert not torch.equal(later.children(flat, 0, 1, V), noise.children(flat, 0, 0, V))
    assert not torch.equal(later.coin([0], 1, "cpu"), noise.coin([0], 0, "cpu"))


def test_values_of_this_version_stay():
    noise = TreeNoise(7, [2], [5])
    assert [float(noise.coin([0], 1, "cpu", slot)) for slot in (0, 3)] == pytest.approx(COINS, abs=0, rel=0)
    assert noise.children(torch.zeros(2, 6), 0, 1, 4).tolist() == CHILDREN


COINS = [0.31972086091674823, 0.4170705976248631]
CHILDREN = [[5, 1, 3, 2], [2, 1, 4, 0]]


def test_a_node_with_every_token_as_a_child_never_rejects():
    generator = torch.Generator().manual_seed(4)
    p, q = (torch.randn(200, V, generator=generator).softmax(-1) for _ in range(2))
    noise = TreeNoise(2, list(range(200)), [0] * 200)
    order = torch.stack([noise.children(q[r].log()[None], r, 0, V)[0] for r in range(200)])
    kids = [{token: slot for slot, token in enumerate(row)} for row in order.tolist()]
    for law in (q, None):
        judged = verification.judge_children(p, law, kids, list(range(200)), 0, noise)
        assert all(node is not None for node, _ in judged)


def test_sampled_children_follow_the_target_with_real_noise():
    p = torch.tensor([0.1, 0.2, 0.05, 0.35, 0.3])
    log_q = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]] * 2).log()
    shape, counts, accepted = trees.ddtree(log_q, 4), Counter(), 0
    assert sorted(trees.depths(shape.parents).tolist()) == [0, 1, 1, 2, 2]
    for stream in range(1200):
        noise = TreeNoise(3, [stream], [0])
        tree = trees.sampled(shape, log_q, lambda law, depth, count: noise.children(law, 0, depth, count))  # noqa: B023
        verdict = verify_ratio(
            lambda nodes, rows: p.log()[None], tree.tokens[None], tree.parents[None], [4],
            lambda nodes, rows: log_q[:1].exp(), noise,
        )  # fmt: skip
        text = (*tree.tokens[verdict.paths[0]].tolist(), int(verdict.next_token[0]))
        counts[text[0]] += 1
        accepted += len(verdict.paths[0])
    assert chi_square(counts, dict(enumerate(p.tolist()))) < 3.7
    assert accepted > 0.8 * 1200
