"""Tiny targets whose checkpoints carry multi-token-prediction heads, in the layouts that published ones have."""

import re

import torch
from safetensors.torch import load_file, save_file
from tiny import GQA, make_target, redraw
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_dspark import MTPConfig, MTPDrafter
from hf_dspark.modeling.configuration_mtp import block_config_of

MOE = dict(num_experts_per_tok=2, moe_intermediate_size=16)
GLM = dict(
    **GQA, **MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, partial_rotary_factor=0.5
)
MLA = dict(
    **MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_key_value_heads=4,
)  # fmt: skip
MELLUM = dict(
    **GQA, **MOE, num_experts=4, sliding_window=4, layer_types=["full_attention", "sliding_attention", "full_attention"],
    mlp_layer_types=["dense", "sparse", "dense"],
)  # fmt: skip
# Name -> (model type, options, number of heads, whether they have experts)
CARRIERS = {
    "glm, one head": ("glm4_moe", dict(**GLM, num_nextn_predict_layers=1), 1, True),
    "glm, three heads": ("glm4_moe", dict(**GLM, num_nextn_predict_layers=3), 3, True),
    "deepseek, latent attention": ("deepseek_v3", dict(**MLA, num_nextn_predict_layers=1), 1, True),
    "mellum, window": ("mellum", dict(
        **MELLUM, num_nextn_predict_layers=1, mtp_layer_types=["sliding_attention"], mtp_mlp_layer_types=["dense"],
    ), 1, False),
    "mellum, experts": ("mellum", dict(
        **MELLUM, num_nextn_predict_layers=1, mtp_layer_types=["full_attention"], mtp_mlp_layer_types=["sparse"],
    ), 1, True),
}  # fmt: skip
CARRIERS = {name: carrier for name, carrier in CARRIERS.items() if carrier[0] in CONFIG_MAPPING}
AROUND = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def checkpoint_names(name: str, num_layers: int, deepseek: bool) -> str:
    """A tensor's name in a target's checkpoint, of ours."""
    head, rest = re.match(r"layers\.(\d+)\.(.*)", name).groups()
    if deepseek:
        return f"model.layers.{num_layers + int(head)}." + rest.removeprefix("block.").replace(
            "post_norm", "shared_head.norm"
        )
    for ours, theirs in AROUND.items():
        if rest.startswith(ours):
            return "mtp." + rest.replace(ours, theirs)
    return f"mtp.layers.{head}." + rest.removeprefix("block.")


def apart(name: str, tensor) -> dict:
    """Experts as files hold them, one by one."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    stem, out = name.rpartition(".")[0], {}
    for e, weight in enumerate(tensor):
        parts = (
            {"down_proj": weight}
            if name.endswith("down_proj")
            else dict(zip(("gate_proj", "up_proj"), weight.chunk(2)))
        )
        out |= {f"{stem}.{e}.{part}.weight": w.clone() for part, w in parts.items()}
    return out


def make_heads(target, heads=1, experts=False, seed=3, **changes):
    """Random heads of a target's kind, bound to it."""
    text = target.config.get_text_config()
    config = MTPConfig(block_config_of(text, heads, experts), num_target_layers=text.num_hidden_layers, **changes)
    return redraw(MTPDrafter(config), seed).bind(target)


def save_carrier(name: str, folder, dtype=torch.float32, copies=False, edit=None, vocab=13):
    """A target loaded from a checkpoint that carries random heads; `copies` adds its embedding and head to them."""
    model_type, options, heads, experts = CARRIERS[name]
    target = make_target(model_type, vocab_size=vocab, seed=4, **options).to(dtype)
    target.save_pretrained(folder)
    drafter = make_heads(target, heads, experts)
    weights, layers = load_file(folder / "model.safetensors"), target.config.num_hidden_layers
    for ours, tensor in drafter.state_dict().items():
        theirs = checkpoint_names(ours, layers, model_type != "mellum")
        weights |= {k: t.to(dtype).contiguous() for k, t in apart(theirs, tensor).items()}
    if copies:
        weights[f"model.layers.{layers}.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        weights[f"model.layers.{layers}.shared_head.head.weight"] = (
            target.get_output_embeddings().weight.detach().clone()
        )
    if edit:
        edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    pattern = (
        r"^mtp\." if model_type == "mellum" else "|".join(rf"model\.layers\.{layers + j}\..*" for j in range(heads))
    )
    target._keys_to_ignore_on_load_unexpected = [pattern]  # transformers knows the numbers of released models only
    return target
