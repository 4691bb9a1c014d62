"""Draft trees: the recorded ones of the references, and each builder against a slow twin that looks at every prefix."""

import itertools
import math
import random

import golden
import pytest
import torch
from golden import expected_of, load_fixture, load_tensors
from tiny import make_drafter, make_eagle3, make_target

from hf_dspark.drafting import trees
from hf_dspark.drafting.trees import Tree
from hf_dspark.verification.tree import match_all, verify_match

DDTREE = ["tree-ddtree-b4", "tree-ddtree-b16", "tree-ddtree-b64", "tree-ddtree-ties"]
JETSPEC = ["tree-jetspec-w4", "tree-jetspec-w7"]


def recorded(names):
    return [(name, i) for name in names for i in range(len(expected_of(name)["cases"]))]


def build(name, case, log_probs) -> Tree:
    if "ddtree" in name:
        return trees.ddtree(log_probs, case["budget"])
    return trees.jetspec(log_probs, case["budget"] - 1, case["width"])  # the anchor is counted there


def close(a, b, atol=1e-5):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize(("name", "i"), recorded([*DDTREE, *JETSPEC]))
def test_trees_of_the_references_come_out_node_by_node(name, i):
    case, tensors = expected_of(name)["cases"][i], load_tensors(name)
    tree = build(name, case, tensors[f"c{i}.draft_logits"].log_softmax(-1))
    assert (tree.parents + 1).tolist() == case["parents"][1:]
    if case.get("ties") != "row":  # which of equal logits comes first is up to the library's topk
        assert tree.tokens.tolist() == case["tokens"][1:]
    close(tree.scores, case["scores"][1:])
    assert trees.depths(tree.parents).tolist() == case["depths"]
    assert torch.equal(trees.ancestors(tree.parents), tensors[f"c{i}.mask"].bool())
    if "position_ids" in case:
        assert (case["root_position"] + trees.depths(tree.parents)).tolist() == case["position_ids"]


@pytest.mark.parametrize(("name", "i"), recorded([*DDTREE, *JETSPEC]))
def test_walks_of_the_references_come_out(name, i):
    case, tensors = expected_of(name)["cases"][i], load_tensors(name)
    tokens, parents = torch.tensor([case["tokens"][1:]]), torch.tensor([case["parents"][1:]]) - 1
    if "walks" in case:
        walks = [(w["target_choice"], w["accepted_nodes"], w["next_token"]) for w in case["walks"]]
        vocab = tensors[f"c{i}.draft_logits"].shape[-1]
        walks = [(torch.nn.functional.one_hot(torch.tensor(choice), vocab), *rest) for choice, *rest in walks]
    else:
        accept = case["accept"]
        walks = [(tensors[f"c{i}.target_logits"], accept["accepted"], accept["next_token"])]
    for scores, path, token in walks:
        sizes = [tokens.shape[1]]
        lazy = verify_match(lambda nodes, rows: scores[[n + 1 for n in nodes]], tokens, parents, None, sizes, None)  # noqa: B023
        for verdict in (lazy, match_all(scores[None], tokens, parents, None, torch.tensor(sizes), None)):
            assert [0, *(node + 1 for node in verdict.path[0].tolist() if node >= 0)] == path
            assert verdict.next_token.tolist() == [token]


# ---------------------------------------------------------------------- EAGLE-2's tree, as data and in a whole run

EAGLE = "safeailab-eagle3-llama"


def eagle_cases():
    expected = expected_of(EAGLE)
    return [c for c in expected["cases"] if c["mode"] == "tree"], expected["tree"]


def same_tree(tree, drafter, recorded_round):
    assert drafter.target_ids(tree.tokens).tolist() == recorded_round["tokens"][1:]
    assert (tree.parents + 1).tolist() == recorded_round["parents"][1:]
    assert trees.depths(tree.parents).tolist() == recorded_round["depths"]
    leaves = [[0, *(node + 1 for node in path)] for path in trees.paths(tree.parents)]
    assert sorted(leaves) == sorted([n for n in path if n >= 0] for path in recorded_round["retrieve_indices"])


def test_eagle2_makes_the_recorded_trees_of_recorded_logits():
    cases, rule = eagle_cases()
    drafter, tensors, seen = load_fixture(EAGLE).drafter, load_tensors(EAGLE), 0
    for p, case in enumerate(cases):
        for k, reference in enumerate(case["rounds"]):
            key = f"tree.p{p}.r{k}"
            if f"{key}.step0_logits" not in tensors:
                continue
            steps = tensors[f"{key}.step_logits"].log_softmax(-1)
            tree = trees.eagle2(
                tensors[f"{key}.step0_logits"][0].log_softmax(-1), lambda tokens, rows, level: steps[None, level - 1],  # noqa: B023
                rule["total_token"] - 1, rule["depth"], rule["top_k"],
            )  # fmt: skip
            same_tree(tree, drafter, reference)
            assert torch.equal(trees.ancestors(tree.parents), tensors[f"{key}.mask"].bool())
            seen += 1
    assert seen >= 4


@torch.no_grad()
@pytest.mark.parametrize("p", range(4))
def test_a_whole_run_of_eagle2_trees_is_the_recorded_one(p):
    cases, rule = eagle_cases()
    (target, drafter, _, _), case = load_fixture(EAGLE), cases[p]
    ids, lengths = [*case["prompt"], case["rounds"][0]["root"]], []
    for reference in case["rounds"]:
        features = golden.target_features(target, ids[:-1], drafter.config.target_layer_ids)
        cache, n = drafter.new_cache(torch.zeros(1, dtype=torch.long)), len(ids) - 1
        seed = drafter.extend(cache, features, torch.tensor([ids[1:]]), torch.ones(1, n, dtype=torch.bool))
        state = drafter.start(cache, torch.tensor(ids[-1:]), seed)
        first, expand = trees.recursive_expand(drafter, cache, state, torch.tensor(ids[-1:]))
        tree = trees.eagle2(first, expand, rule["total_token"] - 1, rule["depth"], rule["top_k"]).row(0)
        same_tree(tree, drafter, reference)
        tokens, seen = drafter.target_ids(tree.tokens), trees.ancestors(tree.parents)

        def scores_at(nodes, rows):
            path = seen[nodes[0] + 1, 1:].nonzero()[:, 0]  # noqa: B023
            return target(torch.tensor([ids + tokens[path].tolist()])).logits[:, -1]  # noqa: B023

        verdict = verify_match(scores_at, tokens[None], tree.parents[None], None, [len(tokens)], None)
        assert [0, *(node + 1 for node in verdict.path[0].tolist())] == reference["accepted_path"]
        assert verdict.next_token.tolist() == [reference["next_token"]]
        ids += tokens[verdict.path[0].tolist()].tolist() + verdict.next_token.tolist()
        lengths.append(int(verdict.accepted[0]) + 1)
    assert lengths == case["acceptance_lengths"]
    assert ids[:-1] == case["output_ids"]  # the reference's text ends with the drafts


# ---------------------------------------------------------------------- slow twins


def nodes_of(tree: Tree):
    """Paths as tuples of tokens, in the tree's order, with their scores; checks that parents come first."""
    found = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        assert -1 <= parent < len(found)
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return found


def random_rows(generator, k, vocab, ties):
    if ties:  # few different values, sums without rounding
        return -torch.randint(0, 4, (k, vocab), generator=generator).double() / 4
    return (2 * torch.randn(k, vocab, generator=generator, dtype=torch.float64)).log_softmax(-1)


def all_prefixes(values, ids):
    """(score, ranks, tokens) of every prefix of `ids` [k, C]."""
    k, C = len(ids), len(ids[0])
    for depth in range(1, k + 1):
        for ranks in itertools.product(range(C), repeat=depth):
            score = 0.0
            for d, r in enumerate(ranks):
                score += values[d][r]
            yield score, ranks, tuple(ids[d][r] for d, r in enumerate(ranks))


@pytest.mark.parametrize("ties", [False, True])
def test_ddtree_is_the_best_of_all_prefixes(ties):
    generator = torch.Generator().manual_seed(1)
    for budget in (1, 2, 3, 5, 8, 13, 30, 200):
        for k, vocab in ((1, 5), (2, 7), (3, 4), (4, 3)):
            log_probs = random_rows(generator, k, vocab, ties)
            tree = trees.ddtree(log_probs, budget)
            top = log_probs.topk(min(budget, vocab), -1)
            best = sorted((-s, ranks, tokens) for s, ranks, tokens in all_prefixes(*(x.tolist() for x in top)))[:budget]
            assert nodes_of(tree) == [tokens for _, _, tokens in best]
            assert tree.scores.tolist() == [-s for s, _, _ in best]
            whole = log_probs.tolist(), [list(range(vocab))] * k
            assert sorted(tree.scores.tolist()) == sorted(sorted(s for s, _, _ in all_prefixes(*whole))[-budget:])
            for m in range(budget):
                assert (
                    nodes_of(trees.ddtree(log_probs, m)) == nodes_of(tree)[:m] or ties
                )  # topk of fewer may order equals anew


def slow_jetspec(log_probs, budget, width):
    k, open_, made = len(log_probs), [(0.0, -1, ())], []
    while open_ and len(made) < budget:
        best = max(open_, key=lambda node: (node[0], -node[1]))
        open_.remove(best)
        score, _, path = best
        if len(path) == k:
            continue
        values, ids = log_probs[len(path)].topk(min(width, budget, log_probs.shape[1]))
        for value, token in zip(values.tolist(), ids.tolist()):
            if len(made) < budget:
                open_.append((score + value, len(made), (*path, token)))
                made.append((score + value, (*path, token)))
    return made


@pytest.mark.parametrize("ties", [False, True])
def test_jetspec_adds_all_children_of_the_best_open_node(ties):
    generator = torch.Generator().manual_seed(2)
    for budget, width in itertools.product((1, 2, 5, 12, 100), (1, 2, 3, 9)):
        for k, vocab in ((1, 5), (3, 4), (4, 3)):
            log_probs = random_rows(generator, k, vocab, ties)
            tree = trees.jetspec(log_probs, budget, width)
            slow = slow_jetspec(log_probs, budget, width)
            assert nodes_of(tree) == [path for _, path in slow]
            assert tree.scores.tolist() == [score for score, _ in slow]


class Causal:
    """A toy causal drafter: logits [vocab] for every path, drawn on demand; with ties few values."""

    def __init__(self, seed, vocab, ties):
        self.random, self.vocab, self.ties, self.laws = random.Random(seed), vocab, ties, {}

    def logits(self, path):
        if path not in self.laws:
            draw = [self.random.randint(0, 2) if self.ties else self.random.gauss(0, 2) for _ in range(self.vocab)]
            self.laws[path] = torch.tensor(draw, dtype=torch.float64)
        return self.laws[path]

    def step(self, memory, rows, tokens, depth, candidates):
        """`dartree`'s step for B rows with one law; the memory is the paths."""
        B = len(candidates)
        parents = [()] * B if tokens is None else [memory[r] for r in rows.tolist()]
        paths = parents if tokens is None else [(*p, t) for p, t in zip(parents, tokens.flatten().tolist())]
        logits = torch.stack([self.logits(path) for path in paths]).unflatten(0, (B, -1))
        return logits.gather(2, candidates[:, None].expand(-1, logits.shape[1], -1)), paths

    def expand(self):
        memory = None

        def expand(tokens, rows, level):
            nonlocal memory
            above = [()] * len(rows) if memory is None else [memory[r] for r in rows.tolist()]
            memory = [(*p, t) for p, t in zip(above, tokens.flatten().tolist())]
            return torch.stack([self.logits(path).log_softmax(-1) for path in memory]).unflatten(0, tokens.shape)

        return expand


def slow_levels(children, k, wide):
    """Level by level: `children(path)` gives (log-probability, token) in order; `wide(d, made)` how many of a level
    stay."""
    levels, frontier = [], [(0.0, ())]
    for d in range(k):
        made = [(score + value, (*path, token)) for score, path in frontier for value, token in children(path)]
        frontier = sorted(made, key=lambda node: -node[0])[: wide(d, sum(map(len, levels)))]
        levels.append(frontier)
    return [node for level in levels for node in level]


def slow_best(nodes, budget, bonus):
    keys = [score + bonus * len(path) for score, path in nodes]
    best = sorted(range(len(nodes)), key=lambda i: -keys[i])[:budget]
    return [nodes[i] for i in sorted(best)]


def slow_dartree(causal, base, budget, width, candidates, bonus, fixed, prefix):
    def children(path):
        values, ids = base[len(path)].topk(min(candidates, base.shape[1]))
        logits = values if len(path) < prefix else causal.logits(path)[ids]
        log_q = logits.log_softmax(-1)
        order = sorted(range(len(ids)), key=lambda c: -float(log_q[c]))
        return [(float(log_q[c]), int(ids[c])) for c in order]

    k = len(base)
    if not fixed:
        return slow_best(slow_levels(children, k, lambda d, made: width), budget, bonus)
    return slow_levels(children, k, lambda d, made: math.ceil((budget - made) / (k - d)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_dartree_keeps_the_best_of_each_level_and_then_of_all(fixed, ties):
    generator = torch.Generator().manual_seed(3)
    for seed, (budget, width, candidates) in enumerate(itertools.product((1, 3, 7, 20), (1, 3, 6), (2, 5))):
        causal, prefix, bonus = Causal(seed, 5, ties), seed % 3, (-0.25, 0.0)[seed % 2]
        base = random_rows(generator, 3, 5, False)
        tree = trees.dartree(base, causal.step, budget, width, candidates, bonus, fixed, prefix)
        slow = slow_dartree(causal, base, budget, width, candidates, bonus, fixed, prefix)
        assert nodes_of(tree) == [path for _, path in slow]
        close(tree.scores, [score for score, _ in slow], 1e-12)


def test_dartree_without_limits_holds_every_prefix():
    causal = Causal(1, 3, False)
    tree = trees.dartree(torch.zeros(3, 3, dtype=torch.float64), causal.step, 100, 100, 100, 0.0)
    assert set(nodes_of(tree)) == {p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)}
    for path, score in zip(nodes_of(tree), tree.scores.tolist()):
        exact = sum(float(causal.logits(path[:d]).log_softmax(-1)[t]) for d, t in enumerate(path))
        assert abs(score - exact) < 1e-12


@pytest.mark.parametrize("ties", [False, True])
def test_eagle2_keeps_the_best_of_all_nodes_it_ever_made(ties):
    for seed, (budget, width, depth) in enumerate(itertools.product((1, 4, 9, 40), (1, 2, 4), (0, 1, 3))):
        causal = Causal(seed, 4, ties)
        tree = trees.eagle2(causal.logits(()).log_softmax(-1), causal.expand(), budget, depth, width)
        made, frontier = [], [(0.0, ())]
        for _ in range(depth + 1):
            level = []
            for score, path in frontier:
                values, ids = causal.logits(path).log_softmax(-1).topk(min(width, 4))
                level += [(score + v, (*path, t)) for v, t in zip(values.tolist(), ids.tolist())]
            frontier = sorted(level, key=lambda node: -node[0])[:width]
            made += level
        slow = slow_best(made, budget, 0.0)
        assert nodes_of(tree) == [path for _, path in slow]
        close(tree.scores, [score for score, _ in slow], 1e-12)


# ---------------------------------------------------------------------- several rows, edges


def rows_equal(batch: Tree, alone: list[Tree]):
    assert batch.lengths == [len(tree.tokens) for tree in alone]
    for r, tree in enumerate(alone):
        assert all(torch.equal(a, b) for a, b in zip(batch.row(r), tree))
    real = torch.arange(batch.tokens.shape[1]) < torch.tensor(batch.lengths)[:, None]
    assert (
        batch.tokens[~real].eq(0).all()
        and batch.parents[~real].eq(-1).all()
        and batch.scores[~real].eq(-torch.inf).all()
    )


def test_several_rows_are_built_as_each_alone():
    generator = torch.Generator().manual_seed(4)
    log_probs = torch.stack([random_rows(generator, 3, 4, False) for _ in range(5)])
    log_probs[1, :, 1:] = -torch.inf  # one prefix per depth: a short row
    rows_equal(trees.ddtree(log_probs, 9), [trees.ddtree(x, 9) for x in log_probs])
    rows_equal(trees.jetspec(log_probs, 9, 2), [trees.jetspec(x, 9, 2) for x in log_probs])
    assert trees.ddtree(log_probs, 9).lengths == [9, 3, 9, 9, 9]
    causal, finite = Causal(1, 4, False), log_probs[[0, 2, 3]]
    for fixed in (False, True):
        alone = [trees.dartree(x, causal.step, 7, 3, 3, fixed=fixed) for x in finite]
        rows_equal(trees.dartree(finite, causal.step, 7, 3, 3, fixed=fixed), alone)
    first = torch.stack([Causal(0, 4, False).logits(()).log_softmax(-1), causal.logits(()).log_softmax(-1)])
    rows_equal(
        trees.eagle2(first, causal.expand(), 6, 2, 2), [trees.eagle2(x, causal.expand(), 6, 2, 2) for x in first]
    )


@pytest.mark.parametrize("fixed", [False, True])
def test_tokens_that_cannot_be_are_never_drafted(fixed):
    log_probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 2, dtype=torch.float64).log()
    possible = {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    assert set(nodes_of(trees.ddtree(log_probs, 50))) == possible
    assert set(nodes_of(trees.jetspec(log_probs, 50, 4))) == possible
    step = lambda memory, rows, tokens, depth, candidates: (  # noqa: E731
        log_probs[depth, candidates][:, None].expand(-1, 1 if tokens is None else tokens.shape[1], -1), None,
    )  # fmt: skip
    assert set(nodes_of(trees.dartree(log_probs, step, 50, 50, fixed=fixed))) == possible
    expand = lambda tokens, rows, level: log_probs[level].expand(*tokens.shape, -1)  # noqa: E731
    assert set(nodes_of(trees.eagle2(log_probs[0], expand, 50, 1, 4))) == possible


def test_a_budget_of_nothing_and_a_block_of_nothing_give_no_nodes():
    for shape in ((2, 5), (0, 5), (3, 2, 5)):
        log_probs, causal = torch.zeros(shape), Causal(0, 5, False)
        made = [trees.ddtree(log_probs, 0), trees.jetspec(log_probs, 0, 2), trees.dartree(log_probs, causal.step, 0)]
        made += [trees.dartree(log_probs, causal.step, 0, fixed=True)]
        for tree in made:
            assert tree.tokens.shape == (*shape[:-2], 0)
            assert trees.ancestors(tree.parents).shape == (*shape[:-2], 1, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: trees.ddtree(x[0], 3), "one row is"),
        (lambda x: trees.ddtree(x, -1), "budget"),
        (lambda x: trees.jetspec(x, 3, 0), "widths"),
        (lambda x: trees.eagle2(x[None], None, 3), "first_log_probs"),
        (lambda x: trees.dartree(x, None, 3, draw=len), "fixed=True"),
        (lambda x: trees.dartree(x, Causal(0, 5, False).step, 3, depth_bonus=0.1), "depth_bonus"),
    ],
)
def test_what_makes_no_tree_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(2, 5))


# ---------------------------------------------------------------------- our drafters' steps

DOMINO = dict(gru_hidden_size=7, correction_size=5, pure_draft_prefix_len=1, confidence_head=False)
HEADS = {
    "none": dict(confidence_head=False), "markov": {}, "gated": {}, "rnn": {}, "domino": DOMINO,
    "rnn unshifted": dict(sample_from_anchor=False), "domino unshifted": dict(**DOMINO, sample_from_anchor=False),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_dartree_scores_paths_as_the_drafter_would_step_them(head):
    target = make_target()
    drafter = make_drafter(target, **{"correction_head": head.split()[0], **HEADS[head]})
    cache = drafter.new_cache(torch.zeros(2, dtype=torch.long))
    generator = torch.Generator().manual_seed(1)
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    features = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
    ids = torch.randint(3, 50, (2, 5), generator=generator)
    drafter.extend(cache, features, ids, torch.ones(2, 5, dtype=torch.bool))
    anchor = ids[:, -1]
    state = drafter.start(cache, anchor)
    batch = trees.dartree(state.base, trees.head_step(drafter, state, anchor), 14, 4, 10)
    for r in range(2):
        tree, one = batch.row(r), torch.tensor([r])
        assert len(set(trees.depths(tree.parents).tolist())) > 2
        for node, path in enumerate(nodes_of(tree)):
            walk, prev, score = state.select(one), anchor[one], 0.0
            for d, token in enumerate(path):
                logits, _, walk = drafter.step(cache, walk, prev)
                candidates = state.base[r, d].topk(10).indices
                assert token in candidates
                score += float(logits[0, token] - logits[0, candidates].logsumexp(-1))
                prev = drafter.target_ids(torch.tensor([token]))
            close(float(tree.scores[node]), score, 1e-5)


@torch.no_grad()
def test_eagle2_scores_paths_as_the_drafter_would_step_them():
    target = make_target()
    drafter = make_eagle3(target)
    generator = torch.Generator().manual_seed(1)
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    features = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
    ids = torch.randint(3, 50, (2, 5), generator=generator)
    cache = drafter.new_cache(torch.zeros(2, dtype=torch.long))
    seed = drafter.extend(cache, features, ids, torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    anchor, mark = torch.stack([ids[0, 4], ids[1, 2]]), cache.mark()
    first, expand = trees.recursive_expand(drafter, cache, drafter.start(cache, anchor, seed), anchor)
    batch = trees.eagle2(first, expand, 12, 3, 2)
    assert torch.equal(cache.mark(), mark)
    for r in range(2):
        tree, one = batch.row(r), torch.tensor([r])
        assert max(trees.depths(tree.parents).tolist()) > 2
        for node, path in enumerate(nodes_of(tree)):
            own, score, prev = cache.select(one), 0.0, anchor[one]
            walk = drafter.start(own, prev, seed[one])
            for token in path:
                logits, _, walk = drafter.step(own, walk, prev)
                score += float(logits.log_softmax(-1)[0, token])
                prev = drafter.target_ids(torch.tensor([token]))
            close(float(tree.scores[node]), score, 1e-5)
