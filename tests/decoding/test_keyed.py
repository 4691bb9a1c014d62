"""`verification="match"` with a seed samples, token for token, what keyed sampling without a drafter samples."""

import copy
import functools
import random
from collections import Counter

import pytest
import tiny
import torch
from transformers import GenerationConfig

from hf_dspark import CopyMemory, SpeculationConfig, keyed_processors
from hf_dspark.verification.probabilities import KeyedNoise

NEW = 7
LATEST: list = [None]  # statistics of the latest configuration
DRAFTERS = {
    "none": dict(correction_head="none", confidence_with_markov=False),
    "markov": dict(),
    "gated": dict(correction_head="gated"),
    "rnn": dict(correction_head="rnn"),
    "domino": dict(
        correction_head="domino", gru_hidden_size=5, correction_size=6, confidence_with_markov=False, block_size=6
    ),
    "anchor is no slot": dict(correction_head="rnn", sample_from_anchor=False),
}


@functools.cache
def target():
    return tiny.make_target(num_hidden_layers=2, **tiny.GQA)


@functools.cache
def drafter(kind: str, reduced: bool):
    vocabulary = dict(draft_vocab_size=40) if reduced else {}
    if kind == "chain":
        return tiny.make_eagle3(target(), target_layer_ids=[-1, 0], **vocabulary)
    if kind == "heads":
        return tiny.make_mtp(target(), heads=2, **vocabulary)
    return tiny.make_drafter(target(), target_layer_ids=[-1, 0], num_hidden_layers=1, **DRAFTERS[kind], **vocabulary)


def draw(seed: int):
    """One random configuration: rows, drafter kind, sampling options, speculation knobs."""
    r = random.Random(seed)
    rows = r.choice([1, 1, 2, 3])
    prompts = [torch.tensor(r.choices(range(3, 60), k=r.randint(1, 8))) for _ in range(rows)]
    kind = r.choice([*DRAFTERS, "chain", "heads", "scripted", "scripted"])
    options = dict(
        temperature=r.choice([0.4, 1.0, 1.7]),
        top_k=r.choice([0, 2, 12, 50]),
        top_p=r.choice([1.0, 0.9, 0.6]),
        min_p=r.choice([None, None, 0.05]),
        typical_p=r.choice([1.0, 1.0, 0.8]),
        repetition_penalty=r.choice([1.0, 1.0, 1.4]),
        no_repeat_ngram_size=r.choice([0, 0, 1]),
        min_new_tokens=r.choice([None, 3]),
        eos_token_id=r.choice([None, r.sample(range(3, 60), 6)]),
        bad_words_ids=r.choice([None, [[t] for t in range(20, 30)] + [[7, 8]]]),
        suppress_tokens=[tiny.PAD],  # n-gram bans of a plain padded batch reach the pads
        pad_token_id=tiny.PAD,
        prefill_chunk_size=r.choice([None, None, 2]),
    )
    knobs = SpeculationConfig(
        verification="match",
        seed=r.choice([seed, -seed, seed << 40]),
        num_draft_tokens=r.choice([None, None, 0, 1, 3, 9]),
        confidence_threshold=r.choice([0.0, 0.0, 0.3, 0.6]) if kind in DRAFTERS else 0.0,
        loop_gate=r.choice([None, None, -1.0, -1e9]),
        max_draft_stages=r.choice([1, 2, 3]),
        scheduler=r.choice([None, None, "auto"]),
        copy=r.choice([None, 3, "auto"]),
    )
    return prompts, kind, r.random() < 0.3, options, knobs


def keyed(prompts, options, seed, **extra):
    """New tokens [B, NEW] of plain generate on keyed noise."""
    batch = tiny.padded(prompts)
    width = batch["input_ids"].shape[1]
    processors = keyed_processors(GenerationConfig(**options), seed, width)
    out = target().generate(
        **batch, **options, do_sample=False, max_new_tokens=NEW, logits_processor=processors, **extra
    )
    return out[:, width:].tolist()


def memory_of(seed: int, texts) -> CopyMemory | None:
    """For half of the configurations: what will be sampled, with wrong tokens in it, so that copies are right and
    wrong."""
    r = random.Random(-seed - 1)
    if r.random() < 0.5:
        return None
    memory = CopyMemory(min_match=1, learns=False)
    for text in texts:
        memory.add([t if r.random() < 0.7 else r.randrange(tiny.V) for t in text])
    return memory


def check(seed: int) -> tuple[int, int]:
    """Compares one configuration; returns drafts accepted and verified."""
    prompts, kind, reduced, options, knobs = draw(seed)
    expected = keyed(prompts, options, knobs.seed)
    if kind == "scripted":
        ours = tiny.good([p.tolist() + new for p, new in zip(prompts, expected)], block=4, taps=[0])
    else:
        ours = drafter(kind, reduced)
    batch = tiny.padded(prompts)
    ours.copy_memory = memory_of(seed, [p.tolist() + new for p, new in zip(prompts, expected)])
    out = target().generate(
        **batch, **options, do_sample=True, max_new_tokens=NEW, assistant_model=ours, speculation=knobs
    )
    assert out[:, batch["input_ids"].shape[1] :].tolist() == expected, f"seed {seed}: {kind}, {options}, {knobs}"
    stats = LATEST[0] = ours.last_speculation
    return sum(map(sum, stats.accepted_lengths)), sum(map(sum, stats.draft_lengths))


@pytest.mark.parametrize("part", range(10))
def test_random_configurations(part):
    counts = [check(seed) for seed in range(20 * part, 20 * part + 20)]
    accepted, verified = map(sum, zip(*counts))
    assert 0.05 < accepted / verified < 0.95, "drafts are right and wrong"


def test_the_configurations_accept_and_reject_copies_of_both_sources():
    sources: Counter = Counter()
    for seed in range(40):
        check(seed)
        for name, counts in LATEST[0].by_source.items():
            sources.update({(name, "accepted"): counts["accepted"], (name, "verified"): counts["verified"]})
    for name in ("copy", "memory", "drafter"):
        assert 0 < sources[name, "accepted"] < sources[name, "verified"], name


@pytest.mark.long
@pytest.mark.parametrize("part", range(50))
def test_many_random_configurations(part):
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        check(seed)


def test_what_the_configuration_leaves_open_is_what_generate_would_use():
    """`top_k=50` above all, which is cut off only where the law is flat."""
    prompt = torch.tensor([[5, 6, 7]])
    config = GenerationConfig(temperature=50.0)
    for seed in range(5):
        processors = keyed_processors(config, seed, 3)
        plain = target().generate(prompt, do_sample=False, max_new_tokens=20, logits_processor=processors)
        sampled = target().generate(
            prompt, do_sample=True, temperature=50.0, max_new_tokens=20, assistant_model=drafter("markov", False),
            speculation=SpeculationConfig(verification="match", seed=seed),
        )  # fmt: skip
        assert sampled.equal(plain)


def test_the_same_processors_work_beside_a_drafter_with_do_sample_off():
    prompt, config = torch.tensor([[5, 6, 7]] * 2), GenerationConfig(temperature=1.5)
    plain = target().generate(
        prompt, do_sample=False, max_new_tokens=9, logits_processor=keyed_processors(config, 4, 3)
    )
    out = target().generate(
        prompt, do_sample=False, max_new_tokens=9, logits_processor=keyed_processors(config, 4, 3),
        assistant_model=drafter("markov", False),
    )  # fmt: skip
    assert out.equal(plain)
    assert not torch.equal(plain[0], plain[1]), "rows have their own noise"


def test_noise_belongs_to_the_row_and_the_token_and_not_to_the_batch():
    prompts, options = [torch.tensor([9, 8, 7, 6]), torch.tensor([5, 4])], dict(temperature=1.3)
    together = keyed(prompts, options, 11)
    processors = keyed_processors(GenerationConfig(**options), 11, 2)
    processors[-1] = KeyedNoise(11, 2, stream=1)
    alone = target().generate(prompts[1][None], do_sample=False, max_new_tokens=NEW, logits_processor=processors)
    assert alone[0, 2:].tolist() == together[1]


@pytest.mark.parametrize("verification", ["ratio", "block"])
@pytest.mark.parametrize("kind", ["markov", "chain", "heads"])
def test_a_rows_sample_does_not_depend_on_the_rest_of_the_batch(verification, kind):
    prompts = [torch.tensor([9, 8, 7, 6]), torch.tensor([5, 4]), torch.tensor([30] * 7)]
    knobs = SpeculationConfig(verification=verification, seed=8, loop_gate=-9.0, max_draft_stages=2)
    args = dict(do_sample=True, max_new_tokens=12, assistant_model=drafter(kind, True), speculation=knobs)
    together = target().generate(**tiny.padded(prompts), **args)[0, 7:]
    assert target().generate(prompts[0][None], **args)[0, 4:].equal(together)


def test_seeds_matter_and_without_one_set_seed_rules():
    prompt = torch.tensor([[5, 6, 7]])

    def run(global_seed, **knobs):
        torch.manual_seed(global_seed)
        return target().generate(
            prompt, do_sample=True, temperature=2.0, max_new_tokens=12, assistant_model=drafter("markov", False),
            speculation=SpeculationConfig(**knobs),
        ).tolist()  # fmt: skip

    for verification in ("match", "ratio", "block"):
        assert run(1, verification=verification) == run(1, verification=verification)
        assert run(1, verification=verification) != run(2, verification=verification)
        assert run(1, verification=verification, seed=3) == run(2, verification=verification, seed=3)
        assert run(1, verification=verification, seed=3) != run(1, verification=verification, seed=4)


@pytest.mark.parametrize("verification", ["match", "ratio", "block"])
def test_a_temperature_near_zero_is_greedy(verification):
    prompt = torch.tensor([5, 6, 7, 8])
    expected = tiny.plain(target(), prompt, max_new_tokens=12)
    ours = tiny.good([expected], taps=[0])
    out = target().generate(
        prompt[None], do_sample=True, temperature=1e-4, max_new_tokens=12, assistant_model=ours,
        speculation=SpeculationConfig(verification=verification),
    )  # fmt: skip
    assert out[0].tolist() == expected


def test_a_copy_of_the_configuration_is_left_as_it_was():
    config = GenerationConfig(temperature=0.7, top_k=9)
    before = copy.deepcopy(config)
    keyed_processors(config, 1, 2)
    assert config == before
