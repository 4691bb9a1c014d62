"""The exact law of rounds that copy, draft or do both: every draft and every coin of a toy world, through the real
policy."""

import itertools
import random
from collections import defaultdict

import pytest
import torch
from oracles import Branches, ToyModel, distance, judge, text_law

from hf_dspark.drafting.copies import with_copies
from hf_dspark.drafting.copying import Copy
from hf_dspark.drafting.draft import Draft
from hf_dspark.scheduling.cost import CostTable
from hf_dspark.scheduling.policy import Policy
from hf_dspark.verification import chain

V, BLOCK, LENGTH = 2, 2, 3
VERIFIERS = {"ratio": chain.verify_ratio, "block": chain.verify_block, "match": chain.verify_match}


class World:
    """Rows with a target, a drafter and a copy each, and a policy that has seen random rounds and costs.

    Args:
        scheduled: whether the policy also says how much of a draft is verified, from confidences that swing with the
            drafts.
    """

    def __init__(self, seed, rows=2, scheduled=True):
        self.rng, self.scheduled = random.Random(seed), scheduled
        self.targets = [ToyModel(100 * seed + r, V) for r in range(rows)]
        self.drafters = [ToyModel(100 * seed + 50 + r, V) for r in range(rows)]
        self.sure = [ToyModel(100 * seed + 70 + r, V) for r in range(rows)]
        self.copies = [(Copy([self.rng.randrange(V) for _ in range(n)], self.rng.randint(1, 9)), "copy")
                       for n in self.rng.choices([0, 1, 2, 3], [1, 2, 2, 2], k=rows)]  # fmt: skip
        self.copies = [(copy if copy.tokens else Copy([], 0), source) for copy, source in self.copies]
        step, first = self.rng.choice([0.02, 0.2]), self.rng.choice([0.0, 0.2])
        times = tuple(1 + first * (w > 1) + step * (w - 1) for w in (1, 2, 3, 4))
        self.table = CostTable((1,), (0,), (1, 2, 3, 4), ((times,),), ((self.rng.choice([0.02, 0.3]),),))
        self.hits = [[self.rng.randint(0, 3), 3] for _ in range(8)], [self.rng.randint(0, BLOCK) for _ in range(12)]
        self.decided: dict = {}

    def policy(self) -> Policy:
        policy = Policy(BLOCK, 1, self.table)
        policy.begin(len(self.targets), 0.0)
        policy.cost.record_verify(self.table.verify_seconds(2, 2), 2, 2)
        policy.PLAIN_STEPS = policy.throttle.PLAIN_STEPS = 0
        for a, n in self.hits[0]:
            policy.copying["copy"].observe(self.copies[0][0].match or 1, n, a)
        for a in self.hits[1]:
            policy.throttle.history.observe([a], [BLOCK])
        return policy

    def decide(self, tokens):
        """The round's draft, and how much of it is verified, if the drafter draws `tokens`: the loop's own steps."""
        if tokens not in self.decided:
            policy = self.policy()
            lengths, planned = policy.choose(self.copies, self.scheduled)
            draft = self.draft(tokens, lengths, planned)
            self.decided[tokens] = draft, policy.prune(draft) if self.scheduled else draft.lengths
        return self.decided[tokens]

    def draft(self, tokens, lengths, planned) -> Draft:
        rows, drafting = len(tokens), planned > 0 and not all(lengths)
        wide = BLOCK if drafting else 0
        prefixes = [[tuple(row[:k]) for k in range(wide)] for row in tokens]
        q = [[m.law(p).tolist() for p in row] for m, row in zip(self.drafters, prefixes)]
        sure = [[float(m.law(p)[0]) for p in row] for m, row in zip(self.sure, prefixes)]
        drawn = torch.tensor([row[:wide] for row in tokens], dtype=torch.long).view(rows, wide)
        room = [0 if n else planned for n in lengths]
        draft = Draft(
            tokens=drawn,
            lengths=[min(wide, most) for most in room],
            q=torch.tensor(q, dtype=torch.float64) if drafting else None,
            log_q=drawn.double(),
            confidence=torch.tensor(sure, dtype=torch.float64).logit() if drafting else None,
            stages=[1] * rows,
            block=BLOCK,
            room=room,
        )
        return with_copies(draft, self.copies, lengths, [LENGTH] * rows)

    # ---------------------------------------------------------------- laws

    def law(self, verify) -> dict:
        """Of all rows' next LENGTH tokens after one round and plain decoding."""

        def one_round(branches):
            drawn = []
            for drafter in self.drafters:
                row: list[int] = []
                for _ in range(BLOCK):
                    row.append(branches.choose(drafter.law(tuple(row))))
                drawn.append(tuple(row))
            draft, lengths = self.decide(tuple(drawn))
            texts = []
            for r, (target, n) in enumerate(zip(self.targets, lengths)):
                qs = None if draft.q is None else list(draft.q[r, :n])
                texts.append(tuple(judge(branches, verify, target, draft.tokens[r, :n].tolist(), qs)[0][:LENGTH]))
            return tuple(texts)

        emitted, law = defaultdict(float), defaultdict(float)
        for weight, texts in Branches().runs(one_round):
            emitted[texts] += weight
        for texts, weight in emitted.items():
            wholes = [text_law(t, LENGTH, text).items() for t, text in zip(self.targets, texts)]
            for outcome in itertools.product(*wholes):
                chance = weight
                for _, p in outcome:
                    chance *= p
                law[tuple(text for text, _ in outcome)] += chance
        return dict(law)

    def plain(self) -> dict:
        law = {}
        for outcome in itertools.product(*[text_law(t, LENGTH).items() for t in self.targets]):
            chance = 1.0
            for _, p in outcome:
                chance *= p
            law[tuple(text for text, _ in outcome)] = chance
        return law


class Peeking(World):
    """WRONG: looks at what was drafted before it copies instead: a draft that disagrees with the copy is dropped."""

    def decide(self, tokens):
        lengths = [
            len(c.tokens) if c.tokens and c.tokens[0] != row[0] else 0 for (c, _), row in zip(self.copies, tokens)
        ]
        draft = self.draft(tokens, lengths, BLOCK)
        return draft, draft.lengths


class Confident(World):
    """WRONG: copies where the drafter was unsure of its last draft, which hangs on the draft before, thrown away by
    that."""

    def decide(self, tokens):
        sure = [float(m.law(row[:1])[0]) for m, row in zip(self.sure, tokens)]
        lengths = [len(c.tokens) if s < 0.5 else 0 for (c, _), s in zip(self.copies, sure)]
        draft = self.draft(tokens, lengths, BLOCK)
        return draft, draft.lengths


SEEDS = range(6)


@pytest.mark.parametrize("verification", VERIFIERS)
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_choice_settled_before_drafting_gives_the_targets_law(verification, scheduled):
    for seed in SEEDS:
        world = World(seed, scheduled=scheduled)
        assert distance(world.law(VERIFIERS[verification]), world.plain()) < 1e-9, f"seed {seed}"


def test_the_worlds_above_hold_rounds_of_every_kind():
    kinds, pruned = set(), 0
    for seed, scheduled in itertools.product(SEEDS, (True, False)):
        world = World(seed, scheduled=scheduled)
        for tokens in itertools.product(itertools.product(range(V), repeat=BLOCK), repeat=2):
            draft, lengths = world.decide(tokens)
            kinds.add(tuple(sorted(set(draft.sources))))
            pruned += lengths != draft.lengths
    assert {("copy",), ("drafter",), ("copy", "drafter")} <= kinds and pruned > 10


@pytest.mark.parametrize("wrong", [Peeking, Confident])
@pytest.mark.parametrize("verification", VERIFIERS)
def test_a_choice_that_looks_at_what_it_throws_away_is_biased_but_under_match(verification, wrong):
    errors = []
    for seed in range(4):
        world = wrong(seed)
        errors.append(distance(world.law(VERIFIERS[verification]), world.plain()))
    assert max(errors) < 1e-9 if verification == "match" else max(errors) > 1e-2
