"""Every builder of trees with every verifier, by enumeration of all outcomes: which pairs give exactly the target's
law."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from oracles import Branches, BranchNoise, ToyModel, distance, text_law

from hf_dspark.drafting import trees
from hf_dspark.verification.commit import commit
from hf_dspark.verification.tree import verify_match, verify_ratio

EXACT, V, DEPTH, LENGTH = 1e-12, 3, 3, 3


class Coin:
    """Compares with a chance as often as a uniform number would: both outcomes become branches."""

    def __init__(self, branches):
        self.branches = branches

    def __lt__(self, chance):
        chance = min(float(chance), 1.0)
        return torch.tensor([self.branches.choose([chance, 1 - chance]) == 0])


class TreeBranchNoise(BranchNoise):
    def coin(self, rows, i, device, slot=0):
        return Coin(self.branches)


def drawing(branches):
    """Children drawn one after the other without replacement, as branches."""

    def one(law, count):
        order, law = [], law.exp()
        for _ in range(count):
            left = law.clone()
            left[order] = 0.0
            order.append(
                branches.choose(left / left.sum()) if left.sum() > 0 else min(set(range(len(law))) - set(order))
            )
        return order

    return lambda log_q, depth, count: torch.tensor([one(law, count) for law in log_q])


# ---------------------------------------------------------------------- drafters: a tree and the laws of its children


def marginals(drafter):
    return torch.stack([drafter.law((-1, d)) for d in range(DEPTH)])


def causal(drafter):
    """`dartree`'s step: laws that depend on the path."""

    def step(memory, rows, tokens, depth, candidates):
        paths = [()] if tokens is None else [(*memory[r], t) for r, t in zip(rows.tolist(), tokens[0].tolist())]
        return torch.stack([drafter.law(path).log()[candidates[0]] for path in paths])[None], paths

    return step


def recursive(drafter):
    memory = [()]

    def expand(tokens, rows, level):
        nonlocal memory
        memory = [(*memory[r], t) for r, t in zip(rows.tolist(), tokens[0].tolist())]
        return torch.stack([drafter.law(path).log() for path in memory])[None]

    return drafter.law(()).log(), expand


def ddtree(drafter):
    return trees.ddtree(marginals(drafter).log(), 4)


def jetspec(drafter):
    return trees.jetspec(marginals(drafter).log(), 4, 2)


def dartree(drafter, **options):
    return trees.dartree(marginals(drafter).log(), causal(drafter), 4, 3, 2, **options)


def eagle2(drafter):
    return trees.eagle2(*recursive(drafter), 5, 2, 2)


def copy_as_branch(drafter):
    return trees.graft(trees.ddtree(marginals(drafter).log(), 3), trees.chain([1, 0, 1], torch.zeros(3)))


def looped(drafter):
    first = trees.ddtree(marginals(drafter)[:2].log(), 3, full_depth=True)
    return trees.graft(first, trees.ddtree(marginals(drafter)[2:].log(), 2), trees.tip(first))


BUILDERS = {
    "ddtree": ddtree, "jetspec": jetspec, "dartree": dartree, "dartree fixed": partial(dartree, fixed=True), "eagle2": eagle2,
    "copy": copy_as_branch, "looped": looped,
}  # fmt: skip


def sampled_marginals(drafter, branches, shape=ddtree, keep=None, resort=False):
    """Sampled children of a shape known beforehand, and their laws. `keep`, `resort`: what must not be done with
    them."""
    q = marginals(drafter)
    tree = trees.sampled(shape(drafter), q.log(), drawing(branches))
    if keep is not None:
        tree = trees.prune(tree, keep)
    if resort:
        order = sorted(
            range(len(tree.tokens)), key=lambda i: (len(trees.path_to(tree.parents, i)), -float(tree.scores[i]))
        )
        tree = trees.Tree(*(torch.tensor(x) for x in zip(*resorted(tree, order))))
    return tree, q[trees.depths(tree.parents)[1:] - 1]


def resorted(tree, order):
    place = {-1: -1, **{node: i for i, node in enumerate(order)}}
    for node in order:
        yield int(tree.tokens[node]), place[int(tree.parents[node])], float(tree.scores[node])


def sampled_dartree(drafter, branches):
    laws, draw = [], drawing(branches)

    def remember(log_q, depth, count):
        ids = marginals(drafter)[depth].log().topk(2).indices
        laws.extend(torch.zeros(V, dtype=torch.float64).index_copy(0, ids, law.exp()) for law in log_q)
        return draw(log_q, depth, count)

    tree = dartree(drafter, fixed=True, draw=remember)
    return tree, torch.stack(laws)[tree.parents + 1]


SAMPLED = {
    "ddtree": sampled_marginals, "jetspec": partial(sampled_marginals, shape=jetspec), "dartree fixed": sampled_dartree,
}  # fmt: skip


def topk_with_softmax(drafter, branches):
    tree, q = ddtree(drafter), marginals(drafter)
    return tree, q[trees.depths(tree.parents)[1:] - 1]


# ---------------------------------------------------------------------- laws


def tree_law(build, verify, target, stop=None) -> tuple[dict, float]:
    """Exact law of the next tokens when one tree is drafted and verified and the target writes the rest; and the
    expected number of accepted drafts. `build(branches)` gives a tree and q [N, V]; `verify`: "match", "ratio" or
    "ratio one-hot".
    """
    stops = frozenset() if stop is None else frozenset([stop])

    def one_round(branches):
        tree, q = build(branches)

        def scores_at(nodes, rows):
            return target.law(tuple(tree.tokens[trees.path_to(tree.parents, nodes[0])].tolist())).log()[None]

        verifier, noise = (verify_match if verify == "match" else verify_ratio), TreeBranchNoise(branches)
        q = q[None] if verify == "ratio" else None
        verdict = verifier(scores_at, tree.tokens[None], tree.parents[None], q, [len(tree.tokens)], noise)
        emitted = tree.tokens[verdict.path[0]].tolist() + verdict.next_token.tolist()
        return tuple(commit(emitted, stops, LENGTH)[0]), int(verdict.accepted[0])

    texts, expected = defaultdict(float), 0.0
    for weight, (text, accepted) in Branches().runs(one_round):
        texts[text] += weight
        expected += weight * accepted
    law = defaultdict(float)
    for text, weight in texts.items():
        for whole, p in text_law(target, LENGTH, text, stop).items():
            law[whole] += weight * p
    return dict(law), expected


def off(build, verify, target, stop=None):
    return distance(tree_law(build, verify, target, stop)[0], text_law(target, LENGTH, stop=stop))


def models(seed, drafter=(), **changes):
    return ToyModel(seed, **changes), ToyModel(seed + 100, **dict(drafter))


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("verify", ["match", "ratio one-hot"])
def test_trees_no_draw_decided_are_exact_under_both_verifiers(verify, builder):
    accepted = []
    for seed, changes in ((1, {}), (2, {}), (3, dict(zeros=0.7)), (4, dict(drafter=dict(zeros=1.0)))):
        target, drafter = models(seed, **changes)
        tree = BUILDERS[builder](drafter)
        assert off(lambda branches: (tree, None), verify, target) < EXACT  # noqa: B023
        accepted.append(tree_law(lambda branches: (tree, None), verify, target)[1])  # noqa: B023
    assert max(accepted) > 0.5


@pytest.mark.parametrize("builder", SAMPLED)
@pytest.mark.parametrize("verify", ["match", "ratio"])
def test_sampled_children_are_exact_under_both_verifiers(verify, builder):
    given = ({}, dict(zeros=0.7), dict(drafter=dict(zeros=1.0)), dict(drafter=dict(support={0, 2})))
    for seed, changes in enumerate(given):
        target, drafter = models(seed, **changes)
        assert off(partial(SAMPLED[builder], drafter), verify, target) < EXACT


@pytest.mark.parametrize("verify", ["match", "ratio one-hot"])
def test_both_judge_fixed_children_alike(verify):
    target, drafter = models(4)
    tree = ddtree(drafter)
    accepted = tree_law(lambda branches: (tree, None), verify, target)[1]
    exact = 0.0
    for node in range(len(tree.tokens)):
        tokens = tuple(tree.tokens[trees.path_to(tree.parents, node)].tolist())
        exact += float(torch.stack([target.law(tokens[:i])[token] for i, token in enumerate(tokens)]).prod())
    assert accepted == pytest.approx(exact, abs=EXACT)


class OneLaw:
    vocab = V

    def law(self, prefix):
        return torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("shape", [ddtree, jetspec])
def test_a_perfect_drafters_first_sampled_children_are_always_accepted(shape):
    parents = shape(OneLaw()).parents.tolist()
    node, first_children = -1, 0
    while node in parents:
        node, first_children = parents.index(node), first_children + 1
    assert tree_law(partial(sampled_marginals, OneLaw(), shape=shape), "ratio", OneLaw())[1] == pytest.approx(
        first_children
    )
    assert first_children == 2


def test_stop_tokens_inside_branches_keep_the_law():
    for build, verify in ((lambda b, d: (ddtree(d), None), "match"), (lambda b, d: sampled_marginals(d, b), "ratio")):
        target, drafter = models(8)
        assert off(lambda branches: build(branches, drafter), verify, target, stop=1) < EXACT  # noqa: B023


# ---------------------------------------------------------------------- what must be biased

WRONG = {
    "best children judged by the softmax they topped": topk_with_softmax,
    "sampled children cut by their own scores": partial(sampled_marginals, keep=2),
    "sampled children judged in the order of their scores": partial(sampled_marginals, resort=True),
}


@pytest.mark.parametrize("control", WRONG)
def test_known_mistakes_bias_ratios_and_leave_match_exact(control):
    target, drafter = models(1)
    build = partial(WRONG[control], drafter)
    assert off(build, "ratio", target) > 0.01
    assert off(build, "match", target) < EXACT
