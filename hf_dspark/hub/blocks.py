"""Importer of block drafters (DSpark, DFlash, Domino): DeepSpec, z-lab, SpecForge, speculators, transformers."""

from hf_dspark.modeling import DSparkConfig, DSparkDrafter

from .facts import (
    Fact,
    class_defaults,
    look_up,
    measured_body,
    measured_taps,
    measured_vocabulary,
    required,
    shape_of,
    stated_body,
    target_name,
)

# Prefixes of their tensor names and of ours; what isn't listed is called the same.
RENAMES = {
    "markov_head.markov_w1.": "correction.w1.",
    "markov_head.markov_w2.": "correction.w2.",
    "markov_head.gate_proj.": "correction.gate.",
    "markov_head.joint_proj.": "correction.joint.",
    "prefix_gru.": "correction.gru.",
    "embed_proj.0.": "correction.down.",
    "embed_proj.2.": "correction.up.",
    "confidence_head.proj.": "confidence.",
}
MODEL = DSparkDrafter
MUSE_RENAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
HEAD_TYPES = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
W1 = "markov_head.markov_w1.weight"


def our_name(tensor: str, family: str) -> str:
    for theirs, ours in (RENAMES | MUSE_RENAMES if family == "muse" else RENAMES).items():
        if tensor.startswith(theirs):
            return ours + tensor.removeprefix(theirs)
    return tensor


def their_name(tensor: str, family: str) -> str:
    for theirs, ours in (RENAMES | MUSE_RENAMES if family == "muse" else RENAMES).items():
        if tensor.startswith(ours):
            return theirs + tensor.removeprefix(ours)
    return tensor


def stated(config: dict, family: str, given: dict[str, Fact], num_target_layers: int | None) -> dict[str, Fact]:
    """Facts the config states, overruled by `given` ones. Layer ids become 0-based layer outputs.

    Raises:
        ValueError: an essential key is missing, or contradicts another.
    """
    body = config["transformer_layer_config"] if family == "speculators" else config
    facts = stated_body(body)
    for key in ("block_size", "mask_token_id"):
        facts[key] = given.get(key) or required(config, key)
    facts["target_layer_ids"] = given.get("target_layer_ids") or _layer_ids(config, family)
    for key, ours in (
        ("num_target_layers", "num_target_layers"),
        ("target_hidden_size", "target_hidden_size"),
        ("draft_vocab_size", "draft_vocab_size"),
        ("confidence_temperatures", "confidence_temperatures"),
        ("markov_rank", "markov_rank"),
        ("enable_confidence_head", "confidence_head"),
        ("confidence_head_with_markov", "confidence_with_markov"),
        ("gru_hidden_dim", "gru_hidden_size"),
        ("emb_dim", "correction_size"),
        ("pure_draft_prefix_len", "pure_draft_prefix_len"),
    ):
        if found := look_up(config, key):
            facts[ours] = found
    _state_head(config, facts)
    _state_layers(config, body, family, facts)
    if anchor := given.get("sample_from_anchor") or stated_anchor(config, family):
        facts["sample_from_anchor"] = anchor
    if name := target_name(config):
        facts["target_name"] = name
    return {**facts, **given}


def _layer_ids(config, family):
    if family != "speculators":
        return required(config, "target_layer_ids")
    ids, where = required(config, "aux_hidden_state_layer_ids")
    return [i - 1 for i in ids], f"{where} (its inputs of layers, less one)"


def _state_head(config, facts):
    rank, kind = facts.get("markov_rank"), look_up(config, "markov_head_type")
    if rank and rank[0] == 0:
        facts["correction_head"] = ("none", rank[1])
        del facts["markov_rank"]
    elif kind:
        facts["correction_head"] = (HEAD_TYPES.get(kind[0], kind[0]), kind[1])


def _state_layers(config, body, family, facts):
    """Sliding layers: which, how wide, causal or not. Their meaning differs between the stacks that trained them."""
    count = facts["num_hidden_layers"][0] if "num_hidden_layers" in facts else None
    window, types = body.get("sliding_window"), body.get("layer_types")
    block = config.get("dflash_config") or {}
    if types is None and family == "muse":
        types = ["sliding_attention"] * count
    if types is None and body.get("use_sliding_window") and window:
        first = body.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    sliding = bool(types) and "sliding_attention" in types
    if types:
        facts["layer_types"] = (list(types), "layer_types")
    if sliding and body.get("use_sliding_window") is False or block.get("use_swa") and not sliding:
        raise ValueError(
            f"config.json has layer_types={types}, use_sliding_window={body.get('use_sliding_window')} and "
            f"dflash_config.use_swa={block.get('use_swa')}, which contradict each other: set layer_types to what the "
            "drafter was trained with, and remove the other keys."
        )
    causal = look_up(config, "causal", "is_causal")
    if causal and causal[0] and (not types or "full_attention" in types):
        raise ValueError(
            f"config.json says {causal[1]}=true: full-attention layers would be causal inside the block, and ours see "
            "the whole block. Serve this drafter with the engine it was published for."
        )
    if not sliding:
        return
    if block.get("swa_window_size") not in (None, window):
        raise ValueError(
            f"config.json says sliding_window={window} and dflash_config.swa_window_size={block['swa_window_size']}: "
            "remove the wrong one."
        )
    # Muse counts its window inclusively on both sides; speculators measures it from the anchor, the others from each
    # slot.
    facts["sliding_window"] = (window + 1 if family == "muse" and window else window, "sliding_window")
    facts["window_from"] = ("anchor" if family == "speculators" else "slot", "sliding_window")
    by_default = family != "muse" and not config.get("sliding_window_non_causal", False)
    facts["causal_block"] = causal or (by_default, "sliding_window_non_causal")


def stated_anchor(config: dict, family: str) -> Fact | None:
    """Whether slot k predicts p + k + 1, from any of the keys that say so, else by the rule of the format."""
    said = [look_up(config, "sample_from_anchor")]
    said.append(look_up(config, "shift_label") if family == "domino" else None)
    bonus = config.get("dspark_bonus_anchor")
    said.append(None if bonus is None else (not bonus, "dspark_bonus_anchor (negated)"))
    said = [fact for fact in said if fact]
    for value, where in said:
        if not isinstance(value, bool):
            raise ValueError(f"config.json says {where}={value!r}, and a true or a false is needed: correct it.")
        if value != said[0][0]:
            raise ValueError(f"config.json says {said[0][1]}={said[0][0]} and {where}={value}: remove the wrong one.")
    if said:
        return said[0]
    if family == "speculators":
        return _speculators_anchor(config)
    by_rule = {"deepspec": True, "specforge": True, "domino": False, "zlab": False, "muse": False}
    return (by_rule[family], f"(absent; the rule for {family})")


def _speculators_anchor(config) -> Fact | None:
    """Files that predate the key mean anchor-is-bonus, but proposing a whole block says otherwise: left open then."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    whole = methods[0].get("speculative_tokens") == config.get("block_size")
    return None if whole else (False, "(absent; the rule for speculators)")


def measured(shapes: dict, facts: dict[str, Fact], config: dict, family: str) -> dict[str, Fact]:
    """Facts the tensors tell; `shapes` by their names. Drops stated facts that mean nothing for these tensors."""
    body = config.get("transformer_layer_config", config)
    seen = measured_body(shapes, facts, class_defaults(body).num_attention_heads)
    hidden, fc = seen["hidden_size"][0], "encoder.fc.weight" if family == "muse" else "fc.weight"
    seen |= measured_taps(shape_of(shapes, fc)[1], fc, hidden, facts) | _measured_head(shapes)
    if "markov_rank" in seen:
        # A fork that calls DSpark weights DFlash doesn't say which of the two block layouts it keeps.
        if family == "zlab" and facts["sample_from_anchor"][1].startswith("(absent"):
            del facts["sample_from_anchor"]
    elif "markov_rank" in facts:
        seen["markov_rank"] = (0, f"{W1} (absent)")
    confidence = "confidence_head.proj.weight"
    seen["confidence_head"] = (confidence in shapes, confidence)
    if confidence in shapes:
        seen["confidence_with_markov"] = (shapes[confidence][1] != hidden, confidence)
    else:
        facts.pop("confidence_with_markov", None)
    return {**seen, **measured_vocabulary(shapes)}


def _measured_head(shapes):
    def has(prefix):
        return any(name.startswith(prefix) for name in shapes)

    if has("markov_head."):
        kind = "rnn" if has("markov_head.joint_proj.") else "gated" if has("markov_head.gate_proj.") else "markov"
        return {"correction_head": (kind, "markov_head.*"), "markov_rank": (shape_of(shapes, W1)[1], W1)}
    if has("prefix_gru."):
        gru, down = "prefix_gru.weight_hh_l0", "embed_proj.0.weight"
        return {
            "correction_head": ("domino", "prefix_gru.*"),
            "gru_hidden_size": (shape_of(shapes, gru)[1], gru),
            "correction_size": (shape_of(shapes, down)[0], down),
        }
    return {"correction_head": ("none", "markov_head.* (absent)")}


def build(values: dict, config: dict) -> DSparkConfig:
    """Our config of all facts, defaults of the body filled in."""
    defaults = class_defaults(config.get("transformer_layer_config", config))
    for key in ("hidden_act", "rms_norm_eps", "max_position_embeddings"):
        values.setdefault(key, getattr(defaults, key))
    values.setdefault("markov_rank", 0)
    if values["mask_token_id"] >= values["vocab_size"]:
        raise ValueError(
            f"mask_token_id={values['mask_token_id']} lies outside the vocabulary of {values['vocab_size']}: set the "
            "id the drafter was trained with."
        )
    return DSparkConfig(**values)
