"""Which published format a checkpoint is in, and which ones nobody should load as something else."""

import re

from .facts import is_gemma4

GEMMA4 = r"^Gemma4(Unified)?(DSpark|Eagle3)Model$"
SUPPORTED = (
    "DeepSpec (DSpark, DFlash, Eagle3 with a Qwen3 or Gemma 4 body), z-lab DFlash, speculators "
    "dspark/dflash/eagle3/mtp, SpecForge dspark/dflash/domino/eagle3, SafeAILab EAGLE-3, the Muse-Glimmer and Gemma 4 "
    "assistants, and our own"
)
SERVERS = "serve it with the engine it was published for (vLLM or SGLang), or train a drafter with hf-dspark"

# What a name or an option gives away, and why it isn't loaded.
REFUSED_ARCHITECTURES = {
    r"^DFlash2": "DFlash2 has convolutions and a candidate selector, and without them it drafts noise",
    r"^PEagle": "P-EAGLE drafts all depths in one pass from a learned mask state, which our EAGLE-3 loop doesn't do",
    r"^Gemma4UnifiedAssistant": "it has no keys and values of its own and reads the target's",
    r"^Qwen35DSpark": "its attention is gated and rotates only part of each head",
    r"MTP": "it names a multi-token-prediction head, which is read from its target (AutoDrafter.from_target)",
    r"DeepseekV2": "its attention is multi-head latent attention",
}
REFUSED_TENSORS = {
    r"(attention|mlp)_conv\.|candidate_selector\.": "DFlash2 has convolutions and a candidate selector",
    r"^mask_hidden$": "P-EAGLE drafts all depths in one pass from a learned mask state",
    r"aux_hidden_norms|\.g_proj\.": "Laguna drafters norm every tap and gate their attention, which must be applied",
    r"attention_sink_bias|\.sinks$": "attention sinks must be applied",
    r"^mtp\.|^mtp_layers\.|\.eh_proj\.": "these are multi-token-prediction heads, which are read from their target "
    "(AutoDrafter.from_target)",
    r"weight_(packed|scale|zero_point)$|\.(qweight|qzeros|scales)$": "the weights are quantised",
    r"\.qkv_proj\.": "queries, keys and values are fused",
}


def refuse(name: str, what: str, why: str, instead: str = SERVERS):
    raise ValueError(f"{name} holds {what}, which can't be loaded here: {why}. Instead, {instead}.")


def detect(name: str, config: dict, tensors: list[str] | None = None) -> str:
    """The family: `hf`, `deepspec`, `zlab`, `specforge`, `domino`, `speculators`, `muse`, `mtp`, `assistant`, or
    `eagle3` and `eagle3-deepspec`, `eagle3-speculators`. Without `tensors` (before weights are opened) only the config
    decides, and "" means undecided.

    Raises:
        ValueError: a format that isn't supported, by name, saying why and what to use.
    """
    arch, model_type = (config.get("architectures") or [""])[0], config.get("model_type", "")
    algorithm = config.get("speculators_model_type") or (config.get("speculators_config") or {}).get("algorithm")
    if model_type.startswith("hf_"):
        return "hf"
    if algorithm == "mtp":
        return "mtp"
    if model_type == "gemma4_assistant":
        return "assistant"
    refuse_unsupported(name, config, arch, tensors or [])
    projector = (config.get("dflash_config") or {}).get("projector_type")
    if algorithm in ("dspark", "dflash"):
        return "speculators"
    if algorithm == "eagle3":
        return "eagle3-speculators"
    if algorithm:
        refuse(name, f"a speculators {algorithm!r} drafter", f"supported are {SUPPORTED}")
    if projector == "domino" or arch == "DominoDraftModel" or _any(tensors, r"^prefix_gru\."):
        return "domino"
    if projector == "dspark" or arch in ("DSparkDraftModel", "Lfm2DSparkDraftModel"):
        return "specforge"
    if projector not in (None, "dflash"):
        refuse(name, f"a drafter with projector_type={projector!r}", f"supported are {SUPPORTED}")
    if model_type == "muse_glimmer_assistant":
        return "muse"
    if re.match(GEMMA4, arch):
        return "eagle3-deepspec" if arch.endswith("Eagle3Model") else "deepspec"
    if arch == "Qwen3DSparkModel":  # with a nested block it's the server form, which borrows embedding and head
        return "specforge" if config.get("dspark_config") or config.get("dflash_config") else "deepspec"
    if arch == "Qwen3Eagle3Model":
        return "eagle3-deepspec"
    if arch == "DFlashDraftModel":
        return "zlab"
    if arch in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM") or config.get("draft_vocab_size"):
        return "eagle3"
    if tensors is None:
        return ""
    if _any(tensors, r"^midlayer\.|^layers\.0\.hidden_norm\."):
        return "eagle3"
    if _any(tensors, r"^fc\.") and not _any(tensors, r"^norm\.|^layers\.0\.input_layernorm\."):
        refuse(
            name,
            "an EAGLE-1 or EAGLE-2 drafter",
            "it reads the target's last state, which our drafters don't",
            "use an EAGLE-3, DFlash or DSpark drafter of this target",
        )
    refuse(name, f"architectures={[arch]}, model_type={model_type!r}", f"known formats are {SUPPORTED}")


def refuse_unsupported(name: str, config: dict, arch: str, tensors: list[str]) -> None:
    for pattern, why in REFUSED_ARCHITECTURES.items():
        if re.search(pattern, arch):
            refuse(name, f"a {arch}", why)
    body = config.get("transformer_layer_config") or config
    if is_gemma4(body) and not re.match(GEMMA4, arch):
        refuse(
            name, f"a drafter with a {body['model_type']} body", "only DeepSpec's layouts are known with such layers"
        )
    if config.get("dspark_noise_token_id") is not None:
        refuse(name, "a DeepSeek-V4 target with an embedded drafter", "the drafter is no checkpoint of its own")
    if config.get("quantization_config") and not config.get("model_type", "").startswith("hf_"):
        refuse(name, "quantised weights", "the importers read plain ones", "use its bfloat16 checkpoint")
    block = config.get("dflash_config") or {}
    for key in ("attention_sink_bias", "attention_value_scale", "conv_kernel_size", "selector_rank"):
        if block.get(key) or config.get(key):
            refuse(name, f"a drafter with {key}={block.get(key) or config.get(key)!r}", "the option must be applied")
    for pattern, why in REFUSED_TENSORS.items():
        if tensor := _any(tensors, pattern):
            refuse(name, f"tensor {tensor}", why)


def _any(tensors: list[str] | None, pattern: str) -> str | None:
    return next((t for t in tensors or () if re.search(pattern, t)), None)
