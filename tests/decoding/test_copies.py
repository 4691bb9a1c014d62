"""Copies of the text and of a memory as drafts: exact beside every drafter, on every target, whatever the policy
chooses."""

import copy
import functools
import itertools
import math
import pickle
import random
from dataclasses import replace

import golden
import pytest
import tiny
import torch
from tiny import generated
from transformers import TextIteratorStreamer

from hf_dspark import AutoDrafter, CopyDrafter, CopyMemory, SpeculationConfig, SpeculationStats, keyed_processors
from hf_dspark.decoding.generate import listening
from hf_dspark.drafting.copies import offers, with_copies
from hf_dspark.drafting.copying import CopyIndex
from hf_dspark.drafting.draft import Draft
from hf_dspark.evaluation import metrics
from hf_dspark.evaluation.record import confidence_data, gate_data, record, threshold_sweep
from hf_dspark.evaluation.replay import Costs
from hf_dspark.scheduling.policy import AutoGate, Policy


class Chance(Policy):
    """Copies, drafts, verifies and loops by chance, so that all kinds of rounds are taken."""

    def __init__(self, seed, block, stages=1):
        super().__init__(block, stages)
        self.rng = random.Random(seed)

    def choose(self, copies, scheduled):
        copying = self.rng.random() < 0.6
        lengths = [self.rng.randint(0, len(copy.tokens)) if copying else 0 for copy, _ in copies]
        return lengths, 0 if all(lengths) else self.rng.choice([0, self.block, self.block])

    def plan(self):
        return self.rng.choice([0, self.block, self.block])

    def prune(self, draft):
        super().prune(draft)
        return [n if source != "drafter" else self.rng.randint(0, n) for n, source in zip(draft.lengths, draft.sources)]

    def break_even(self, stage):
        return self.rng.choice([0.0, math.inf])


def remembered(texts, every=4, **options) -> CopyMemory:
    """A memory of `texts` in which every so many tokens are wrong: its copies are accepted in part."""
    memory = CopyMemory(learns=False, **{"min_match": 1, **options})
    for text in texts:
        memory.add([tiny.wrong(t) if i % every == every - 1 else t for i, t in enumerate(text)])
    return memory


def run(case, drafter, policy=None, side="left", **options):
    with listening(policy=policy):
        out = case.target.generate(
            **case.padded(side), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False, **options
        )
    return generated(out, max(tiny.LENGTHS), [tiny.NEW] * 4)


def counts(stats, *sources) -> tuple[int, int]:
    """Drafts accepted and verified of some sources."""
    kept = [stats.by_source[s] for s in sources if s in stats.by_source]
    return sum(s["accepted"] for s in kept), sum(s["verified"] for s in kept)


# ---------------------------------------------------------------------- greedy decoding


@pytest.mark.parametrize("knob", [3, "auto"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_copies_alone_leave_every_targets_text(case, knob, side):
    drafter = CopyDrafter(remembered(case.texts), SpeculationConfig(copy=knob))
    assert run(case, drafter, Chance(1, 0) if knob == "auto" else None, side) == case.new
    accepted, verified = counts(drafter.last_speculation, "memory", "copy")
    assert 0 < accepted < verified


@pytest.mark.parametrize("knob", [3, "auto"])
def test_one_row_is_plain_too(case, knob):
    drafter = CopyDrafter(remembered(case.texts), SpeculationConfig(copy=knob))
    out = case.target.generate(case.prompts[1][None], assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
    assert out[0].tolist() == case.texts[1]


@pytest.mark.parametrize("knob", [3, "auto"])
def test_copies_beside_a_drafter_leave_every_targets_text(case, knob):
    drafter = tiny.good(case.texts, block=4)
    drafter.copy_memory = remembered(case.texts, 5, min_match=2)
    knobs = SpeculationConfig(copy=knob)
    assert run(case, drafter, Chance(2, 4) if knob == "auto" else None, speculation=knobs) == case.new
    sources = drafter.last_speculation.by_source
    assert {"drafter", "memory"} <= sources.keys()
    assert all(0 < sources[s]["accepted"] < sources[s]["verified"] for s in ("drafter", "memory"))


@functools.cache
def trained():
    """A trained target and drafter with a confidence head, in float64."""
    target = copy.deepcopy(golden.load_target("deepspec-dspark-vanilla")).double()
    target.generation_config.eos_token_id = None
    folder = golden.drafter_folder("deepspec-dspark-vanilla")
    drafter = AutoDrafter.from_pretrained(folder, target=target, dtype=torch.float64)
    cases = golden.expected_of("deepspec-dspark-vanilla")["cases"]
    prompts = [torch.tensor(c["output_ids"][:n]) for c, n in zip(cases * 4, (8, 5, 11, 3))]
    return target, drafter, tiny.padded(prompts)


SHARED = {
    "static": dict(loop_gate=-20.0),
    "static, scheduled": dict(loop_gate=-20.0, scheduler="auto"),
    "threshold": dict(confidence_threshold=0.4),
    "all": dict(loop_gate="auto", scheduler="auto", confidence_threshold=0.02),
}


@pytest.mark.parametrize("knob", [3, "auto"])
@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "keyed"])
@pytest.mark.parametrize("knobs", SHARED)
def test_stages_thresholds_and_schedulers_beside_copies_leave_the_text(knobs, seed, knob):
    target, drafter, batch = trained()
    width = batch["input_ids"].shape[1]
    processors = None if seed is None else keyed_processors(target.generation_config, seed, width)
    call = dict(**batch, do_sample=False, max_new_tokens=16, pad_token_id=0, logits_processor=processors)
    plain = target.generate(**call)
    speculation, stages = SpeculationConfig(**SHARED[knobs], max_draft_stages=3, copy=knob), set()
    rows = [text[m.bool()].tolist() for text, m in zip(plain[:, :width], batch["attention_mask"])]
    drafter.copy_memory = remembered([a + b for a, b in zip(rows, plain[:, width:].tolist())], 9, min_match=3)
    try:
        for turn in range(3):
            with listening(policy=Chance(turn, drafter.config.max_block, 3)):
                out = target.generate(**call, assistant_model=drafter, speculation=speculation)
            assert torch.equal(out, plain)
            assert {"drafter", "memory"} <= drafter.last_speculation.by_source.keys()
            stages |= set(itertools.chain(*drafter.last_speculation.draft_stages))
        assert len(stages) > 1 or knob == 3 or "loop_gate" not in SHARED[knobs]
    finally:
        drafter.copy_memory = None


# ---------------------------------------------------------------------- what CopyDrafter works with


def loud(text=(), **knobs):
    """A drafter whose copies are of a wrong `text` and of the row itself."""
    return CopyDrafter(remembered([list(text)]) if len(text) else None, SpeculationConfig(**{"copy": 4, **knobs}))


def test_eos_streamers_and_stop_strings_end_a_copy_where_plain_generate_ends(llama):
    prompt, text = llama.prompts[0], llama.new[0]
    drafter = loud(llama.texts[0])
    for options in (dict(eos_token_id=text[6]), dict(max_new_tokens=5), dict(eos_token_id=[text[9], text[8]])):
        expected = tiny.plain(llama.target, prompt, **{"max_new_tokens": tiny.NEW, "pad_token_id": 0, **options})
        out = llama.target.generate(
            prompt[None], assistant_model=drafter, do_sample=False,
            **{"max_new_tokens": tiny.NEW, "pad_token_id": 0, **options},
        )  # fmt: skip
        assert out[0].tolist() == expected
    assert counts(drafter.last_speculation, "memory")[0] > 0


class Words:
    """A tokenizer of numbers, enough for streamers, stop strings and pipelines."""

    def __init__(self):
        self.vocab = {f"<{i}>": i for i in range(tiny.V)}

    def decode(self, ids, **options):
        return "".join(f"<{int(i)}>" for i in ids)


def test_a_streamer_gets_every_token_of_a_copy(llama):
    streamer = TextIteratorStreamer(Words(), skip_prompt=True)
    llama.target.generate(
        llama.prompts[0][None], assistant_model=loud(llama.texts[0]), max_new_tokens=tiny.NEW, do_sample=False,
        streamer=streamer,
    )  # fmt: skip
    assert "".join(streamer) == Words().decode(llama.new[0])


def test_what_a_row_has_written_is_copied_from(llama):
    """Its text ends in one token again and again, which its prompt lacks."""
    drafter = CopyDrafter(speculation=SpeculationConfig(copy=4))
    out = llama.target.generate(
        llama.prompts[3][None], assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False
    )
    assert out[0].tolist() == llama.texts[3]
    assert counts(drafter.last_speculation, "copy")[0] > 0


def test_a_cache_is_continued_and_the_whole_text_is_copied_from(llama):
    prompt, drafter = llama.prompts[0][None], loud(llama.texts[0])
    call = dict(assistant_model=drafter, do_sample=False, return_dict_in_generate=True)
    first = llama.target.generate(prompt, max_new_tokens=6, **call)
    rest = llama.target.generate(
        first.sequences, max_new_tokens=tiny.NEW - 6, **{tiny.CACHE: first[tiny.CACHE]}, **call
    )
    assert rest.sequences[0].tolist() == llama.texts[0]
    assert counts(rest.speculation, "memory")[0] > 0


def test_num_return_sequences_are_keyed_sampling_row_by_row(llama):
    prompt, n = llama.prompts[1], 3
    processors = keyed_processors(llama.target.generation_config, 5, len(prompt))
    plain = llama.target.generate(
        prompt.expand(n, -1), do_sample=False, max_new_tokens=tiny.NEW, logits_processor=processors
    )
    drafter = CopyDrafter(remembered(plain.tolist()), SpeculationConfig(copy="auto", verification="match", seed=5))
    with listening(policy=Chance(0, 0)):
        out = llama.target.generate(
            prompt[None], assistant_model=drafter, do_sample=True, num_return_sequences=n, max_new_tokens=tiny.NEW
        )
    assert out.equal(plain)
    accepted, verified = counts(drafter.last_speculation, "memory", "copy")
    assert 0 < accepted < verified


def test_a_seed_gives_the_same_sample_whatever_is_copied(llama):
    texts = []
    for memory in (None, remembered(llama.texts), remembered(llama.texts[:1])):
        drafter = CopyDrafter(memory)
        knobs = replace(drafter.speculation, seed=5)
        out = llama.target.generate(
            llama.prompts[0][None], assistant_model=drafter, do_sample=True, max_new_tokens=tiny.NEW, speculation=knobs
        )
        texts.append(out[0].tolist())
    assert texts[0] == texts[1] == texts[2] != llama.texts[0]


def test_a_target_of_learned_positions_is_filled_to_the_last_one():
    target = tiny.make_target("gpt2", max_position_embeddings=20)
    prompt = torch.tensor([4, 5, 6, 7])
    text = tiny.plain(target, prompt, max_new_tokens=16)
    drafter = CopyDrafter(remembered([text], every=99), SpeculationConfig(copy=10))
    out = target.generate(prompt[None], assistant_model=drafter, max_new_tokens=16, do_sample=False)
    assert out[0].tolist() == text
    assert drafter.last_speculation.acceptance_rate == 1.0


def test_processors_see_copied_prefixes_as_they_see_plain_ones(llama):
    options = dict(repetition_penalty=1.5, no_repeat_ngram_size=2, max_new_tokens=tiny.NEW)
    text = tiny.plain(llama.target, llama.prompts[2], **options)
    drafter = loud(text)
    out = llama.target.generate(llama.prompts[2][None], assistant_model=drafter, do_sample=False, **options)
    assert out[0].tolist() == text
    assert counts(drafter.last_speculation, "memory", "copy")[0] > 0


def test_a_drafter_that_only_copies_refuses_what_it_does_not_have(llama):
    def call(**knobs):
        llama.target.generate(
            llama.prompts[0][None], assistant_model=CopyDrafter(), max_new_tokens=3,
            speculation=SpeculationConfig(**{"copy": "auto", **knobs}),
        )  # fmt: skip

    for knobs, words in (
        (dict(copy=None), "leaves nothing to draft"),
        (dict(loop_gate=-1.0), "have no stages"),
        (dict(num_draft_tokens=3), "copy=n sets the longest copy"),
        (dict(confidence_threshold=0.5), "copies only where it is expected to pay"),
        (dict(engine="stock"), "prompt_lookup_num_tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**knobs)
    with pytest.raises(ValueError, match="copies are all it drafts"):
        CopyDrafter(speculation=SpeculationConfig())


def test_the_stock_engine_refuses_copies_beside_a_drafter(llama):
    with pytest.raises(ValueError, match="asks the drafter alone"):
        llama.target.generate(
            llama.prompts[0][None], assistant_model=tiny.make_drafter(llama.target), max_new_tokens=3,
            speculation=SpeculationConfig(engine="stock", copy=3),
        )  # fmt: skip


# ---------------------------------------------------------------------- the shared memory


def test_a_memory_learns_from_ended_calls_and_serves_later_ones(llama):
    memory = CopyMemory(max_tokens=200)
    drafter, taus = CopyDrafter(memory, SpeculationConfig(copy=8)), []
    for _ in range(2):
        assert run(llama, drafter) == llama.new
        taus.append(drafter.last_speculation.tau)
    assert sorted(memory.documents()[:4]) == sorted(llama.texts)
    assert taus[1] > 2 * taus[0]
    for _ in range(6):
        run(llama, drafter)
    assert len(memory) <= 200


def test_a_memory_that_does_not_learn_and_calls_without_copies_leave_it_alone(llama):
    memory = remembered(llama.texts)
    before = memory.documents()
    run(llama, CopyDrafter(memory))
    drafter = tiny.good(llama.texts)
    drafter.copy_memory = CopyMemory()
    run(llama, drafter)
    assert memory.documents() == before and not len(drafter.copy_memory)


def test_another_targets_vocabulary_is_refused_beside_any_drafter(llama):
    memory = CopyMemory(vocabulary_size=99)
    for drafter in (CopyDrafter(memory), tiny.good(llama.texts)):
        drafter.copy_memory = memory
        with pytest.raises(ValueError, match="vocabulary_size=99"):
            run(llama, drafter, speculation=SpeculationConfig(copy=2))


def test_a_saved_memory_proposes_what_it_did(llama, tmp_path):
    drafter = CopyDrafter(CopyMemory(), SpeculationConfig(copy=8))
    run(llama, drafter)
    drafter.copy_memory.save(tmp_path / "memory.safetensors")
    again = CopyDrafter(CopyMemory.load(tmp_path / "memory.safetensors", tiny.V), SpeculationConfig(copy=8))
    for one in (drafter, again):
        run(llama, one)
    assert again.last_speculation.acceptance_lengths == drafter.last_speculation.acceptance_lengths
    assert again.last_speculation.tau > 2


# ---------------------------------------------------------------------- who learns from what


def test_copied_rounds_teach_the_drafters_history_confidence_gate_and_times_nothing():
    policy = Policy(3, 2)
    AutoGate(policy)
    policy.begin(2, 0.0)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    both = replace(draft_of(2, tokens, [3, 3]), sources=["drafter", "copy"], matches=[0, 9], lengths=[3, 3])
    taught = Policy(3, 2)
    AutoGate(taught)
    taught.begin(2, 0.0)
    for one, draft, verified, accepted in (
        (policy, both, [3, 3], [1, 3]),
        (taught, replace(draft_of(1, tokens[:1], [3])), [3], [1]),
    ):
        one.prune(draft)
        one.observe(draft, verified, accepted, 4, 0.01, 0.05)
    for part in (lambda p: p.throttle.history, lambda p: p.correction):
        assert pickle.dumps(part(policy)) == pickle.dumps(part(taught))
    copied = replace(both, sources=["copy", "memory"], matches=[9, 9])
    parts = lambda: (policy.throttle.history, policy.correction, policy.gate, policy._tokens)  # noqa: E731
    before = pickle.dumps(parts())
    policy.begin(2, 0.0)
    policy.prune(copied)
    policy.observe(copied, [3, 3], [3, 0], 4, 0.0, 0.05)
    assert pickle.dumps(parts()) == before
    assert policy.cost.draft_stages() == 1


def test_statistics_of_single_drafts_leave_copies_out_and_sources_are_told_apart():
    stats = SpeculationStats.empty(1)
    rounds = (2, 3, 1, "drafter"), (1, 3, 0, "drafter"), (5, 4, 4, "copy"), (1, 0, 0, "none")
    for emitted, verified, accepted, source in rounds:
        stats.add(0, emitted, verified, accepted, 1, source)
    assert stats.conditional_acceptance[:2] == [0.5, 0.0]
    assert stats.by_source["copy"] == {"rounds": 1, "emitted": 5, "verified": 4, "accepted": 4}
    assert "(drafter 2 rounds of 1.50 tokens, copy 1 round of 5.00 tokens, plain 1 round of 1.00 tokens)" in repr(stats)
    (rounds,) = metrics.responses_of(stats)
    assert metrics.by_source(rounds) == stats.by_source
    summary = metrics.summary([rounds], block=3)
    assert summary["conditional_acceptance"] == metrics.conditional_acceptance(rounds[:2])
    assert summary["sources"] == stats.by_source and summary["tau"] == 9 / 4


def test_recorded_copies_are_no_data_for_calibration_gates_and_thresholds(llama):
    drafter = tiny.make_drafter(llama.target)
    drafter.copy_memory = remembered(llama.texts)
    with record(drafter, policy=Chance(3, drafter.config.max_block)) as recorder:
        llama.target.generate(
            **llama.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False,
            speculation=SpeculationConfig(copy="auto"),
        )  # fmt: skip
    mine = [r for r in recorder.rounds if r.source == "drafter"]
    assert {"memory", "drafter"} <= {r.source for r in recorder.rounds}
    assert len(confidence_data(recorder.rounds).logits) == sum(r.drafted > 0 for r in mine)
    assert threshold_sweep(recorder.rounds) == threshold_sweep(
        [r for r in recorder.rounds if r in mine or not r.drafted]
    )
    assert gate_data(recorder.rounds) == gate_data(mine)
    assert Costs.measured(recorder.rounds).draft == Costs.measured(mine).draft


# ---------------------------------------------------------------------- copies in a draft


def draft_of(rows, tokens, room, q=None) -> Draft:
    return Draft(
        tokens=tokens,
        lengths=[tokens.shape[1]] * rows,
        q=q,
        log_q=tokens.float(),
        confidence=tokens.double(),
        stages=[1] * rows,
        block=tokens.shape[1],
        room=room,
    )


@pytest.mark.parametrize("width", [0, 2, 5])
def test_copies_take_the_place_of_a_rows_drafts_and_of_their_law(width):
    texts = [[5, 6, 7, 8, 5, 6], [9, 9, 9], [1, 2]]
    copies = offers([CopyIndex(t) for t in texts], texts, [9] * 3, None, 4)
    assert [(c.tokens, c.match) for c, _ in copies] == [([7, 8, 5, 6], 2), ([9] * 4, 2), ([], 0)]
    tokens = torch.arange(3 * width).reshape(3, width) + 20
    q = torch.full((3, width, 61), 1 / 61)
    draft = with_copies(draft_of(3, tokens, [0, 5, 5], q), copies, [3, 0, 0], [9] * 3)
    assert draft.tokens[0].tolist() == [7, 8, 5, 0, 0][: max(width, 3)]
    assert draft.tokens[1:, :width].equal(tokens[1:])
    assert draft.lengths == [3, width, width] and draft.matches == [2, 0, 0]
    assert draft.sources == ["copy"] + ["drafter" if width else "none"] * 2
    assert draft.q[0].argmax(-1).equal(draft.tokens[0]) and bool((draft.q[0].amax(-1) == 1).all())
    assert draft.q[1:, :width].equal(q[1:]) and draft.room == [9, 5, 5]


def test_the_memory_is_copied_from_where_it_matches_longer():
    text = [1, 2, 3, 9, 3]
    memory = CopyMemory(min_match=2)
    memory.add([2, 3, 9, 3, 40, 41, 42])
    index = CopyIndex(text, 1)
    assert offers([index], [text], [3], None, 9)[0][0].tokens == [9, 3, 9]
    assert offers([index], [text], [3], memory, 9)[0] == (memory.propose(text, 3), "memory")
    assert offers([index], [text], [0], memory, 9)[0][0].tokens == []
