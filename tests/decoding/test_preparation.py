"""Targets that compute a forward by its longest text, or prepare their own inputs: exact, or refused before any
text."""

import copy
import functools

import pytest
import tiny
import torch
from transformers import GenerationMixin

from hf_dspark import SpeculationConfig
from hf_dspark.decoding.preparation import draft_room, position_limits

AT, NEW = 32, 24
LONGROPE = dict(
    rope_type="longrope", rope_theta=100.0, factor=8.0, original_max_position_embeddings=AT,
    short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[4.0, 5.5, 7.0, 8.5],
)  # fmt: skip
DYNAMIC = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)
SHAPE = dict(num_key_value_heads=2, head_dim=8)
TARGETS = {
    "llama longrope": ("llama", dict(**SHAPE, rope_parameters=LONGROPE)),
    "phi3 longrope": (
        "phi3",
        dict(num_key_value_heads=2, rope_parameters=LONGROPE, original_max_position_embeddings=AT),
    ),
    "llama dynamic": ("llama", dict(**SHAPE, rope_parameters=DYNAMIC, max_position_embeddings=AT)),
    "doge": ("doge", dict(**SHAPE, keep_window_size=AT)),
}


@functools.cache
def original(name):
    model_type, changes = TARGETS[name]
    return tiny.make_target(model_type, **changes)


@pytest.fixture(params=TARGETS)
def target(request):
    """A copy: dynamic frequencies remember the longest text."""
    return copy.deepcopy(original(request.param))


def prompt_of(length):
    return torch.randint(3, tiny.V - 1, (length,), generator=torch.Generator().manual_seed(length))


def both(target, prompt, block=4, **options):
    """The text without and with a drafter, each of them from the state the target is in."""
    options = dict(max_new_tokens=NEW) | options
    text = tiny.plain(copy.deepcopy(target), prompt, **options)
    knobs = dict(assistant_model=tiny.good([text], block=block), do_sample=False, **options)
    return text, target.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **knobs)[0].tolist()


@pytest.mark.parametrize("length", [20, AT - 1, AT, AT + 1, AT + 8])
def test_a_text_across_or_behind_the_limit_equals_plain_generation(target, length):
    text, ours = both(target, prompt_of(length))
    assert len(set(text[length:])) > 3
    assert ours == text


@pytest.mark.parametrize("beyond", [-1, 0, 1, 2])
def test_a_text_that_ends_near_the_limit_equals_plain_generation(target, beyond):
    text, ours = both(target, prompt_of(20), max_new_tokens=AT + beyond - 20)
    assert ours == text


@pytest.mark.parametrize("name", ["llama longrope", "llama dynamic"])
def test_a_prefill_in_chunks_may_cross_the_limit(name):
    text, ours = both(copy.deepcopy(original(name)), prompt_of(AT + 8), prefill_chunk_size=8)
    assert ours == text


def test_the_state_an_earlier_text_left_in_dynamic_frequencies_is_respected():
    target = copy.deepcopy(original("llama dynamic"))
    tiny.plain(target, prompt_of(20), max_new_tokens=60)
    text, ours = both(target, prompt_of(AT + 8))
    assert ours == text
    assert text != tiny.plain(copy.deepcopy(original("llama dynamic")), prompt_of(AT + 8), max_new_tokens=NEW)


def test_drafts_are_verified_on_the_far_side_of_longrope_but_one_by_one_under_dynamic_scaling():
    for name, fewest, most in (("phi3 longrope", 2, 23), ("llama dynamic", 22, 23)):
        target, prompt = copy.deepcopy(original(name)), prompt_of(AT + 1)
        drafter = tiny.oracle([tiny.plain(copy.deepcopy(target), prompt, max_new_tokens=NEW)])
        target.generate(prompt[None], assistant_model=drafter, max_new_tokens=NEW, do_sample=False)
        assert fewest <= len(drafter.last_speculation.acceptance_lengths[0]) <= most
        assert (len(drafter.last_speculation.acceptance_lengths[0]) < 5) == (name == "phi3 longrope")


def test_rows_are_taken_together_on_one_side_and_refused_where_they_may_lie_on_both(target):
    prompts = [prompt_of(n) for n in (9, 5, 7)]
    texts = [tiny.plain(target, p, max_new_tokens=14) for p in prompts]
    call = dict(**tiny.padded(prompts), assistant_model=tiny.good(texts, block=4), do_sample=False)
    out = target.generate(**call, max_new_tokens=14)
    assert tiny.generated(out, 9, [14] * 3) == [t[-14:] for t in texts]
    with pytest.raises(ValueError, match=f"from {AT} tokens on.*one row at a time.*within {AT} tokens"):
        target.generate(**call, max_new_tokens=AT)


@pytest.mark.parametrize("name", ["llama longrope", "phi3 longrope"])
def test_rows_that_begin_behind_the_limit_of_longrope_are_taken_together(name):
    target, prompts = original(name), [prompt_of(n) for n in (AT + 1, AT + 7)]
    texts = [tiny.plain(target, p, max_new_tokens=8) for p in prompts]
    drafter = tiny.good(texts, block=4)
    out = target.generate(**tiny.padded(prompts), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert tiny.generated(out, AT + 7, [8, 8]) == [t[-8:] for t in texts]


def test_a_filled_cache_or_chunks_are_refused_where_plain_generation_drops_its_cache():
    target, prompt = original("phi3 longrope"), prompt_of(AT + 8)
    with pytest.raises(ValueError, match="drops a cache.*prefill_chunk_size=8"):
        target.generate(prompt[None], assistant_model=tiny.oracle([]), max_new_tokens=4, prefill_chunk_size=8)
    out = target.generate(prompt[None, :9], max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="drops a cache.*filled cache"):
        target.generate(
            prompt[None], assistant_model=tiny.oracle([]), max_new_tokens=4, **{tiny.CACHE: out[tiny.CACHE]}
        )


def test_the_stock_engine_refuses_to_cross_a_limit(target):
    stock = dict(assistant_model=tiny.oracle([]), speculation=SpeculationConfig(engine="stock"), do_sample=False)
    with pytest.raises(ValueError, match="set engine='own'"):
        target.generate(prompt_of(20)[None], max_new_tokens=NEW, **stock)


def test_limits_are_read_from_every_layer_type_and_only_from_scalings_that_change():
    class Config:
        max_position_embeddings = 64
        rope_parameters = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "yarn", "rope_theta": 1.0}}

    limits = position_limits(Config)
    assert [(limit.at, limit.one_by_one) for limit in limits] == [(AT, False)]
    assert [draft_room(limits, n) for n in (AT - 3, AT, AT + 1)] == [3, 0, float("inf")]
    assert not position_limits(tiny.load_case("llama").target.config)


# ---------------------------------------------------------------------- inputs of a target's own


def with_preparation(target, change):
    """As adapters do it: an attribute of the model, around the method of its class."""
    method = target.prepare_inputs_for_generation

    def prepare(*args, **kwargs):
        return change(method(*args, **kwargs))

    target.prepare_inputs_for_generation = prepare
    return target


def virtual_tokens(inputs):
    mask = inputs["attention_mask"]
    return {**inputs, "attention_mask": torch.cat([mask.new_ones(len(mask), 4), mask], 1)}


def test_adapters_that_change_no_input_are_taken(fresh_target, llama):
    target = with_preparation(fresh_target, lambda inputs: {k: v for k, v in inputs.items() if k != "cache_position"})
    text, ours = both(target, llama.prompts[0])
    assert ours == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (virtual_tokens, "attention_mask"),
        (lambda inputs: {**inputs, "position_ids": inputs["position_ids"] + 1}, "position_ids"),
        (lambda inputs: {**inputs, tiny.CACHE: None}, tiny.CACHE),
        (lambda inputs: {**inputs, "extra": 1}, "extra"),
        (lambda inputs: inputs["nowhere"], "KeyError"),
    ],
)
def test_other_inputs_than_transformers_own_are_refused_by_name(fresh_target, llama, change, words):
    target = with_preparation(fresh_target, change)
    with pytest.raises(ValueError, match=f"prepares its own inputs.*{words}.*merge or disable the adapter"):
        target.generate(llama.prompts[0][None], assistant_model=tiny.oracle(llama.texts), max_new_tokens=4)


def test_adapters_per_row_are_refused(fresh_target, llama):
    def inject(module, args, kwargs, adapter_names):
        return args, kwargs

    hook = functools.partial(inject, adapter_names=["a", "b"])
    fresh_target.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(ValueError, match="adapter_names.*set_adapter"):
        fresh_target.generate(llama.prompts[0][None], assistant_model=tiny.oracle(llama.texts), max_new_tokens=4)


def test_a_model_class_with_the_base_preparation_is_not_tried(llama):
    assert llama.target.prepare_inputs_for_generation.__func__ is GenerationMixin.prepare_inputs_for_generation
