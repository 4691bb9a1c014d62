"""What is done with draft trees whoever built them: merging, cutting, forcing a path in, sampling the children."""

import itertools
import random
from collections import Counter

import pytest
import torch
from oracles import chi_square

from hf_dspark.drafting import trees
from hf_dspark.drafting.trees import Tree
from hf_dspark.verification.tree import TreeNoise


def random_tree(seed, count, vocab=4) -> Tree:
    """Nodes in any topological order; scores fall along every path."""
    draw = random.Random(seed)
    tokens, parents, scores, known = [], [], [], set()
    while len(tokens) < count:
        parent, token = draw.randrange(-1, len(tokens)), draw.randrange(vocab)
        if (parent, token) not in known:
            known.add((parent, token))
            scores.append((scores[parent] if parent >= 0 else 0.0) - draw.randrange(3))
            tokens.append(token)
            parents.append(parent)
    return Tree.of(tokens, parents, scores)


def independent(log_probs):
    """`dartree`'s step of a head that corrects nothing; `log_probs` [k, V]."""

    def step(memory, rows, tokens, depth, candidates):
        frontier = 1 if tokens is None else tokens.shape[1]
        return log_probs[depth, candidates][:, None].expand(-1, frontier, -1), None

    return step


def by_path(tree: Tree) -> dict:
    found = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        assert -1 <= parent < len(found), "a parent comes before its children"
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found), "no two children have one token"
    return dict(zip(found, tree.scores.tolist()))


def test_masks_depths_and_paths_follow_the_parents():
    for seed in range(20):
        tree = random_tree(seed, seed)
        found = [(), *by_path(tree)]
        assert trees.depths(tree.parents).tolist() == [len(path) for path in found]
        mask = trees.ancestors(tree.parents)
        for i, j in itertools.product(range(seed + 1), repeat=2):
            assert mask[i, j] == (found[j] == found[i][: len(found[j])])
        leaves = [path for path in found[1:] if not any(other[:-1] == path for other in found)]
        assert [found[path[-1] + 1] for path in trees.paths(tree.parents)] == leaves
        assert trees.path_to(tree.parents, -1) == []
        for node in range(seed):
            assert tree.tokens[trees.path_to(tree.parents, node)].tolist() == list(found[node + 1])
        for path in trees.paths(tree.parents):
            assert [len(found[node + 1]) for node in path] == list(range(1, len(path) + 1))
            assert trees.locate(tree, tree.tokens[path]) == path


def test_masks_of_several_trees_are_those_of_each():
    made = [random_tree(seed, count) for seed, count in enumerate((3, 7, 1))]
    batch = trees.pad(made)
    assert batch.lengths == [3, 7, 1]
    for r, tree in enumerate(made):
        n = len(tree.tokens) + 1
        assert torch.equal(trees.ancestors(batch.parents)[r, :n, :n], trees.ancestors(tree.parents))
        assert all(torch.equal(a, b) for a, b in zip(batch.row(r), tree))
    assert trees.ancestors(batch.parents)[2, 4].nonzero()[:, 0].tolist() == [0, 4]  # padding: itself and the anchor


def test_a_path_is_located_as_far_as_the_tree_goes():
    tree = Tree.of([5, 6, 7], [-1, 0, -1], [-1.0, -2.0, -3.0])
    assert trees.locate(tree, [5, 6, 9]) == [0, 1]
    assert trees.locate(tree, [6]) == []
    assert trees.locate(tree, [6], at=0) == [1]


def test_grafting_merges_equal_prefixes_and_keeps_the_better_score():
    for seed in range(30):
        tree, branch = random_tree(seed, 6), random_tree(seed + 100, 5)
        at = seed % 7 - 1
        merged, ours = trees.graft(tree, branch, at), by_path(tree)
        start = ((), *ours)[at + 1]
        expected = dict(ours)
        for path, score in by_path(branch).items():
            path, score = (*start, *path), score + ours.get(start, 0.0)
            expected[path] = max(expected.get(path, -torch.inf), score)
        assert by_path(merged) == expected
        assert torch.equal(merged.tokens[:6], tree.tokens) and torch.equal(merged.parents[:6], tree.parents)


def test_a_copied_continuation_becomes_a_branch():
    tree = trees.ddtree(torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]).log(), 3)
    copied = trees.chain([0, 2, 2], torch.tensor([0.9, 0.8, 0.7]).log())
    merged = by_path(trees.graft(tree, copied))
    assert set(merged) == {*by_path(tree), (0,), (0, 2), (0, 2, 2)}
    assert merged[(0,)] == pytest.approx(float(torch.tensor(0.9).log()))
    assert by_path(trees.graft(Tree.of(), copied)) == by_path(copied)


def test_pruning_keeps_the_best_nodes_and_stays_a_tree():
    for seed in range(40):
        tree, bonus = random_tree(seed, 12), (0.0, -0.5)[seed % 2]
        found = list(by_path(tree).items())
        for budget in (0, 1, 5, 20):
            keys = [score + bonus * len(path) for path, score in found]
            best = sorted(range(12), key=lambda i: -keys[i])[:budget]  # noqa: B023
            assert list(by_path(trees.prune(tree, budget, bonus)).items()) == [found[i] for i in sorted(best)]


def test_the_first_nodes_of_any_tree_are_a_tree():
    log_probs = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    expand = lambda tokens, rows, level: log_probs[level].expand(*tokens.shape, -1)  # noqa: E731
    step = independent(log_probs)
    made = [trees.ddtree(log_probs, 12), trees.jetspec(log_probs, 12, 3), trees.dartree(log_probs, step, 12)]
    made += [trees.dartree(log_probs, step, 12, fixed=True), trees.eagle2(log_probs[0], expand, 12, 2, 3)]
    for tree in made:
        for m in range(13):
            assert list(by_path(tree.first(m))) == list(by_path(tree))[:m]


# ---------------------------------------------------------------------- a path that must be there


def test_a_forced_path_takes_the_place_of_the_worst_nodes():
    for seed in range(40):
        tree = random_tree(seed, 10)
        path = trees.chain([1, 2, 0], torch.tensor([-1.0, -1.0, -4.0]))
        for budget in (1, 3, 6, 30):
            forced = by_path(trees.force(tree, path, budget))
            whole = by_path(trees.graft(tree, path))
            assert set(by_path(path)) <= set(forced) <= set(whole)
            assert len(forced) == max(3, min(budget, len(whole)))
            left = [whole[p] for p in whole if p not in forced]
            kept = [whole[p] for p in forced if p not in by_path(path)]
            assert not left or not kept or max(left) <= min(kept)


def test_a_looped_stage_goes_on_from_the_best_full_depth_path():
    generator = torch.Generator().manual_seed(2)
    for budget in (1, 4, 9, 60):
        log_probs = (2 * torch.randn(2, 4, 5, generator=generator)).log_softmax(-1)
        batch = trees.ddtree(log_probs, budget, full_depth=True)
        for r in range(2):
            tree, best = batch.row(r), log_probs[r].argmax(-1)
            assert trees.locate(tree, best)[-1] == trees.tip(tree)
            assert len(tree.tokens) == max(budget, 4)
            plain, forced = by_path(trees.ddtree(log_probs[r], budget)), by_path(tree)
            assert set(forced) - {tuple(best[:d].tolist()) for d in range(1, 5)} <= set(plain)
        tree = trees.dartree(log_probs[0], independent(log_probs[0]), budget, 3, 4, -0.5, full_depth=True)
        assert trees.locate(tree, log_probs[0].argmax(-1))[-1] == trees.tip(tree)
        assert len(tree.tokens) == max(min(budget, 12), 4)


def test_stages_hang_on_the_tip():
    log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
    first = trees.ddtree(log_probs, 3, full_depth=True)
    both = trees.graft(first, trees.ddtree(log_probs, 2), trees.tip(first))
    found = by_path(both)
    assert list(found)[3:] == [(0, 0, 0), (0, 0, 0, 0)]
    assert found[(0, 0, 0)] == pytest.approx(found[(0, 0)] + float(log_probs[0, 0]))
    assert trees.tip(both) == 4 and trees.tip(Tree.of()) == -1


# ---------------------------------------------------------------------- sampled children


def drawer(noise, row=0):
    return lambda log_q, depth, count: noise.children(log_q, row, depth, count)


def test_sampled_trees_keep_their_shape_and_never_repeat_a_sibling():
    log_q = (2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).log_softmax(-1)
    for shape in (trees.ddtree(log_q, 15), trees.jetspec(log_q, 15, 4)):
        seen = set()
        for seed in range(10):
            tree = trees.sampled(shape, log_q, drawer(TreeNoise(seed, [0], [0])))
            assert torch.equal(tree.parents, shape.parents)
            for path, score in by_path(tree).items():
                assert score == pytest.approx(sum(float(log_q[d, t]) for d, t in enumerate(path)))
            seen.add(tuple(tree.tokens.tolist()))
        assert len(seen) == 10


def test_children_are_drawn_one_after_the_other_without_replacement():
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    counts = [Counter(), Counter()]
    for index in range(4000):
        drawn = TreeNoise(1, [0, 3], [0, index]).children(q.log() + 2.0, 1, 2, 2).tolist()
        for f in range(2):
            counts[f][tuple(drawn[f])] += 1
    for f in range(2):
        pairs = itertools.permutations(range(4), 2)
        law = {(a, b): float(q[f, a] * q[f, b] / (1 - q[f, a])) for a, b in pairs}
        assert chi_square(counts[f], law) < 3.7


def test_a_law_with_too_few_tokens_leaves_nodes_out():
    log_q = torch.tensor([[0.5, 0.5, 0.0], [0.3, 0.3, 0.4]], dtype=torch.float64).log()
    shape = trees.ddtree(torch.full((2, 3), 1 / 3, dtype=torch.float64).log(), 12)
    tree = trees.sampled(shape, log_q, drawer(TreeNoise(1, [0], [0])))
    assert {path for path in by_path(tree) if len(path) == 1} == {(0,), (1,)}
    assert all(path[0] != 2 for path in by_path(tree))


def test_dartree_draws_the_children_it_has_room_for():
    log_probs = torch.randn(3, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    laws, step = [], independent(log_probs)

    def draw(log_q, depth, count):
        laws.append(log_q)
        return TreeNoise(7, [0], [0]).children(log_q, 0, depth, count)

    tree = trees.dartree(log_probs, step, 9, candidates=5, fixed=True, draw=draw)
    shape = trees.dartree(log_probs, step, 9, candidates=5, fixed=True)
    assert len(by_path(tree)) == 9 and not torch.equal(tree.tokens, shape.tokens)
    assert len(torch.cat(laws)) == 1 + int((trees.depths(tree.parents)[1:] < 3).sum())
    for path, score in by_path(tree).items():
        candidates = [log_probs[d].topk(5).values.logsumexp(-1) for d in range(3)]
        assert score == pytest.approx(sum(float(log_probs[d, t] - candidates[d]) for d, t in enumerate(path)))
