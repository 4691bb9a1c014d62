"""Slow, obvious versions of what must be exact: laws by enumerating every outcome, and a chi-square test."""

import math
import random
from collections import defaultdict

import torch

from hf_dspark.verification import chain
from hf_dspark.verification.commit import commit


class Branches:
    """Runs a function once for every way its random choices can fall out.

    `choose(probabilities)` inside the function picks an index; `runs(f)` yields (probability, f's result) of every
    outcome.
    """

    def runs(self, f):
        self.script: list[int] = []
        while True:
            self.taken, self.widths, self.weight = 0, [], 1.0
            result = f(self)
            yield self.weight, result
            script = self.script[: self.taken]
            while script and script[-1] + 1 >= self.widths[len(script) - 1]:
                script.pop()
            if not script:
                return
            script[-1] += 1
            self.script = script

    def choose(self, probabilities) -> int:
        options = [(i, p) for i, p in enumerate(map(float, probabilities)) if p > 0]
        if self.taken == len(self.script):
            self.script.append(0)
        index, p = options[self.script[self.taken]]
        self.widths.append(len(options))
        self.taken += 1
        self.weight *= p
        return index


class BranchNoise:
    """Stands for `Noise` of one row: draws and coins become branches. `thresholds[i]` is what coin i is compared
    with."""

    def __init__(self, branches: Branches, thresholds=()):
        self.branches, self.thresholds = branches, thresholds

    def sample(self, scores, rows, i, domain="target"):
        return torch.tensor([self.branches.choose(scores[0].softmax(-1))])

    def sample_mass(self, mass, rows, i, domain):
        assert (mass >= 0).all() and mass.sum() > 0
        return torch.tensor([self.branches.choose(mass[0] / mass[0].sum())])

    def coin(self, rows, i, device):
        """A coin on one side of its threshold or the other, as often as a uniform number is."""
        t = min(float(self.thresholds[i]), 1.0)
        passes = self.branches.choose([t, 1 - t]) == 0
        return torch.tensor([t / 2 if passes else (t + 1) / 2], dtype=torch.float64)


class ToyModel:
    """Random next-token laws: `law(prefix)` [V] for every prefix; some tokens impossible if `zeros`."""

    def __init__(self, seed: int, vocab=3, zeros=0.0, support=None):
        self.random, self.vocab, self.zeros, self.support, self.laws = random.Random(seed), vocab, zeros, support, {}

    def law(self, prefix: tuple) -> torch.Tensor:
        if prefix not in self.laws:
            weights = [self.random.randint(1, 9) for _ in range(self.vocab)]
            if self.zeros and self.random.random() < self.zeros:
                weights[self.random.randrange(self.vocab)] = 0
            if self.support is not None:
                weights = [w if t in self.support else 0 for t, w in enumerate(weights)]
            self.laws[prefix] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        return self.laws[prefix]


def text_law(model: ToyModel, length: int, start=(), stop=None) -> dict:
    """Exact law of the next tokens up to `length` in all, ended early by the token `stop`."""
    law, open_ = {}, {tuple(start): 1.0}
    while open_:
        following = defaultdict(float)
        for text, weight in open_.items():
            if len(text) >= length or (stop is not None and stop in text):
                law[text] = law.get(text, 0.0) + weight
                continue
            for token, p in enumerate(model.law(text).tolist()):
                if p:
                    following[(*text, token)] += weight * p
        open_ = following
    return law


def judge(branches, verify, target: ToyModel, tokens: list[int], qs, lengths=None):
    """One verdict of `verify` on the drafts `tokens` [L] drawn from `qs` ([L, V], or None for one-hot): the emitted
    tokens."""
    L, V = len(tokens), target.vocab
    p = torch.stack([target.law(tuple(tokens[:i])) for i in range(L + 1)])
    drafts, asked = torch.tensor([tokens], dtype=torch.long).view(1, L), []

    def scores_at(i, rows):
        assert rows == [0] and asked == list(range(i)), "once per position, in order"
        asked.append(i)
        return p[i : i + 1].log()

    q = None if qs is None else torch.stack(qs).view(1, L, V) if L else torch.zeros(1, 0, V, dtype=torch.float64)
    if verify is chain.verify_match:
        verdict = verify(scores_at, drafts, None, [L], BranchNoise(branches))
    else:
        thresholds = []
        if verify is chain.verify_ratio:
            thresholds = [
                float(chain.acceptance(p[i : i + 1], None if qs is None else qs[i][None], drafts[:, i]))
                for i in range(L)
            ]
        elif L:
            hot = torch.nn.functional.one_hot(drafts[0], V).double()
            thresholds = chain.block_survival(p, hot if qs is None else torch.stack(qs), drafts[0])[1].tolist()
        verdict = verify(scores_at, drafts, q, [L], BranchNoise(branches, thresholds))
    a = int(verdict.accepted[0])
    return tokens[:a] + [int(verdict.next_token[0])], a


def round_law(verify, target, drafter, rule, length=3, one_hot=False, stop=None, wrong_q=None) -> tuple[dict, float]:
    """Exact law of the next `length` tokens when one round is drafted and verified and the target writes the rest; and
    the expected number of accepted drafts.

    `rule(tokens, laws) -> bool | None` is asked before (`tokens` lacks draft i) and after (it has it) each draft
    whether to go
    on: False before ends the draft without it, False after with it, "drop" after withdraws it. `one_hot`: argmax
    drafts. `wrong_q`: what to tell the verifier instead of the truth.
    """

    def one_round(branches):
        tokens, laws = [], []
        while True:
            if rule(tokens, laws, False) is False:
                break
            q = drafter.law(tuple(tokens))
            token = int(q.argmax()) if one_hot else branches.choose(q)
            tokens, laws = [*tokens, token], [*laws, q]
            if token == stop:
                break
            after = rule(tokens, laws, True)
            if after == "drop":
                tokens, laws = tokens[:-1], laws[:-1]
            if after is not True:
                break
        told = None if one_hot and wrong_q is None else laws
        emitted, accepted = judge(branches, verify, target, tokens, told)
        kept, _ = commit(emitted, frozenset() if stop is None else frozenset([stop]), length)
        return tuple(kept), accepted

    law, expected = defaultdict(float), 0.0
    for weight, (text, accepted) in Branches().runs(one_round):
        expected += weight * accepted
        for whole, p in text_law(target, length, text, stop).items():
            law[whole] += weight * p
    return dict(law), expected


def distance(a: dict, b: dict) -> float:
    """Total variation."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2


def chi_square(counts: dict, law: dict) -> float:
    """How far `counts` are from `law`, as a standard normal score (Wilson and Hilferty); cells expected below 5 are
    merged."""
    total = sum(counts.values())
    assert all(law.get(k, 0.0) > 0 for k in counts), "an impossible outcome"
    cells, rest = [], [0.0, 0.0]
    for outcome, p in law.items():
        if p * total >= 5:
            cells.append((counts.get(outcome, 0), p * total))
        else:
            rest = [rest[0] + counts.get(outcome, 0), rest[1] + p * total]
    if rest[1] > 0:
        cells.append(tuple(rest))
    statistic, k = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
