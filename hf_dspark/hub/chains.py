"""Importer of the recursive drafters: EAGLE-3 of DeepSpec, SafeAILab, SpecForge and speculators."""

from hf_dspark.modeling import Eagle3Config, Eagle3Drafter

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

MODEL = Eagle3Drafter


def our_name(tensor: str, family: str) -> str:
    return tensor


def their_name(tensor: str, family: str) -> str:
    return tensor.replace("layers.0.", "midlayer.") if family == "eagle3" else tensor


def stated(config: dict, family: str, given: dict[str, Fact], num_target_layers: int | None) -> dict[str, Fact]:
    """Facts the config states, overruled by `given` ones. Layer ids become 0-based layer outputs.

    Raises:
        ValueError: an essential key is missing, contradicts another, or is read in two ways by those who use it.
    """
    facts = stated_body(config["transformer_layer_config"] if family == "eagle3-speculators" else config)
    if found := look_up(config, "num_target_layers"):
        facts["num_target_layers"] = found
        num_target_layers = num_target_layers or found[0]
    facts["target_layer_ids"] = given.get("target_layer_ids") or _layer_ids(config, family, num_target_layers)
    for key in ("target_hidden_size", "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm"):
        if found := look_up(config, key):
            facts[key] = found
    if "norm_before_residual" not in {**facts, **given}:
        facts["norm_before_residual"] = _norm_before_residual(family)
    facts["norm_output"] = given.get("norm_output") or _norm_output(config, family)
    facts["position_offset"] = (int(family == "eagle3-speculators"), "the format's habit")
    if length := _chain_length(config):
        facts["chain_length"] = length
    if name := target_name(config):
        facts["target_name"] = name
    return {**facts, **given}


def _layer_ids(config, family, num_target_layers) -> Fact:
    if family == "eagle3-deepspec" or family == "eagle3" and look_up(config, "target_layer_ids"):
        return required(config, "target_layer_ids")
    found = look_up(config, "eagle_aux_hidden_state_layer_ids")
    if found and family == "eagle3-speculators":
        return [i - 1 for i in found[0]], found[1]
    if num_target_layers is None:
        raise ValueError(
            "Which layers this EAGLE-3 drafter taps follows from the target's number of layers, and no target was "
            "given: pass target=..., or target_layer_ids=[...] (0-based layer outputs)."
        )
    outputs = [1, num_target_layers // 2 - 1, num_target_layers - 4]
    inputs = [i + 1 for i in outputs]
    if found and found[0] not in (outputs, inputs):
        raise ValueError(
            f"config.json says {found[1]}={found[0]}. Some engines read that as outputs of layers and some as inputs, "
            f"and for a target of {num_target_layers} layers it is neither the usual {outputs} nor {inputs}: pass "
            f"target_layer_ids={found[0]} if they are 0-based outputs, or {[i - 1 for i in found[0]]} if they are "
            "inputs."
        )
    return outputs, found[1] if found else "the rule of EAGLE-3"


def _norm_before_residual(family) -> Fact:
    if family != "eagle3-speculators":
        return False, "the format's habit"
    raise ValueError(
        "config.json has no norm_before_residual: the library that writes such files then means false, and vLLM reads "
        "it as true. Pass norm_before_residual=False or True, whichever the drafter was trained with."
    )


def _norm_output(config, family) -> Fact:
    found = look_up(config, "norm_output")
    if found is None or family != "eagle3":
        return found or (False, "the format's habit")
    raise ValueError(
        f"config.json says norm_output={found[0]}. The trainer that writes such files means whether the final norm "
        "precedes the head, and the engines that serve them whether the next step reads the normed output. Pass "
        "norm_output=True (next step reads the normed output) or norm_output=False, and with it norm_head=False if "
        "the head reads the raw output."
    )


def _chain_length(config) -> Fact | None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if methods[0].get("speculative_tokens"):
        return methods[0]["speculative_tokens"], "speculative_tokens"
    return look_up(config, "ttt_length")


def measured(shapes: dict, facts: dict[str, Fact], config: dict, family: str) -> dict[str, Fact]:
    """Facts the tensors tell; `shapes` by their names."""
    body = config.get("transformer_layer_config", config)
    seen = measured_body(shapes, facts, class_defaults(body).num_attention_heads)
    seen |= measured_taps(shape_of(shapes, "fc.weight")[1], "fc.weight", seen["hidden_size"][0], facts)
    tensors = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight", "fc_bias": "fc.bias"}
    seen |= {key: (tensor in shapes, tensor) for key, tensor in tensors.items()}
    return {**seen, **measured_vocabulary(shapes)}


def build(values: dict, config: dict) -> Eagle3Config:
    """Our config of all facts, defaults of the body filled in."""
    defaults = class_defaults(config.get("transformer_layer_config", config))
    for key in ("hidden_act", "rms_norm_eps", "max_position_embeddings"):
        values.setdefault(key, getattr(defaults, key))
    return Eagle3Config(**values)
