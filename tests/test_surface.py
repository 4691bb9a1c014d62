"""What users meet around generate(): the stock engine, pipelines, streamers, per-token outputs, offloaded targets."""

import copy
import inspect
import sys
import threading

import pytest
import tiny
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AsyncTextIteratorStreamer,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from hf_dspark import CopyDrafter, SpeculationConfig, keyed_processors
from hf_dspark.decoding.candidates import DrafterCandidateGenerator
from hf_dspark.decoding.target import FeatureTap

STOCK = SpeculationConfig(engine="stock")
needs_stock = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers' loop runs past EOS before 5.18, so it is refused",
)


@pytest.fixture
def one(llama):
    prompt = llama.prompts[0][None]
    return dict(input_ids=prompt, attention_mask=torch.ones_like(prompt))


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{i}": i for i in range(tiny.V)}
    bare = Tokenizer(models.WordLevel(words, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="w0", bos_token="w1")


def text_of(tokens):
    return " ".join(f"w{t}" for t in tokens)


# ---------------------------------------------------------------------- stock engine


@needs_stock
@pytest.mark.parametrize("make", [tiny.oracle, tiny.good, tiny.always_wrong])
def test_both_engines_write_the_same_greedy_text_in_the_same_rounds(llama, one, make):
    rounds = []
    for speculation in (STOCK, SpeculationConfig()):
        drafter = make(llama.texts, block=4)
        out = llama.target.generate(
            **one, assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False, speculation=speculation
        )
        assert out[0].tolist() == llama.texts[0]
        rounds.append(drafter.last_speculation.acceptance_lengths)
    assert rounds[0] == rounds[1]


@needs_stock
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gate", [None, -1e9])
def test_both_engines_sample_the_same_keyed_text(llama, one, seed, gate):
    drafter = tiny.make_drafter(llama.target)
    config = copy.deepcopy(llama.target.generation_config)
    config.temperature, config.top_k, config.top_p = 0.7, 20, 0.9
    width = one["input_ids"].shape[1]
    call = dict(**one, max_new_tokens=tiny.NEW, do_sample=False)
    plain = llama.target.generate(**call, logits_processor=keyed_processors(config, seed, width))
    for engine in ("own", "stock"):
        out = llama.target.generate(
            **call,
            logits_processor=keyed_processors(config, seed, width),
            assistant_model=drafter,
            speculation=SpeculationConfig(engine=engine, loop_gate=gate, max_draft_stages=3),
        )
        assert out.tolist() == plain.tolist(), engine


@needs_stock
@pytest.mark.parametrize("verification", ["ratio", "match"])
def test_the_stock_engine_samples_and_reports_its_rounds(llama, one, verification):
    out = llama.target.generate(
        **one,
        assistant_model=tiny.make_drafter(llama.target),
        max_new_tokens=tiny.NEW,
        do_sample=True,
        return_dict_in_generate=True,
        speculation=SpeculationConfig(engine="stock", verification=verification, seed=3),
    )
    emitted = out.sequences.shape[1] - one["input_ids"].shape[1]
    assert sum(out.speculation.acceptance_lengths[0]) == emitted - 1  # all but the prefill's
    assert out.speculation.verify_seconds > 0


@needs_stock
def test_the_stock_engine_ignores_left_pads(llama):
    batch = llama.padded()
    row = {k: v[3:4] for k, v in batch.items()}
    out = llama.target.generate(
        **row, assistant_model=tiny.good(llama.texts), max_new_tokens=tiny.NEW, do_sample=False, speculation=STOCK
    )
    assert out[0, -tiny.NEW :].tolist() == llama.new[3]


@needs_stock
@pytest.mark.parametrize(
    "change, words",
    [
        (dict(rows=2), "takes one"),
        (dict(verification="block", do_sample=True), "no block verification"),
        (dict(scheduler="auto"), "measures nothing"),
        (dict(loop_gate="auto"), "measures nothing"),
    ],
)
def test_the_stock_engine_refuses_what_its_loop_lacks(llama, change, words):
    rows, do_sample = change.pop("rows", 1), change.pop("do_sample", False)
    batch = {k: v[:rows] for k, v in llama.padded().items()}
    with pytest.raises(ValueError, match=words):
        llama.target.generate(
            **batch,
            assistant_model=tiny.make_drafter(llama.target),
            max_new_tokens=4,
            do_sample=do_sample,
            speculation=SpeculationConfig(engine="stock", **change),
        )


def test_the_candidate_generator_serves_people_who_build_on_transformers_api(llama, one):
    drafter, prompt = tiny.oracle(llama.texts, block=4), one["input_ids"]
    config = copy.deepcopy(llama.target.generation_config)
    config.max_length = 64
    with FeatureTap(llama.target, drafter.config.target_layer_ids) as tap:
        generator = DrafterCandidateGenerator(drafter, tap, SpeculationConfig(), config, [], prompt)
        assert generator.get_candidates(prompt)[0] is prompt
        out = llama.target(prompt)
        ids = torch.cat([prompt, out.logits[:, -1:].argmax(-1)], 1)
        candidates, logits = generator.get_candidates(ids, model_outputs=out, is_first_iteration=False)
    assert logits is None
    assert candidates[0].tolist() == llama.texts[0][: ids.shape[1] + 4]


# ---------------------------------------------------------------------- pipelines and streamers


@pytest.mark.parametrize("make", [tiny.make_drafter, lambda target: CopyDrafter()], ids=["drafter", "copies"])
def test_a_text_generation_pipeline_takes_the_drafter(llama, tokenizer, make):
    drafter = make(llama.target)
    prompt = text_of(llama.prompts[0].tolist())
    kwargs = dict(max_new_tokens=tiny.NEW, do_sample=False)
    plain = pipeline("text-generation", model=llama.target, tokenizer=tokenizer)(prompt, **kwargs)
    fast = pipeline("text-generation", model=llama.target, tokenizer=tokenizer, assistant_model=drafter)(
        prompt, **kwargs
    )
    assert fast == plain
    assert drafter.last_speculation.tau >= 1


def test_a_text_streamer_prints_the_text(llama, one, tokenizer, capsys):
    llama.target.generate(
        **one,
        assistant_model=tiny.good(llama.texts),
        max_new_tokens=tiny.NEW,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )
    assert capsys.readouterr().out.split() == text_of(llama.new[0]).split()


def test_an_iterator_streamer_hands_over_from_a_thread(llama, one, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    kwargs = dict(
        **one, assistant_model=tiny.good(llama.texts), max_new_tokens=tiny.NEW, do_sample=False, streamer=streamer
    )
    thread = threading.Thread(target=llama.target.generate, kwargs=kwargs)
    thread.start()
    assert "".join(streamer).split() == text_of(llama.new[0]).split()
    thread.join()


def test_an_async_streamer_hands_over(llama, one, tokenizer):
    import asyncio

    async def collect():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
        kwargs = dict(**one, assistant_model=tiny.good(llama.texts), max_new_tokens=tiny.NEW, do_sample=False)
        thread = threading.Thread(target=llama.target.generate, kwargs=kwargs | dict(streamer=streamer))
        thread.start()
        parts = [part async for part in streamer]
        thread.join()
        return "".join(parts)

    assert asyncio.run(collect()).split() == text_of(llama.new[0]).split()


# ---------------------------------------------------------------------- outputs


@pytest.mark.parametrize("engine", ["own", pytest.param("stock", marks=needs_stock)])
def test_hidden_states_attentions_scores_and_logits_are_shaped_as_plain_generates(engine, one):
    target = tiny.make_target("llama", "eager", **tiny.GQA)
    call = dict(**one, max_new_tokens=tiny.NEW, do_sample=False, return_dict_in_generate=True)
    call |= dict(output_hidden_states=True, output_attentions=True, output_scores=True, output_logits=True)
    plain = target.generate(**call)
    drafter = tiny.good([plain.sequences[0].tolist()])
    fast = target.generate(**call, assistant_model=drafter, speculation=SpeculationConfig(engine=engine))
    assert drafter.last_speculation.acceptance_rate > 0.3
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(fast, name), getattr(plain, name)
        assert len(ours) == len(theirs) == tiny.NEW
        for a, b in zip(ours, theirs):
            assert [x.shape for x in a] == [x.shape for x in b]
            for x, y in zip(a, b):
                torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)  # transformers' eager softmax is float32
    for name in ("scores", "logits"):
        for x, y in zip(getattr(fast, name), getattr(plain, name), strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    ours, theirs = (
        target.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (fast, plain)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change, words",
    [(dict(), "one row at a time|one row at a"), (dict(prefill_chunk_size=2, rows=1), "prefill_chunk_size")],
)
def test_hidden_states_of_several_rows_or_of_a_split_prompt_are_refused(llama, change, words):
    batch = {k: v[: change.pop("rows", 4)] for k, v in llama.padded().items()}
    with pytest.raises(ValueError, match=words):
        llama.target.generate(
            **batch,
            **change,
            assistant_model=tiny.make_drafter(llama.target),
            max_new_tokens=4,
            return_dict_in_generate=True,
            output_hidden_states=True,
        )


# ---------------------------------------------------------------------- devices and dtypes


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_an_offloaded_target_writes_the_same_text(llama, place, tmp_path):
    target = copy.deepcopy(llama.target)
    if place == "cpu":
        cpu_offload(target, execution_device="cpu")
    else:
        disk_offload(target, str(tmp_path), execution_device="cpu")
    assert target.device.type == "meta"
    drafter = tiny.make_drafter(llama.target, own_embedding=False, own_head=False).bind(target)
    out = target.generate(**llama.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
    assert tiny.generated(out, max(tiny.LENGTHS), [tiny.NEW] * 4) == llama.new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_drafter_may_have_another_dtype_than_its_target(llama, dtype):
    drafter = tiny.make_drafter(llama.target, draft_vocab_size=40).to(dtype)
    out = llama.target.generate(**llama.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
    assert tiny.generated(out, max(tiny.LENGTHS), [tiny.NEW] * 4) == llama.new


def test_a_text_longer_than_the_training_warns_once(llama, one, monkeypatch):
    from hf_dspark.decoding import loop

    said = []
    monkeypatch.setattr(loop.logger, "warning", lambda text, *args: said.append(text))
    loop.logger.warning_once.cache_clear()
    drafter = tiny.make_drafter(llama.target, trained_length=10)
    for _ in range(2):
        llama.target.generate(**one, assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
    assert len(said) == 1
    assert "10 tokens" in said[0]


def test_the_signature_transformers_inspects_is_its_own():
    from transformers import GenerationMixin

    assert "inputs_tensor" in inspect.signature(GenerationMixin._assisted_decoding).parameters
    assert "hf_dspark" in sys.modules
