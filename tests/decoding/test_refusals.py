"""What the loop can't do exactly is refused, naming the option, the reason and the way out; nothing is ignored."""

import pytest
import tiny
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_dspark import SpeculationConfig


@pytest.fixture
def generate(llama):
    def call(**kwargs):
        defaults = dict(assistant_model=tiny.oracle(llama.texts), max_new_tokens=4, do_sample=False)
        return llama.target.generate(**{**defaults, **kwargs})

    return call


@pytest.fixture
def prompt(llama):
    return llama.prompts[0][None]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (dict(num_beams=2), "set num_beams=1"),
        (dict(dola_layers="high"), "drop it, or drop assistant_model"),
        (dict(use_cache=False), "set use_cache=True"),
        (dict(cache_implementation="quantized"), "can't be rolled back"),
        (dict(cache_implementation="offloaded"), "can't be rolled back"),
        (dict(guidance_scale=1.5), "UnbatchedClassifierFreeGuidance.*without assistant_model"),
        (dict(prompt_lookup_num_tokens=3), "one way only"),
        (dict(assistant_early_exit=1), "one way only"),
        (dict(use_mtp=True), "one way only"),
        (dict(assistant_ensemble_weight=0.5), "changes the output's distribution"),
        (dict(assistant_tokenizer=object()), "shares its target's tokenizer"),
        (dict(token_healing=True), "needs tokenizer"),
        (dict(speculation={"seed": 1}), "SpeculationConfig"),
        (dict(assistant_model="./nowhere"), r"'\./nowhere' is a name.*AutoDrafter"),
        (dict(speculation=SpeculationConfig(confidence_threshold=0.5)), "confidence_head.*confidence_threshold=0"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_options_without_an_exact_form_are_refused(generate, prompt, option, words):
    with pytest.raises(ValueError, match=words):
        generate(input_ids=prompt, **option)


def test_synthid_watermarks_are_refused_by_name(generate, prompt):
    from transformers import SynthIDTextWatermarkingConfig

    config = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    with pytest.raises(ValueError, match="SynthIDTextWatermark.*without assistant_model"):
        generate(input_ids=prompt, do_sample=True, watermarking_config=config)


def test_embeddings_instead_of_ids_are_refused(generate, llama, prompt):
    with pytest.raises(ValueError, match="pass input_ids"):
        generate(inputs_embeds=llama.target.get_input_embeddings()(prompt))


def test_several_rows_with_a_streamer_are_refused(generate, llama):
    class Streamer:
        def put(self, value): ...

        def end(self): ...

    with pytest.raises(ValueError, match="stream one row at a time"):
        generate(**llama.padded(), streamer=Streamer())


def test_a_mask_that_is_not_as_wide_as_the_text_is_refused(generate, prompt):
    for width in (prompt.shape[1] - 2, prompt.shape[1] + 3):
        for mask in (torch.ones(1, width, dtype=torch.long), (torch.arange(width) > 1).long()[None]):
            with pytest.raises(ValueError, match=f"{width} columns for {prompt.shape[1]} tokens"):
                generate(input_ids=prompt, attention_mask=mask)


def test_only_the_new_tokens_beside_a_filled_cache_are_refused(generate, llama, prompt):
    cache = DynamicCache()
    llama.target.generate(prompt, **{tiny.CACHE: cache}, max_new_tokens=2, do_sample=False)
    mask = torch.ones(1, cache.get_seq_length() + prompt.shape[1], dtype=torch.long)
    with pytest.raises(ValueError, match="cached tokens included"):
        generate(input_ids=prompt, attention_mask=mask, **{tiny.CACHE: cache})


@pytest.mark.parametrize("drafted", [True, False])
def test_a_text_shorter_than_the_filled_cache_beside_it_is_refused(generate, llama, prompt, drafted):
    with_drafter = dict(assistant_model=tiny.oracle(llama.texts)) if drafted else {}
    options = dict(return_dict_in_generate=True, max_new_tokens=4, do_sample=False)
    cache = llama.target.generate(prompt, **options, **with_drafter)[tiny.CACHE]
    for text in (prompt, prompt[:, :2]):
        with pytest.raises(ValueError, match=f"input_ids has {text.shape[1]}.*or a fresh cache"):
            generate(input_ids=text, **{tiny.CACHE: cache})


def test_an_empty_row_is_refused(generate):
    with pytest.raises(ValueError, match="Row 1 .* empty prompt"):
        generate(input_ids=torch.full((2, 3), 5), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_positions_of_ones_own_are_refused_unless_they_are_what_the_mask_implies(generate, llama):
    batch = llama.padded()
    implied = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    assert generate(**batch, position_ids=implied).equal(generate(**batch))
    with pytest.raises(ValueError, match="leave position_ids out"):
        generate(**batch, position_ids=implied * 2)


def test_token_types_are_refused_as_they_change_the_text_of_some_targets():
    case = tiny.load_case("gpt2")
    ids = case.prompts[0][None]
    with pytest.raises(ValueError, match="token_type_ids"):
        case.target.generate(
            ids, token_type_ids=torch.ones_like(ids), assistant_model=tiny.oracle([]), max_new_tokens=2
        )


@pytest.mark.parametrize("filled", [False, True])
def test_caches_that_cannot_be_read_back_are_refused_even_when_empty(generate, llama, prompt, filled):
    cache = StaticCache(config=llama.target.config, max_cache_len=32)
    if filled:
        llama.target.generate(prompt, **{tiny.CACHE: cache}, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="StaticCache.*DynamicCache"):
        generate(input_ids=prompt, **{tiny.CACHE: cache})


def tiny_target(model_type, **changes):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **changes)).eval()


def refused(target, match):
    drafter = tiny.oracle([], vocab=target.config.get_text_config().vocab_size)
    with pytest.raises(ValueError, match=match):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4)


def test_encoder_decoder_targets_are_refused():
    config = T5Config(vocab_size=30, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config)
    refused(target, "encoder-decoder.*causal language model")


def test_recurrent_targets_are_refused():
    target = tiny_target("mamba", vocab_size=30, hidden_size=16, num_hidden_layers=2, state_size=4)
    refused(target, "recurrent state|layers of type")
    target = tiny_target(
        "qwen3_next", vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    refused(target, "recurrent state|layers of type")


def test_targets_without_settable_positions_are_refused():
    refused(tiny_target("bloom", vocab_size=30, hidden_size=16, n_layer=2, n_head=2), "position_ids")


def test_targets_with_positions_of_several_components_are_refused():
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
    text = dict(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, rope_parameters=rope,
    )  # fmt: skip
    vision = dict(depth=1, embed_dim=8, hidden_size=16, num_heads=1)
    refused(Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)), "mrope_section")


def test_targets_that_place_tokens_by_slot_are_refused():
    target = tiny_target(
        "falcon", vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True
    )
    refused(target, "ALiBi")
    layers = [[["global", "local"], 1]]
    target = tiny_target("gpt_neo", vocab_size=30, hidden_size=16, num_layers=2, num_heads=2, attention_types=layers)
    refused(target, "local layers")


def test_targets_without_a_cache_are_refused():
    refused(tiny_target("openai-gpt", vocab_size=30, n_embd=16, n_layer=2, n_head=2), "keeps no cache|position_ids")


def test_targets_with_several_streams_per_token_are_refused():
    target = tiny_target(
        "gemma3n_text", vocab_size=30, vocab_size_per_layer_input=30, hidden_size=16, num_hidden_layers=3, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=[16] * 3, hidden_size_per_layer_input=4,
        laurel_rank=4, altup_num_inputs=2, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0] * 3,
        layer_types=["full_attention"] * 3,
    )  # fmt: skip
    refused(target, "several streams")


def test_targets_that_run_a_layer_several_times_are_refused(fresh_target, llama):
    fresh_target.model.layers[1] = fresh_target.model.layers[0]
    with pytest.raises(ValueError, match="several times per token"):
        fresh_target.generate(llama.prompts[0][None], assistant_model=tiny.oracle(llama.texts), max_new_tokens=4)


def test_targets_that_add_layers_to_the_cache_are_refused(fresh_target, llama, monkeypatch):
    forward = fresh_target.model.layers[0].forward

    def adding(*args, **kwargs):
        kwargs[tiny.CACHE].layers.append(kwargs[tiny.CACHE].layers[0])
        return forward(*args, **kwargs)

    monkeypatch.setattr(fresh_target.model.layers[0], "forward", adding)
    with pytest.raises(ValueError, match="several times per token"):
        fresh_target.generate(llama.prompts[0][None], assistant_model=tiny.oracle(llama.texts), max_new_tokens=4)
