"""Multi-token-prediction heads: out of a target's own checkpoint, or in the layout of the speculators library."""

import re

import torch
from transformers import AutoConfig

from hf_dspark.modeling import MTPConfig, MTPDrafter
from hf_dspark.modeling.configuration_mtp import block_config_of
from hf_dspark.modeling.drafter import check_target
from hf_dspark.modeling.modeling_mtp import skeleton

from .checkpoint import Checkpoint
from .facts import target_name

# Their names and ours, of what lies around the decoder block; everything else is the block's.
PARTS = {
    "enorm": "enorm", "pre_fc_norm_embedding": "enorm", "token_layernorm": "enorm",
    "hnorm": "hnorm", "pre_fc_norm_hidden": "hnorm", "hidden_layernorm": "hnorm",
    "eh_proj": "eh_proj", "fc": "eh_proj", "input_proj": "eh_proj",
    "shared_head.norm": "post_norm", "norm": "post_norm", "final_layernorm": "post_norm",
}  # fmt: skip
COPIES = {"embed_tokens": "embed_tokens", "shared_head.head": "lm_head"}
FAULTS = {"missing": "missing", "unknown": "unexpected", "of another shape": "mismatched"}
# Options of a target's config that change what its heads compute, and that aren't applied here.
REFUSED = (
    "chain_hidden_post_norm",
    "logits_mup_width_multiplier",
    "logits_scaling",
    "logit_scale",
    "unpadded_vocab_size",
)


def heads_of(target, overrides=None, revision=None, dtype=None, **hub) -> MTPDrafter:
    """The heads that lie in the checkpoint a target was loaded from, which transformers passes over.

    Of a sharded checkpoint only the shards that hold them are fetched. An embedding and a head that are stored with
    them are the target's, if equal. `overrides`: fields of [`MTPConfig`]. `dtype`: the target's by default. `hub`: as
    in [`Checkpoint.open`].

    Raises:
        ValueError: there are none, or a tensor is missing, unknown or of another shape.
    """
    name, text = target.config._name_or_path, target.config.get_text_config()
    if not name:
        raise ValueError(
            f"This {type(target).__name__} was built in memory, so no checkpoint is known that could hold heads: load "
            "it with from_pretrained, or use AutoDrafter.from_pretrained with a drafter."
        )
    checkpoint = Checkpoint.open(name, revision=revision or getattr(target.config, "_commit_hash", None), **hub)
    places = {file_name: place_of(file_name, text.num_hidden_layers) for file_name in checkpoint.names}
    found = {place: file_name for file_name, place in places.items() if place}
    if not found:
        raise ValueError(
            f"{name} holds no multi-token-prediction heads (no tensors mtp.* or model.layers.{text.num_hidden_layers}.*), so "
            "there is nothing to draft with: use AutoDrafter.from_pretrained with a published drafter, or train one."
        )
    files = checkpoint.files_of(set(found.values()).__contains__)
    given = {key: getattr(text, key) for key in REFUSED if getattr(text, key, None) not in (None, 1.0, text.vocab_size)}
    if given:
        raise ValueError(
            f"{name} says {given}, which its heads need applied and ours don't apply: generate without assistant_model."
        )
    tensors = {place: (files[n], n) for place, n in found.items()}
    facts = {"hidden_first": getattr(text, "mtp_hidden_states_first", False), "target_name": name}
    drafter = build(
        text, tensors, {**facts, **(overrides or {})}, name, text.num_hidden_layers, target, dtype or target.dtype
    )
    drafter.config._commit_hash = checkpoint.commit
    return drafter


def import_heads(checkpoint: Checkpoint, target_config=None, overrides=None, dtype=None, **load) -> MTPDrafter:
    """A speculators `mtp` checkpoint. Its `transformer_layer_config` is the target's text config.

    Raises:
        ValueError: more than one head, a target of other sizes, or a tensor that is missing, unknown or of another
            shape.
    """
    config = checkpoint.config
    body = dict(config["transformer_layer_config"])
    text = AutoConfig.for_model(body.pop("model_type"), **body)
    layers = target_config.get_text_config().num_hidden_layers if target_config is not None else text.num_hidden_layers
    facts = {"num_target_layers": layers}
    if name := target_name(config):
        facts["target_name"] = name[0]
    if config.get("num_nextn_predict_layers", 1) != 1:
        raise ValueError(
            f"{checkpoint.name} says num_nextn_predict_layers={config['num_nextn_predict_layers']}, and the format has "
            "one head: get the file that its library writes."
        )
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if methods[0].get("speculative_tokens"):
        facts["chain_length"] = methods[0]["speculative_tokens"]
    facts |= overrides or {}
    if target_config is not None:
        check_target(MTPConfig(block_config_of(text, 1, False), **facts), target_config)
    tensors = {}
    for file_name, file in checkpoint.files.items():
        place = place_of(file_name.replace("mtp_layers.", "mtp.layers."), layers)
        if place is None:
            raise ValueError(f"{checkpoint.name}: unknown tensor {file_name}: get the file that its library writes.")
        tensors[place] = file, file_name
    drafter = build(
        text, tensors, facts, checkpoint.name, layers, dtype=None if dtype in (None, "auto") else dtype, **load
    )
    drafter.config._commit_hash = checkpoint.commit
    return drafter


def place_of(name: str, num_layers: int) -> tuple[int, str] | None:
    """Head number and tensor name in it, of a tensor of a target's checkpoint; `None` for what belongs to the
    target."""
    rest = re.match(r"(?:.*\.)?mtp\.(.*)", name)
    inside = re.match(r"(?:.*\.)?layers\.(\d+)\.(.*)", rest[1] if rest else name)
    if rest:
        return (int(inside[1]), inside[2]) if inside else (0, rest[1])
    if inside and int(inside[1]) >= num_layers:
        return int(inside[1]) - num_layers, inside[2]
    return None


def build(
    text, tensors: dict, facts: dict, name: str, num_target_layers: int, target=None, dtype=None, **load
) -> MTPDrafter:
    """A drafter of tensors `{(head, their name): (file, name in it)}`.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape.
    """
    heads = 1 + max(head for head, _ in tensors)
    experts = any(".experts." in rest for _, rest in tensors)
    weights, blocks, own = {}, {}, {}
    for (head, rest), (file, file_name) in tensors.items():
        part, _, kind = rest.rpartition(".")
        tensor = file.read(file_name)
        if part in PARTS:
            weights[f"layers.{head}.{PARTS[part]}.{kind}"] = tensor
        elif part not in COPIES:
            blocks[f"layers.{head}.{rest}"] = tensor
        elif not is_the_targets(COPIES[part], tensor, target):
            if heads > 1:
                raise ValueError(
                    f"{name}: {file_name} isn't the target's own, and several heads share one embedding and one head "
                    "here: get the checkpoint that this target was published with."
                )
            own[COPIES[part]] = tensor
    facts = {"num_target_layers": num_target_layers, **facts}
    facts |= {"own_embedding": "embed_tokens" in own, "own_head": "lm_head" in own}
    facts.setdefault("final_logit_softcapping", getattr(text, "final_logit_softcapping", None))
    config = MTPConfig(block_config_of(text, heads, experts), **facts)
    kind = dtype or next(iter(weights.values() or blocks.values())).dtype
    weights |= {f"{part}.weight": t for part, t in own.items()} | block_weights(config, blocks, name, kind)
    try:
        drafter = MTPDrafter.from_pretrained(None, config=config, state_dict=weights, dtype=kind, **load)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    drafter.config._name_or_path = name
    drafter.sources = dict.fromkeys(drafter.state_dict(), name)
    return drafter


def is_the_targets(part: str, tensor, target) -> bool:
    """Whether a stored embedding or head is a copy of the target's."""
    if target is None:
        return False
    module = target.get_input_embeddings() if part == "embed_tokens" else target.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if weight is None or weight.device.type == "meta" or weight.shape != tensor.shape:
        return False
    return torch.equal(weight.cpu(), tensor.to(weight.dtype))


def block_weights(config: MTPConfig, tensors: dict, name: str, dtype) -> dict:
    """Weights of the blocks under our names, through transformers' own loading of such a model: it knows which names
    its releases changed and which tensors (experts, say) they lay together."""
    body = config.block()
    body.vocab_size, body.pad_token_id, body.bos_token_id, body.eos_token_id = 1, None, None, None
    decoder = skeleton(body)
    around = {
        k: torch.zeros(t.shape, dtype=dtype) for k, t in decoder.state_dict().items() if not k.startswith("layers.")
    }
    carrier, info = type(decoder).from_pretrained(
        None,
        config=body,
        state_dict=tensors | around,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    faults = {what: sorted(map(str, info[f"{key}_keys"])) for what, key in FAULTS.items()}
    if any(faults.values()):
        listing = "; ".join(f"{what} {', '.join(names)}" for what, names in faults.items() if names)
        raise ValueError(
            f"{name}: the tensors of its heads don't make blocks of {type(carrier).__name__} ({listing}). Half-loaded "
            "they would draft noise: get the complete file, or a release of transformers that knows this layout."
        )
    found = carrier.state_dict()
    return {re.sub(r"^layers\.(\d+)\.", r"layers.\1.block.", k): t for k, t in found.items() if k.startswith("layers.")}
