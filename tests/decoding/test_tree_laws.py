"""The law of whole rounds and calls with trees of drafts: enumerated in a toy world, and sampled thousands of times."""

import functools
import itertools
import math
from collections import Counter

import pytest
import tiny
import torch
from oracles import chi_square

from hf_dspark import DSparkConfig, SpeculationConfig
from hf_dspark.drafting import tree_drafts
from hf_dspark.drafting.proposer import Context, Proposer, Sampling
from hf_dspark.drafting.tree_drafts import propose_trees
from hf_dspark.drafting.tree_parts import prune
from hf_dspark.modeling.draft_cache import DraftCache
from hf_dspark.verification import tree as verification

V, DEPTH = 3, 2
ACCEPTANCE, JUDGE = verification.acceptance, verification.judge


# ---------------------------------------------------------------------- every outcome of a round in a toy world


def law_of(seed: int, prefix: tuple = ()) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + hash(prefix) % 997)
    return (1.5 * torch.randn(V, generator=generator, dtype=torch.float64)).softmax(-1)


class Toy:
    """Drafts a block of DEPTH independent positions."""

    device, correction = torch.device("cpu"), None

    def __init__(self, seed):
        self.seed, self.config = seed, DSparkConfig(vocab_size=V, block_size=DEPTH)

    def start(self, cache, anchor, seed=None, pseudo=None, length=None):
        self.base = torch.stack([law_of(self.seed + 50, (k,)) for k in range(DEPTH)])[None].log()
        return self

    def target_ids(self, ids=None):
        return torch.arange(V) if ids is None else ids


class Forks:
    """Noise that takes the branches of `script`, then first ones; notes its weight and the branches left out."""

    empty = prefix_free = True

    def __init__(self, script, todo):
        self.script, self.todo, self.at, self.weight, self.accept = script, todo, 0, 1.0, None

    def fork(self, weights):
        if self.at == len(self.script):
            first, *others = [i for i, weight in enumerate(weights) if weight > 0]
            self.todo.extend([*self.script, other] for other in others)
            self.script = [*self.script, first]
        self.at += 1
        self.weight *= float(weights[self.script[self.at - 1]])
        return self.script[self.at - 1]

    def children(self, log_q, row, depth, count):
        """Drawn one after the other without replacement."""
        out = []
        for law in log_q.double().softmax(-1):
            drawn = []
            for _ in range(count):
                rest = law.clone()
                rest[drawn] = 0.0
                drawn.append(self.fork(rest / rest.sum()) if float(rest.sum()) else min(set(range(V)) - set(drawn)))
            out.append(drawn)
        return torch.tensor(out)

    def sample(self, scores, rows, i, domain="target"):
        return torch.tensor([self.fork(scores[0].softmax(-1))])

    def sample_mass(self, mass, rows, i, domain):
        return torch.tensor([self.fork(mass[0] / mass.sum())])

    def coin(self, rows, i, device, slot=0):
        accept = min(float(self.accept), 1.0)
        return torch.tensor([float(self.fork([accept, 1 - accept]))], dtype=torch.float64)


class Late:
    """A coin that is thrown when it is compared."""

    def __init__(self, coin, slot):
        self.coin, self.slot = coin, slot

    def __lt__(self, chance):
        return self.coin(self.slot) < chance


def bias(seed, kind, budget, monkeypatch, cut=None) -> float:
    """Largest error of the probability of the next DEPTH + 1 tokens, after one real proposal and verification."""
    todo, law, forks = [[]], {}, []

    def noted(p, q, x):
        forks[-1].accept = ACCEPTANCE(p, q, x)[
            0
        ]  # known before the coin is thrown, which then lies on either side of 0.5
        return torch.full((len(p),), 0.5, dtype=p.dtype)

    monkeypatch.setattr(verification, "acceptance", noted)
    monkeypatch.setattr(
        verification, "judge", lambda p, q, x, real, coin: JUDGE(p, q, x, real, lambda slot: Late(coin, slot))
    )
    while todo:
        noise = Forks(todo.pop(), todo)
        forks.append(noise)
        proposer = Proposer(Toy(seed), SpeculationConfig(tree=kind), torch.zeros(1), DraftCache(0, torch.zeros(1)))
        sampling = Sampling([0], [0], noise, noise, frozenset())
        ids = torch.zeros(1, 9, dtype=torch.long)
        draft = propose_trees(proposer, Context([0], ids[:, 0], ids, [1], [DEPTH], [sampling]), kind, budget, cut)
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()

        def way(node, tokens=tokens, parents=parents):
            return () if node < 0 else (*way(parents[node], tokens, parents), tokens[node])

        def scores_at(nodes, rows, way=way):
            return torch.stack([law_of(seed, way(node)) for node in nodes]).log()

        verdict = verification.verify_ratio(
            scores_at, draft.tokens, draft.parents, draft.q.double(), draft.lengths, noise
        )
        text = *(tokens[n] for n in verdict.path[0].tolist() if n >= 0), int(verdict.next_token[0])
        law[text] = law.get(text, 0.0) + noise.weight
    assert math.isclose(sum(law.values()), 1.0, abs_tol=1e-9)
    worst = 0.0
    for whole in itertools.product(range(V), repeat=DEPTH + 1):
        true = math.prod(float(law_of(seed, whole[:k])[t]) for k, t in enumerate(whole))
        ours = 0.0
        for n in range(1, DEPTH + 2):
            rest = math.prod(float(law_of(seed, whole[:k])[whole[k]]) for k in range(n, DEPTH + 1))
            ours += law.get(whole[:n], 0.0) * rest
        worst = max(worst, abs(ours - true))
    return worst


@pytest.mark.parametrize("kind, budget", [("ddtree", 1), ("ddtree", 3), ("ddtree", 4), ("jetspec", 4)])
def test_a_round_with_drawn_children_gives_the_targets_law(kind, budget, monkeypatch):
    assert max(bias(seed, kind, budget, monkeypatch) for seed in range(2)) < 1e-6


def test_sizes_that_look_at_the_shape_alone_change_no_law(monkeypatch):
    size = lambda trees: max(1, int(trees[0].scores.exp().sum() * 2))  # noqa: E731
    assert bias(0, "ddtree", 4, monkeypatch, size) < 1e-6


def test_trees_cut_by_what_was_drawn_are_biased(monkeypatch):
    drawn = tree_drafts.sampled
    monkeypatch.setattr(tree_drafts, "sampled", lambda tree, *args: prune(drawn(tree, *args), 2))
    assert max(bias(seed, "ddtree", 4, monkeypatch) for seed in range(4)) > 1e-3


# ---------------------------------------------------------------------- whole calls


W, PROMPT, NEW, LIMIT = 5, [1, 3, 2, 4], 4, 3.72  # a normal score beyond LIMIT has probability 1e-4


@functools.cache
def target():
    return tiny.make_target(vocab_size=W, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, seed=5, **tiny.GQA)


@functools.cache
def drafter():
    return tiny.make_drafter(target(), target_layer_ids=[0, -1], num_hidden_layers=1, block_size=3, seed=3)


@functools.cache
def law():
    """Exact law of the next NEW tokens."""
    whole = {(): 1.0}
    for n in range(NEW):
        with torch.no_grad():
            ids = torch.tensor([[*PROMPT, *text] for text in whole])
            laws = target()(ids).logits[:, -1].softmax(-1).tolist()
        whole = {(*text, x): w * p for (text, w), row in zip(whole.items(), laws) for x, p in enumerate(row)}
        assert len(whole) == W ** (n + 1)
    return whole


def score(rows, **knobs):
    out = target().generate(
        torch.tensor([PROMPT] * rows), assistant_model=drafter(), do_sample=True, max_new_tokens=NEW, top_k=0,
        eos_token_id=None, speculation=SpeculationConfig(seed=3, **knobs),
    )  # fmt: skip
    assert 0.05 < drafter().last_speculation.acceptance_rate < 0.95
    return chi_square(Counter(map(tuple, out[:, len(PROMPT) :].tolist())), law())


@pytest.mark.parametrize("verification", ["ratio", "match"])
@pytest.mark.parametrize("tree", ["ddtree", "jetspec", "dartree"])
def test_samples_follow_the_targets_law(tree, verification):
    assert abs(score(1500, tree=tree, tree_budget=5, verification=verification)) < LIMIT


def test_the_test_sees_a_wrong_residual(monkeypatch):
    monkeypatch.setattr(verification, "residual", lambda p, q, tokens: p)
    assert score(1500, tree="ddtree", tree_budget=5, verification="ratio") > LIMIT
