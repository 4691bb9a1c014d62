"""Architectures beyond those of tiny.TARGETS: each writes plain generation's text in every batch, or is refused by
name."""

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

NEW = 10
SHAPE = dict(num_key_value_heads=2, head_dim=8)
MAMBA = dict(mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
SMALL = dict(vocab_size=tiny.V, pad_token_id=0, bos_token_id=1, eos_token_id=None)
DECODER = dict(d_model=32, max_position_embeddings=256)
EXACT = {
    "dbrx": dict(
        d_model=32, n_heads=4, n_layers=3, max_seq_len=256, attn_config=dict(kv_n_heads=2, rope_theta=100.0, clip_qkv=8),
        ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, hidden_size=32),
    ),
    "doge": dict(tiny.BODY, **SHAPE),
    "modernbert-decoder": dict(tiny.BODY, global_attn_every_n_layers=2, local_attention=8),
    "phi3": dict(tiny.BODY, num_key_value_heads=2),
    "bert": dict(tiny.BODY, is_decoder=True),
    "roberta": dict(tiny.BODY, is_decoder=True),
    "xglm": dict(DECODER, num_layers=3, attention_heads=4, ffn_dim=40),
}  # fmt: skip
REFUSED = {
    "bert": (tiny.BODY, "encoder.*load it with is_decoder=True"),
    "roberta": (tiny.BODY, "encoder.*load it with is_decoder=True"),
    "electra": (dict(tiny.BODY, embedding_size=32), "encoder.*load it with is_decoder=True"),
    "xlm-roberta": (tiny.BODY, "encoder.*load it with is_decoder=True"),
    "trocr": (dict(DECODER, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=40), "takes no position_ids"),
    "bamba": (
        dict(tiny.BODY, **MAMBA, num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8),
        "recurrent state",
    ),
    "falcon_h1": (
        dict(tiny.BODY, **SHAPE, **MAMBA, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8), "recurrent state",
    ),
    "mamba2": (
        dict(hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8),
        "recurrent state",
    ),
    "zamba2": (
        dict(
            tiny.BODY, num_key_value_heads=4, mamba_d_state=8, mamba_expand=2, mamba_ngroups=1, n_mamba_heads=8,
            chunk_size=8, layers_block_type=["mamba", "hybrid", "mamba"], num_mem_blocks=1,
        ),
        "recurrent state",
    ),
    "lfm2_moe": (
        dict(
            tiny.BODY, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1,
        ),
        "type conv",
    ),
    "longcat_flash": (
        dict(
            hidden_size=32, num_layers=2, num_hidden_layers=4, num_attention_heads=4, ffn_hidden_size=40,
            expert_ffn_hidden_size=16, n_routed_experts=4, zero_expert_num=2, moe_topk=2, q_lora_rank=16, kv_lora_rank=16,
            qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8, max_position_embeddings=256,
        ),
        "no list of 4 decoder layers",
    ),
    "hrm_text": (dict(tiny.BODY, **SHAPE), "decoder layers"),
}  # fmt: skip
TEXT = dict(
    vocab_size=tiny.V, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
    max_position_embeddings=256, **SHAPE,
)  # fmt: skip
VISION = dict(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
)
GEMMA = dict(image_token_index=60, boi_token_index=59, eoi_token_index=58, mm_tokens_per_image=4)
WRAPPERS = {
    "gemma3": dict(
        GEMMA, vision_config=dict(VISION, model_type="siglip_vision_model"),
        text_config=dict(TEXT, sliding_window=6, layer_types=tiny.MIXED, query_pre_attn_scalar=8),
    ),
    "llava": dict(
        image_token_index=60, text_config=dict(TEXT, model_type="llama"),
        vision_config=dict(VISION, model_type="clip_vision_model", projection_dim=16),
    ),
    "smolvlm": dict(image_token_id=60, pad_token_id=0, text_config=dict(TEXT, model_type="llama"), vision_config=VISION),
}  # fmt: skip


def build(model_type, changes, auto=AutoModelForCausalLM):
    try:
        config = AutoConfig.for_model(model_type, **changes)
    except (KeyError, ValueError):
        pytest.skip(f"this transformers has no {model_type}")
    target = tiny.redraw(auto.from_config(config), seed=1)
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, tiny.PAD
    return target.float() if model_type == "xglm" else target  # its mask overflows in float64


def check_exact(target):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, tiny.V - 4, (n,), generator=generator) for n in (9, 5, 7)]
    texts = [tiny.plain(target, p, max_new_tokens=NEW) for p in prompts]
    for rows in (1, 3):
        drafter = tiny.good(texts, block=4)
        out = target.generate(
            **tiny.padded(prompts[:rows]), assistant_model=drafter, max_new_tokens=NEW, do_sample=False
        )
        assert tiny.generated(out, 9, [NEW] * rows) == [t[-NEW:] for t in texts[:rows]]


@pytest.mark.parametrize("model_type", EXACT)
def test_alone_and_in_a_ragged_batch_the_text_is_plain_generations(model_type):
    check_exact(build(model_type, {**SMALL, **EXACT[model_type]}))


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_exact_is_refused_by_the_right_name(model_type):
    changes, words = REFUSED[model_type]
    target = build(model_type, {**SMALL, **changes})
    with pytest.raises(ValueError, match=f"{type(target).__name__}.*{words}"):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=tiny.oracle([]), max_new_tokens=4)


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_multimodal_wrappers_take_prompts_of_text_only(model_type):
    check_exact(build(model_type, WRAPPERS[model_type], AutoModelForImageTextToText))


def test_a_wrapper_that_shifts_its_positions_is_refused():
    changes = dict(
        image_token_index=60, projection_dim=32, hidden_size=32, text_config=dict(TEXT, model_type="gemma"),
        vision_config=dict(VISION, model_type="siglip_vision_model"),
    )  # fmt: skip
    target = build("paligemma", changes, AutoModelForImageTextToText)
    with pytest.raises(ValueError, match="prepares its own inputs.*position_ids"):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=tiny.oracle([]), max_new_tokens=4)
