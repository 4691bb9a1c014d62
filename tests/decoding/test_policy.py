"""What is decided from measured costs: simulated machines for the decisions' worth, real models for their exactness."""

import copy
import functools
import gc
import itertools
import math
import random
import re
from dataclasses import replace

import golden
import pytest
import tiny
import torch
from tiny import generated, padded

from hf_dspark import AutoDrafter, SpeculationConfig, keyed_processors
from hf_dspark.decoding import loop
from hf_dspark.decoding.costs import policy_for
from hf_dspark.decoding.generate import listening
from hf_dspark.drafting.draft import Draft
from hf_dspark.scheduling.cost import CostTable
from hf_dspark.scheduling.policy import AutoGate, Policy, StaticGate

# ---------------------------------------------------------------------- simulated rounds


def draft_of(log_q, confidence=None, stages=1, block=None) -> Draft:
    """A round's draft from log q (and confidences) [A][L]."""
    log_q = torch.tensor(log_q)
    confidence = None if confidence is None or not log_q.shape[1] else torch.tensor(confidence).logit()
    rows, drafts = log_q.shape
    tokens = torch.zeros(rows, drafts, dtype=torch.long)
    return Draft(
        tokens=tokens,
        lengths=[drafts] * rows,
        log_q=log_q,
        confidence=confidence,
        stages=[stages] * rows,
        block=block or drafts,
        room=[drafts] * rows,
    )


class Clock:
    """Turns true seconds into measured ones: some jitter, and a stray slice of another process now and then."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)

    def __call__(self, seconds):
        return seconds * self.rng.uniform(0.95, 1.05) * (3 if self.rng.random() < 0.02 else 1)


class Text:
    """One row's text under a drafter whose drafts are accepted with a chance that depends on the place and on the
    stage.

    Args:
        ease: place -> chance. decay: of the chance per stage. honest: the drafter's log q tells the chance, else it is
            too shy.
    """

    def __init__(self, ease, draft=3.90, verify=22.45, block=7, decay=0.98, honest=True, length=2500):
        rng = random.Random(0)
        self.places = [(ease(i, rng), rng.random(), rng.gauss(0, 0.5)) for i in range(length + 200)]
        self.draft, self.verify, self.block, self.decay, self.honest, self.length = (
            draft,
            verify,
            block,
            decay,
            honest,
            length,
        )

    def stage(self, at, stage):
        scores, hits = [], []
        for chance, coin, noise in self.places[at : at + self.block]:
            chance *= self.decay**stage
            z = math.log(chance / (1 - chance))
            scores.append(-math.log1p(math.exp(-(z if self.honest else 0.6 * z - 0.8) - noise)))
            hits.append(coin < chance)
        return scores, hits

    def seconds(self, gate, policy=None) -> float:
        """True seconds per token."""
        at, total, clock, K = 0, 0.0, Clock(), self.block
        while at < self.length:
            if policy is not None:
                policy.begin(1, 100.0)
            log_q, hits, stages = [], [], 0
            while stages < 8:
                scores, more = self.stage(at + stages * K, stages)
                log_q, hits, stages = log_q + scores, hits + more, stages + 1
                if not gate([[sum(log_q[s * K : (s + 1) * K]) for s in range(stages)]], 1)[0]:
                    break
            accepted = (hits + [False]).index(False)
            draft, verify = stages * self.draft, self.verify + 0.05 * len(hits)
            if policy is not None:
                drafted = draft_of([log_q], None, stages, K)
                policy.observe(drafted, [len(hits)], [accepted], 1 + len(hits), clock(draft), clock(verify))
            at, total = at + accepted + 1, total + draft + verify
        return total / at


def episodes(high, low, length):
    """Easy and hard stretches of random lengths."""
    state = {}

    def ease(i, rng):
        if i == 0 or rng.random() < 1 / length:
            state["chance"] = rng.choice([high, low])
        return state["chance"]

    return ease


TEXTS = {
    "high": lambda i, rng: 0.985,
    "medium": lambda i, rng: 0.9,
    "low": lambda i, rng: 0.6,
    "drifting": lambda i, rng: 0.98 if i // 1000 % 2 == 0 else 0.6,
    "episodes": episodes(0.995, 0.7, 30),
}
NEVER = StaticGate(math.inf)


@pytest.mark.parametrize("knobs", [{}, {"honest": False}, {"decay": 0.9}, {"decay": 0.3}, {"draft": 15.0}], ids=str)
@pytest.mark.parametrize("ease", TEXTS)
def test_the_automatic_gate_matches_the_best_fixed_one_and_never_loses_to_one_stage(ease, knobs):
    text = Text(TEXTS[ease], **knobs)
    one = text.seconds(NEVER)
    best = min(text.seconds(StaticGate(g)) for g in (-0.25, -0.5, -1.0, -2.0))
    policy = Policy(text.block, 8)
    auto = text.seconds(AutoGate(policy), policy)
    assert auto < 1.02 * one
    assert auto < 1.04 * best


def test_a_bad_first_measurement_of_later_stages_does_not_turn_looping_off_for_ever():
    text = Text(TEXTS["high"], length=10000)
    policy = Policy(text.block, 8)
    gate = AutoGate(policy)
    for stages in [1] * 4 + [2, 3, 4] * 3:  # a machine that was busy whenever several stages were verified
        policy.begin(1, 100.0)
        drafts = stages * text.block
        draft = draft_of([[-0.01] * drafts], None, stages, text.block)
        policy.observe(draft, [drafts], [drafts], 1 + drafts, 4.0 * stages, 60.0 if stages > 1 else 25.0)
    assert not gate([[-0.07]], 1)[0]
    assert text.seconds(gate, policy) < 0.75 * text.seconds(NEVER)


def test_rows_of_a_batch_share_a_stages_time_and_decide_together():
    policy = Policy(4, 8)
    gate = AutoGate(policy)
    policy.begin(4, 100.0)
    sure, unsure = [-0.01], [-6.0]
    assert gate([sure] * 4, 4) == [True] * 4
    assert gate([sure, sure, sure, unsure], 4) == [True] * 4
    assert gate([sure, unsure, unsure, unsure], 4) == [False] * 4
    assert gate([unsure] * 4, 4) == [False] * 4
    policy.begin(1, 100.0)
    assert gate([sure], 1) == [True]


def test_later_stages_have_a_time_of_their_own():
    policy = Policy(4, 8)
    AutoGate(policy)
    for stages in [1] * 6 + [3] * 6:
        policy.begin(1, 100.0)
        drafts = 4 * stages
        draft = draft_of([[-0.1] * drafts], None, stages, 4)
        policy.observe(draft, [drafts], [drafts], 1 + drafts, 5.0 + 3.0 * (stages - 1), 20.0)
    assert policy.cost.draft_seconds(1, 100.0, 4) == pytest.approx(5.0)
    assert policy._stage_seconds(1) == pytest.approx(3.0)


# ---------------------------------------------------------------------- simulated batches


class Batch:
    """Rows whose drafts are accepted with chances that swing from round to round; costs of a small model on one
    core."""

    def __init__(self, rows, quality, told=None, block=5, draft=None):
        self.rows, self.quality, self.told, self.block = rows, quality, told or (lambda z: z), block
        self.draft = 5.0 + 2.0 * rows if draft is None else draft

    def verify(self, width):
        return 50 + 8.5 * self.rows + 1.4 * self.rows * (width - 1)

    def rounds(self, count):
        """Per round the rows' (confidences told, accepted drafts)."""
        rng = random.Random(1)
        for _ in range(count):
            confidences, accepted = [], []
            for _ in range(self.rows):
                ease = rng.random()
                chances = [min(0.99, max(0.01, self.quality * (0.4 + 1.1 * ease) * 0.95**k)) for k in range(self.block)]
                confidences.append([1 / (1 + math.exp(-self.told(math.log(c / (1 - c))))) for c in chances])
                accepted.append(([rng.random() < c for c in chances] + [False]).index(False))
            yield confidences, accepted

    def fixed(self, length, count=300) -> float:
        """Tokens per second with always so many drafts."""
        tokens = sum(1 + min(a, length) for _, accepted in self.rounds(count) for a in accepted)
        return tokens / count / (self.verify(1 + length) + (self.draft if length else 0.0))

    def auto(self, policy, count=300):
        """Tokens per second under a policy, and the mean number of drafts verified."""
        tokens = seconds = verified = 0
        clock = Clock()
        for confidences, accepted in self.rounds(count):
            policy.begin(self.rows, 100.0)
            planned = policy.plan()
            draft = draft_of([[-0.5] * planned] * self.rows, [c[:planned] for c in confidences], 1, self.block)
            lengths = policy.prune(draft)
            kept = [min(a, n) for a, n in zip(accepted, lengths)]
            spent = (self.draft if planned else 0.01), self.verify(1 + max(lengths))
            policy.observe(draft, lengths, kept, 1 + max(lengths), *map(clock, spent))
            tokens, seconds, verified = tokens + sum(kept) + self.rows, seconds + sum(spent), verified + sum(lengths)
        return tokens / seconds, verified / count / self.rows


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("quality", [0.3, 0.5, 0.8])
def test_the_scheduler_matches_the_best_fixed_length_at_every_batch_size(rows, quality):
    batch = Batch(rows, quality)
    assert batch.auto(Policy(5, 8))[0] > 0.97 * max(batch.fixed(k) for k in range(6))


@pytest.mark.parametrize("told", [lambda z: z - 1.5, lambda z: z + 1.5, lambda z: 3 * z], ids=["shy", "bold", "sharp"])
def test_confidences_that_are_off_cost_little(told):
    batch = Batch(4, 0.6, told)
    assert batch.auto(Policy(5, 8))[0] > 0.97 * max(batch.fixed(k) for k in range(6))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dear", [False, True])
def test_a_bad_drafter_costs_under_5_percent(rows, dear):
    batch = Batch(rows, 0.03, draft=60.0 if dear else None)
    policy = Policy(5, 8)
    assert batch.auto(policy, 200)[0] > 0.95 * batch.fixed(0)
    assert "plain steps" in policy.note()


def test_fewer_drafts_are_verified_as_the_batch_grows_under_one_lasting_policy():
    policy = Policy(5, 8)
    verified = [Batch(rows, 0.45).auto(policy)[1] for rows in (1, 4, 16)]
    assert verified[0] > verified[1] > verified[2]


@pytest.mark.parametrize("rows", [2, 16])
def test_a_plain_step_that_is_cheap_out_of_line_neither_hides_drafts_that_pay_nor_lets_others_be_made_for_ever(rows):
    class Kinked(Batch):
        def verify(self, width):
            return super().verify(width) - (0.1 if self.rows == 2 else 0.5) * super().verify(1) * (width == 1)

    batch = Kinked(rows, 0.55)
    policy = Policy(5, 8)
    assert batch.auto(policy)[0] > 0.96 * max(batch.fixed(k) for k in range(6))  # learning included


KINKED = CostTable((2,), (0,), (1, 2, 4, 6), (((55.0, 66.0, 70.0, 76.0),),), ((6.8,),))


def test_a_dear_first_draft_does_not_hide_that_several_pay():
    policy = Policy(5, 1, KINKED)
    policy.begin(2, 0.0)
    for _ in range(100):
        policy.throttle.history.expect([[0.4] * 5] * 2)
    chosen = [policy.prune(draft_of([[-0.5] * 5] * 2, [[first, *[0.4] * 4]] * 2)) for first in (0.15, 0.21, 0.3)]
    assert chosen == [[0, 0], [2, 2], [3, 3]]  # at 0.21 one for 11 ms wouldn't pay, two for 13 do


def test_what_a_draft_decides_itself_does_not_decide_whether_it_is_verified():
    """A stop token ends the offer behind it, a passed gate prolongs it, and neither may be known before the draft
    is."""
    rng, verified = random.Random(0), []
    for case in range(400):
        policy = Policy(3, 2, KINKED)
        policy.begin(2, 0.0)
        for _ in range(20):
            policy.throttle.history.expect([[rng.random()] * 3] * 2)
        k, chances = case % 3, [[rng.random() for _ in range(6)] for _ in range(2)]
        long, short = (
            draft_of([[-0.5] * 6] * 2, chances, 2, 3),
            draft_of([[-0.5] * 3] * 2, [c[:3] for c in chances], 1, 3),
        )
        room = [rng.randint(k + 1, 6), 6]
        long, short = replace(long, room=room), replace(short, lengths=[k + 1, k + 1], room=room)
        got = [policy.prune(draft)[1] > k for draft in (long, short)]
        assert got[0] == got[1]
        verified.append(got[0])
    assert 40 < sum(verified) < 360


@pytest.mark.parametrize("seed", range(6))
def test_an_unlucky_start_does_not_turn_drafting_off_for_ever(seed):
    """Two rows, and drafts that pay by a tenth: what the first rounds tell of that is little."""
    policy, rng = Policy(5, 1, KINKED), random.Random(seed)
    tokens = seconds = drafted = 0
    for _ in range(600):
        policy.begin(2, 0.0)
        planned = policy.plan()
        drafted += planned > 0
        confidence = [[1 / (1 + math.exp(0.4 - rng.gauss(0, 0.4)))] * planned for _ in range(2)]
        draft = draft_of([[-0.5] * planned] * 2, confidence, 1, 5)
        lengths = policy.prune(draft)
        lucky = [([rng.random() < c for c in row] + [False]).index(False) * (drafted > 5) for row in confidence]
        accepted, fed = [min(a, n) for a, n in zip(lucky, lengths)], 1 + max(lengths)
        spent = 6.8 if planned else 0.01, KINKED.verify_seconds(2 * fed, 2)
        policy.observe(draft, lengths, accepted, fed, *spent)
        if drafted > 5:
            tokens, seconds = tokens + sum(accepted) + 2, seconds + sum(spent)
    plain = 2 / KINKED.verify_seconds(2, 2)
    assert tokens / seconds > 1.06 * plain


def test_drafts_that_nobody_verifies_are_not_made_for_ever():
    policy, drafted = Policy(5, 1), 0
    for _ in range(60):
        policy.begin(1, 100.0)
        planned = policy.plan()
        draft = draft_of([[-0.5] * planned], [[0.01] * planned], 1, 5)
        lengths = policy.prune(draft)
        assert lengths == [0]
        policy.observe(draft, lengths, [0], 1, 8.0 if planned else 0.01, 50.0)
        drafted += planned > 0
    assert 0 < drafted < 25


class Cheap(Policy):
    """On a machine where drafts cost next to nothing."""

    def observe(self, draft, verified, accepted, fed, draft_seconds, verify_seconds):
        super().observe(draft, verified, accepted, fed, 1.0, 10.0 + fed)


def test_the_loop_gives_up_a_drafter_none_of_whose_drafts_it_verifies(llama):
    drafter = tiny.make_drafter(llama.target, block_size=5, confidence_head=True)
    with torch.no_grad():
        drafter.confidence.bias.fill_(-8.0)
    batch = dict(input_ids=llama.prompts[0][None], do_sample=False, eos_token_id=None, pad_token_id=0)
    with listening(policy=Cheap(5, 1)):
        llama.target.generate(
            **batch, max_new_tokens=100, assistant_model=drafter, speculation=SpeculationConfig(scheduler="auto")
        )
    note = drafter.last_speculation.notes[0]
    assert sum(map(sum, drafter.last_speculation.draft_lengths)) == 0 and int(note.split(" of ")[0]) > 60


def test_plain_steps_are_measured_anew_where_the_batch_has_grown():
    policy = Policy(5, 8)
    Batch(2, 0.9).auto(policy, 40)
    for rows, expected in ((2, False), (3, False), (8, True)):
        policy.begin(rows, 100.0)
        assert (policy.plan() == 0) is expected


def test_a_recursive_drafter_is_planned_draft_by_draft_and_a_block_drafter_in_whole_blocks():
    lengths = {}
    for recursive in (False, True):
        policy = Policy(5, 8, recursive=recursive)
        Batch(1, 0.5, draft=12.0).auto(policy, 60)
        lengths[recursive] = {policy.plan() for _ in range(20)} - {0}
    assert lengths[False] == {5} and max(lengths[True]) < 5


# ---------------------------------------------------------------------- real models


@functools.cache
def trained():
    """A trained target and drafter with a confidence head, in float64."""
    target = copy.deepcopy(golden.load_target("deepspec-dspark-vanilla")).double()
    target.generation_config.eos_token_id = None
    folder = golden.drafter_folder("deepspec-dspark-vanilla")
    drafter = AutoDrafter.from_pretrained(folder, target=target, dtype=torch.float64)
    cases = golden.expected_of("deepspec-dspark-vanilla")["cases"]
    prompts = [torch.tensor(case["output_ids"][:n]) for case, n in zip(cases[::2], (8, 5))]
    return target, drafter, padded(prompts)


class Erratic(Policy):
    """Decides by chance, so that all kinds of rounds are taken."""

    def __init__(self, seed, block, max_stages):
        super().__init__(block, max_stages)
        self.rng = random.Random(seed)

    def plan(self):
        return self.rng.choice([0, self.block, self.block, self.rng.randint(1, self.block)])  # short drafts don't loop

    def prune(self, draft):
        super().prune(draft)
        return [self.rng.randint(0, n) for n in draft.lengths]

    def break_even(self, stage):
        return self.rng.choice([0.0, math.inf])


@pytest.mark.parametrize(
    "auto", [dict(scheduler="auto"), dict(loop_gate="auto"), dict(scheduler="auto", loop_gate="auto")]
)
@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "keyed"])
def test_whatever_is_decided_the_text_is_the_plain_one(auto, seed):
    target, drafter, batch = trained()
    width = batch["input_ids"].shape[1]
    processors = None if seed is None else keyed_processors(target.generation_config, seed, width)
    call = dict(**batch, do_sample=False, max_new_tokens=24, pad_token_id=0, logits_processor=processors)
    plain = target.generate(**call)
    stages, lengths = set(), set()
    for turn in range(3):
        speculation = SpeculationConfig(**auto, max_draft_stages=3)
        with listening(policy=Erratic(turn, drafter.config.max_block, 3)):
            out = target.generate(**call, assistant_model=drafter, speculation=speculation)
        assert torch.equal(out, plain)
        stages |= set(itertools.chain(*drafter.last_speculation.draft_stages))
        lengths |= set(itertools.chain(*drafter.last_speculation.draft_lengths))
    assert len(lengths) > 3 and stages >= ({1, 2, 3} if "loop_gate" in auto else {1})


def auto_run(case, drafter, **knobs):
    out = case.target.generate(
        **case.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False,
        speculation=SpeculationConfig(**{"scheduler": "auto", **knobs}),
    )  # fmt: skip
    assert generated(out, max(tiny.LENGTHS), [tiny.NEW] * 4) == case.new
    return drafter.last_speculation


def test_plain_steps_are_measured_first_and_the_notes_speak_of_the_latest_call(llama, monkeypatch):
    monkeypatch.setattr(loop.time, "perf_counter", itertools.count().__next__)  # drafting takes as long as verifying
    drafter = tiny.oracle(llama.texts, block=2)
    first = auto_run(llama, drafter)
    assert [n[:5] for n in first.draft_lengths] == [[0, 0, 0, 0, 2]] * 4
    assert "a second one" not in first.notes[0]
    assert "a second one" in auto_run(llama, drafter, loop_gate="auto").notes[0]


def test_the_note_gives_what_was_measured_and_says_what_was_not_yet():
    policy = Policy(4, 8)
    AutoGate(policy)
    policy.begin(1, 100.0)
    assert policy.note().count("not measured yet") == 3
    policy.begin(1, 100.0)
    policy.observe(draft_of([[]]), [0], [0], 1, 0.0, 0.020)
    note = policy.note()
    assert "a plain step 20.0 ms, a draft not measured yet" in note and note.endswith("are accepted not measured yet.")
    AutoGate(policy)
    policy.begin(1, 100.0)
    policy.observe(draft_of([[-0.1] * 4]), [4], [1], 5, 0.005, 0.025)
    note = policy.note()
    assert "in this call and those before it, for 1 row: a plain step 20.0 ms, a draft 5.0 ms" in note
    assert re.search(r"are accepted 0\.\d\d, 0\.\d\d\. .* a second one", note)  # drafts 3 and 4 were never judged


def test_a_profiled_machine_has_costs_from_the_start():
    table = CostTable((1,), (0,), (1, 8), (((0.030, 0.040),),), ((0.007,),))
    policy = Policy(4, 8, table)
    policy.begin(1, 0.0)
    note = policy.note()
    assert "a plain step 30.0 ms, a draft 7.0 ms" in note and note.count("not measured yet") == 1


def test_each_drafter_target_and_block_length_has_a_policy_of_its_own(llama, fresh_target):
    drafter, other = tiny.make_drafter(llama.target), tiny.make_drafter(llama.target)
    knobs = SpeculationConfig(scheduler="auto")
    mine = policy_for(drafter, llama.target, knobs)
    assert policy_for(drafter, llama.target, knobs) is mine
    assert policy_for(other, llama.target, knobs) is not mine
    assert policy_for(drafter, fresh_target, knobs) is not mine
    shorter = policy_for(drafter, llama.target, SpeculationConfig(scheduler="auto", num_draft_tokens=2))
    assert shorter is not mine and shorter.block == 2
    longer = policy_for(drafter, llama.target, SpeculationConfig(scheduler="auto", num_draft_tokens=99))
    assert longer is mine and longer.block == drafter.config.max_block  # a block has no more


def test_a_policy_keeps_neither_drafter_nor_target_alive(fresh_target):
    import weakref

    drafter = tiny.make_drafter(fresh_target)
    policy_for(drafter, fresh_target, SpeculationConfig(scheduler="auto"))
    gone = weakref.ref(drafter)
    del drafter
    gc.collect()
    assert gone() is None
