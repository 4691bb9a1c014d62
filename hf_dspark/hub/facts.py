"""What a checkpoint is, told twice: by its config and by its tensors' shapes. Where the two differ, nobody guesses."""

import re

from transformers import LlamaConfig, Qwen3Config

BLOCK_KEYS = ("dflash_config", "dspark_config", "eagle_config")
# Computed or redundant tensors that some exporters stored; nothing is lost by not reading them.
REDUNDANT = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

Fact = tuple[object, str]  # a value, and where it was read


def look_up(config: dict, *keys: str) -> Fact | None:
    """The value of the first of `keys` that is set at the top level, in a nested drafter block or with the prefix
    `dspark_`.

    Raises:
        ValueError: two places disagree.
    """
    found = []
    for key in keys:
        places = [(config, key, key), (config, f"dspark_{key}", f"dspark_{key}")]
        places += [(config.get(block) or {}, key, f"{block}.{key}") for block in BLOCK_KEYS]
        found += [(place[k], where) for place, k, where in places if place.get(k) is not None]
    for value, where in found[1:]:
        if value != found[0][0]:
            raise ValueError(
                f"config.json says {found[0][1]}={found[0][0]!r} and {where}={value!r}, which can't both be meant: "
                "remove one."
            )
    return found[0] if found else None


def required(config: dict, *keys: str) -> Fact:
    found = look_up(config, *keys)
    if found is None:
        raise ValueError(
            f"config.json has no {' or '.join(keys)} (at the top level or in {', '.join(BLOCK_KEYS)}), and a default "
            "would be a guess that loads cleanly and drafts noise: add the value the drafter was trained with."
        )
    return found


def reconcile(stated: dict[str, Fact], measured: dict[str, Fact]) -> dict:
    """Values by the tensors, completed by the config.

    Raises:
        ValueError: they contradict, naming both.
    """
    for key in stated.keys() & measured.keys():
        (said, where), (seen, tensor) = stated[key], measured[key]
        if said != seen:
            source = where if where.startswith("argument") else f"config.json says {where}"
            raise ValueError(
                f"{source}={said!r}, and tensor {tensor} says {seen!r}. Believing the wrong one would "
                "load cleanly and draft noise: correct the config, or get the file that belongs to it."
            )
    return {key: value for key, (value, _) in {**stated, **measured}.items()}


# ------------------------------------------------------------------ the decoder body, as every family states it


def stated_body(body: dict) -> dict[str, Fact]:
    """Facts of a decoder config in transformers' spelling, old or new; keys it leaves out stay out."""
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden_act": "hidden_act",
        "rms_norm_eps": "rms_norm_eps",
        "max_position_embeddings": "max_position_embeddings",
    }
    facts = {ours: (body[key], key) for key, ours in names.items() if body.get(key) is not None}
    if body.get("rope_is_neox_style") is False or body.get("is_neox_style") is False:
        raise ValueError(
            "config.json says rope_is_neox_style=false: the drafter rotates neighbouring channels, and ours rotate "
            "halves. Permute q_proj and k_proj (and their norms) to the half layout, or use the engine the drafter "
            "was made for."
        )
    if body.get("model_type") == "qwen3":
        facts["qk_norm"] = (True, "model_type='qwen3', hence qk_norm")
    if is_gemma4(body):
        facts.pop("num_key_value_heads", None)  # of the target's sliding layers
        return facts | stated_gemma4(body)
    facts["rope_parameters"] = (read_rope(body), "rope_parameters")
    return facts


def is_gemma4(body: dict) -> bool:
    return str(body.get("model_type")).startswith("gemma4")


def stated_gemma4(body: dict) -> dict[str, Fact]:
    """Facts of a Gemma 4 body, whose layers are all global ones.

    Raises:
        ValueError: experts or embeddings per layer, which the drafters of this family don't have.
    """
    for key in ("enable_moe_block", "hidden_size_per_layer_input"):
        if body.get(key):
            raise ValueError(
                f"config.json says {key}={body[key]}, and drafters with a Gemma 4 body have neither experts nor "
                "embeddings per layer: get a drafter made for a dense target."
            )
    facts = {"body": ("gemma4", "model_type"), "qk_norm": (True, "model_type='gemma4', hence qk_norm")}
    names = {
        "hidden_activation": "hidden_act",
        "global_head_dim": "head_dim",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention_k_eq_v": "key_is_value",
    }
    facts |= {ours: (body[key], key) for key, ours in names.items() if body.get(key) is not None}
    if body.get("attention_k_eq_v") and body.get("num_global_key_value_heads"):
        facts["num_key_value_heads"] = (body["num_global_key_value_heads"], "num_global_key_value_heads")
    facts["embed_scale"] = (body["hidden_size"] ** 0.5, "hidden_size, whose root scales embeddings")
    rope = body.get("rope_parameters") or {}
    facts["rope_parameters"] = (dict(rope.get("full_attention") or rope), "rope_parameters.full_attention")
    return facts


def measured_body(shapes: dict, stated: dict[str, Fact], default_heads: int) -> dict[str, Fact]:
    """The same facts from tensor shapes; `default_heads` where neither head size nor number of heads is written."""
    q, k = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
    gate = "layers.0.mlp.gate_proj.weight"
    norms = [f"layers.0.self_attn.{x}_norm.weight" for x in "qk" if f"layers.0.self_attn.{x}_norm.weight" in shapes]
    rows = shape_of(shapes, q)[0]
    numbers = [int(m[1]) for m in (re.match(r"layers\.(\d+)\.", name) for name in shapes) if m]
    facts = {
        "hidden_size": (shape_of(shapes, "norm.weight")[0], "norm.weight"),
        "intermediate_size": (shape_of(shapes, gate)[0], gate),
        "num_hidden_layers": (max(numbers) + 1, f"layers.{max(numbers)}.*"),
        "qk_norm": (bool(norms), "layers.0.self_attn.q_norm.weight"),
        "attention_bias": (q.replace("weight", "bias") in shapes, q),
        "attention_output_bias": ("layers.0.self_attn.o_proj.bias" in shapes, "layers.0.self_attn.o_proj.bias"),
    }
    if "key_is_value" in stated:
        values = "layers.0.self_attn.v_proj.weight"
        facts["key_is_value"] = (values not in shapes, values)
    if norms:
        facts["head_dim"] = (shapes[norms[0]][0], norms[0])
    elif "head_dim" not in stated:
        heads = stated["num_attention_heads"][0] if "num_attention_heads" in stated else default_heads
        facts["head_dim"] = (rows // heads, q)
    head_dim = facts.get("head_dim", stated.get("head_dim"))[0]
    facts["num_attention_heads"] = (rows // head_dim, q)
    facts["num_key_value_heads"] = (shape_of(shapes, k)[0] // head_dim, k)
    return facts


def target_name(config: dict) -> Fact | None:
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path") or config.get("target_model_name_or_path")
    return (name, "verifier.name_or_path") if name else None


def shape_of(shapes: dict, name: str) -> tuple[int, ...]:
    if name not in shapes:
        if "layers.0.hidden_norm.weight" in shapes:
            name += f" (or {name.replace('layers.0.', 'midlayer.')})"
        raise ValueError(
            f"The checkpoint has no tensor {name}, which every drafter of this kind has (found {len(shapes)} others): "
            "get the complete file."
        )
    return shapes[name]


def measured_taps(width: int, tensor: str, hidden: int, facts: dict[str, Fact]) -> dict[str, Fact]:
    """The target's hidden size, from the input `width` of the fusion and the number of layer ids in `facts`."""
    count = len(facts["target_layer_ids"][0])
    said = f"{count} layer ids of width hidden_size, hence target_hidden_size"
    facts.setdefault("target_hidden_size", (hidden, said))
    return {"target_hidden_size": (width // count if width % count == 0 else width / count, tensor)}


def measured_vocabulary(shapes: dict) -> dict[str, Fact]:
    """V, Vd, and which of embedding and head the file brings."""
    facts = {
        "own_embedding": ("embed_tokens.weight" in shapes, "embed_tokens.weight"),
        "own_head": ("lm_head.weight" in shapes, "lm_head.weight"),
    }
    for key, tensors in (
        ("vocab_size", ("embed_tokens.weight", "t2d", "markov_head.markov_w1.weight")),
        ("draft_vocab_size", ("lm_head.weight", "d2t", "markov_head.markov_w2.weight", "embed_proj.2.weight")),
    ):
        sizes = {tensor: shapes[tensor][0] for tensor in tensors if tensor in shapes}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The tensors disagree on {key}: {sizes}. Get a file whose tensors belong together.")
        if sizes:
            facts[key] = (next(iter(sizes.values())), next(iter(sizes)))
    return facts


def class_defaults(body: dict):
    """transformers' config of such a body at its default values, which some files leave out."""
    return LlamaConfig() if body.get("model_type") == "llama" else Qwen3Config()


def read_rope(body: dict) -> dict:
    """`rope_parameters` of a body in either spelling (FORMATS: old files have `rope_theta` and `rope_scaling`).

    Raises:
        ValueError: both spellings are there and disagree, or layer types have different ones.
    """
    new = body.get("rope_parameters") or {}
    nested = [value for value in new.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested):
            raise ValueError(
                "rope_parameters differ between layer types, and the layers of our drafters share one: use a drafter "
                "with one rotary embedding."
            )
        new = nested[0]
    old = dict(body.get("rope_scaling") or {})
    old["rope_type"] = old.pop("type", None) or old.get("rope_type") or new.get("rope_type", "default")
    theta = body.get("rope_theta") or old.get("rope_theta") or new.get("rope_theta")
    if new and (theta != new.get("rope_theta", theta) or old["rope_type"] != new.get("rope_type", "default")):
        raise ValueError(
            f"config.json states two rotary embeddings, rope_parameters={new} and "
            f"rope_theta={body.get('rope_theta')}, rope_scaling={body.get('rope_scaling')}: remove the wrong one."
        )
    rope = {**old, **new, "rope_theta": theta or class_defaults(body).default_theta}
    rope["rope_type"] = "default" if rope.get("rope_type") in (None, "mrope") else rope["rope_type"]
    if rope["rope_type"] == "default":  # sections of multimodal targets and partial factors, copied but not used
        return {"rope_type": "default", "rope_theta": float(rope["rope_theta"])}
    return rope
