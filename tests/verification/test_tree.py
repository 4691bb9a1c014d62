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
from hf_dspark.verification.tree import TreeNoise, match_all, ratio_all, verify_match, verify_ratio

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


def paths(verdict):
    return [[node for node in row if node >= 0] for row in verdict.path.tolist()]


def same(lazy, dense):
    assert paths(lazy) == paths(dense)
    assert torch.equal(lazy.accepted, dense.accepted) and lazy.accepted.tolist() == [len(path) for path in paths(lazy)]
    assert (lazy.possible is None) == (dense.possible is None)
    able = torch.ones_like(lazy.accepted, dtype=torch.bool) if lazy.possible is None else lazy.possible
    assert lazy.possible is None or torch.equal(able, dense.possible)
    assert torch.equal(lazy.next_token[able], dense.next_token[able])


def lazily(verify):
    """The lazy form with the dense one's arguments; the scores asked for are those given."""

    def run(scores, tokens, parents, q, lengths, noise):
        scores_at = lambda nodes, rows: scores[rows, [n + 1 for n in nodes]]  # noqa: E731
        return verify(scores_at, tokens, parents, q, lengths.tolist(), noise)

    return run


FORMS = [match_all, lazily(verify_match), ratio_all, lazily(verify_ratio)]


def keyed_text(target, row, length, seed, stream):
    text = ()
    for n in range(length):
        scores = target.scores(row, text)[None]
        text += (
            (
                int(scores.argmax())
                if seed is None
                else int(keyed_scores(scores, seed, [stream], [n], "target").argmax())
            ),
        )
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
        given = batch.tokens, batch.parents, None
        verdict = verify_match(asked, *given, batch.lengths, noise)
        same(verdict, match_all(all_scores(target, texts, batch), *given, torch.tensor(batch.lengths), noise))
        assert [len(s) for s in asked.seen] == [a + 1 for a in verdict.accepted.tolist()]
        for r in range(3):
            texts[r] += (*batch.tokens[r, paths(verdict)[r]].tolist(), int(verdict.next_token[r]))
            assert texts[r] == reference[r][: len(texts[r])]
        deepest = max(deepest, *verdict.accepted.tolist())
    assert deepest >= 3 and min(map(len, texts)) > 16


@pytest.mark.parametrize("verify", FORMS)
def test_a_node_off_the_path_may_be_hopeless_but_not_one_on_it(verify):
    tree, noise, scores = trees.pad([trees.chain([1, 0], torch.zeros(2))]), TreeNoise(0, [0], [0]), torch.zeros(1, 3, V)
    scores[:, 0, 1] = 60.0  # node 0 is accepted, node 1 is not
    scores[:, 1, 2] = 60.0
    scores[:, 2] = -torch.inf
    off = verify(scores, tree.tokens, tree.parents, None, torch.tensor([2]), noise)
    assert paths(off) == [[0]] and off.next_token.tolist() == [2] and off.possible.tolist() == [True]
    for bad in (torch.nan, -torch.inf):
        scores[:, 1] = bad
        on = verify(scores, tree.tokens, tree.parents, None, torch.tensor([2]), noise)
        assert paths(on) == [[0]] and on.possible.tolist() == [False]
        with pytest.raises(ValueError, match="no token possible"):
            on.read()


@pytest.mark.parametrize("verify", FORMS)
def test_rows_without_any_draft_get_the_targets_token(verify):
    scores, none = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(6)), torch.zeros(2, 0, dtype=torch.long)
    noise, lengths = TreeNoise(1, [0, 1], [4, 4]), torch.tensor([0, 0])
    verdict = verify(scores, none, none, None, lengths, noise)
    assert torch.equal(verdict.next_token, noise.sample(scores[:, 0], [0, 1], 0))
    assert paths(verdict) == [[], []] and verdict.accepted.tolist() == [0, 0] and verdict.path.shape == (2, 0)
    if verify in FORMS[:2]:
        assert torch.equal(verify(scores, none, none, None, lengths, None).next_token, scores[:, 0].argmax(-1))


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
    noise, q = None if kind == "greedy" else Noise(*keys), q if kind == "ratio" else None
    in_chain, of = lambda i, rows: scores[rows, i], torch.tensor(lengths)
    flat = (chain.verify_ratio if "ratio" in kind else chain.verify_match)(in_chain, tokens, q, lengths, noise)
    for form in FORMS[2:] if "ratio" in kind else FORMS[:2]:
        deep = form(scores, tokens, parents, q, of, None if noise is None else TreeNoise(*keys))
        assert torch.equal(flat.accepted, deep.accepted) and torch.equal(flat.next_token, deep.next_token)
        assert paths(deep) == [list(range(a)) for a in flat.accepted.tolist()]
    assert len(set(flat.accepted.tolist())) == 4


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_with_trees_are_judged_as_if_alone_and_densely(sampled):
    target, texts, q = Target(3), [(r,) for r in range(30)], None
    batch = random_trees(7, 30, target, texts)
    noise = TreeNoise(5, [2 * r for r in range(30)], [r % 4 for r in range(30)])
    if sampled:
        log_q = torch.randn(4, V, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
        rows = []
        for r in range(30):
            draw = lambda law, depth, count, r=r: noise.children(law, r, depth, count)  # noqa: E731
            rows.append(trees.sampled(trees.ddtree(log_q, r % 9), log_q, draw))
        batch = trees.pad(rows)
        q = log_q.exp()[trees.depths(batch.parents)[:, 1:] - 1]
    asked, given = Asked(target, texts, batch), (batch.tokens, batch.parents, q)
    together = verify_ratio(asked, *given, batch.lengths, noise)
    assert [len(s) for s in asked.seen] == [a + 1 for a in together.accepted.tolist()]
    scores = all_scores(target, texts, batch)
    same(together, ratio_all(scores, *given, torch.tensor(batch.lengths), noise))
    for r in range(30):
        alone = lazily(verify_ratio)(
            scores[[r]], *(x if x is None else x[[r]] for x in given), torch.tensor(batch.lengths[r : r + 1]),
            TreeNoise(5, noise.streams[[r]], noise.indices[[r]]),
        )  # fmt: skip
        assert paths(alone) == [paths(together)[r]] and alone.next_token[0] == together.next_token[r]
    assert {0, 1, 2} <= set(together.accepted.tolist())


def test_siblings_and_cousins_have_noise_of_their_own():
    noise = TreeNoise(1, [0, 1], [3, 3])
    coins = torch.stack([noise.coin([0, 1], i, "cpu", slot) for i in range(3) for slot in range(4)])
    assert len(coins.flatten().unique()) == 24
    assert torch.equal(noise.coin([0, 1], 2, "cpu"), Noise(1, [0, 1], [3, 3]).coin([0, 1], 2, "cpu"))
    alone = noise.coin([0, 1], 40, "cpu", 1)  # beyond the positions that keys are made for at first
    deep = TreeNoise(1, [0, 1], [3, 3])
    deep.coin([0], 2, "cpu", 1)
    deep.widen(41)
    assert torch.equal(deep.coin(None, torch.tensor([[40]]), "cpu", 1)[:, 0], alone)
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
    for law in (q, None):
        slots, _ = verification.judge(p, law, order, torch.ones_like(order, dtype=torch.bool), coins(noise))
        assert (slots >= 0).all()


def coins(noise):
    return lambda slot: noise.coin(None, 0, "cpu", slot)


def test_sampled_children_follow_the_target_with_real_noise():
    p = torch.tensor([0.1, 0.2, 0.05, 0.35, 0.3])
    log_q = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]] * 2).log()
    shape, counts, accepted = trees.ddtree(log_q, 4), Counter(), 0
    assert sorted(trees.depths(shape.parents).tolist()) == [0, 1, 1, 2, 2]
    for stream in range(1200):
        noise = TreeNoise(3, [stream], [0])
        tree = trees.sampled(shape, log_q, lambda law, depth, count: noise.children(law, 0, depth, count))  # noqa: B023
        scores, q = p.log().expand(1, 5, V), log_q[:1].exp().expand(1, 4, V)
        verdict = lazily(verify_ratio)(scores, tree.tokens[None], tree.parents[None], q, torch.tensor([4]), noise)
        text = (*tree.tokens[paths(verdict)[0]].tolist(), int(verdict.next_token[0]))
        counts[text[0]] += 1
        accepted += len(paths(verdict)[0])
    assert chi_square(counts, dict(enumerate(p.tolist()))) < 3.7
    assert accepted > 0.8 * 1200
