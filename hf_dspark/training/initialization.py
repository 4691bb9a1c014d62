"""A new drafter for a target: its configuration by the usual rules, and weights to start from."""

import torch

from ..decoding.target import decoder_layers
from ..modeling import DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter

PER_DRAFTED_ID = {"correction.w2.weight", "correction.up.weight", "lm_head.weight", "head.weight"}  # a row each


def default_layer_ids(num_layers: int, count: int = 5) -> list[int]:
    """Taps spread evenly from layer 1 to the third last (DSpark); the middle layer if `count` is 1."""
    if count == 1:
        return [num_layers // 2]
    last = max(1, num_layers - 3)
    return sorted({round(1 + i * (last - 1) / (count - 1)) for i in range(count)})


def new_drafter(target, mask_token_id: int, draft_ids: torch.Tensor | None = None, **options) -> DSparkDrafter:
    """A randomly initialised [`DSparkDrafter`] for `target`, bound to it, in float32 or the target's float64.

    Args:
        target: the model it drafts for; the drafter's layers take its sizes, embedding and head are borrowed.
        mask_token_id (`int`): an id that never occurs in text.
        draft_ids (`torch.Tensor`, *optional*): [Vd] ascending target ids of a reduced vocabulary.
        options: fields of [`DSparkConfig`], over the defaults.
    """
    fields = {**_sizes(target, draft_ids), "mask_token_id": mask_token_id, **options}
    return _bound(DSparkDrafter(DSparkConfig(**fields)), target, draft_ids)


def new_eagle3(target, draft_ids: torch.Tensor | None = None, **options) -> Eagle3Drafter:
    """[`new_drafter`] for an [`Eagle3Drafter`]: `options` are fields of [`Eagle3Config`], `chain_length` the steps
    trained."""
    return _bound(Eagle3Drafter(Eagle3Config(**{**_sizes(target, draft_ids), **options})), target, draft_ids)


def _sizes(target, draft_ids) -> dict:
    text = target.config.get_text_config()
    return {
        "vocab_size": text.vocab_size,
        "draft_vocab_size": None if draft_ids is None else len(draft_ids),
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None),
        "head_dim": getattr(text, "head_dim", None),
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_parameters": getattr(text, "rope_parameters", None),
        "max_position_embeddings": text.max_position_embeddings,
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        "target_layer_ids": default_layer_ids(text.num_hidden_layers),
        "num_target_layers": text.num_hidden_layers,
        "target_name": target.config._name_or_path or None,
    }


def _bound(drafter, target, draft_ids):
    if draft_ids is not None:
        drafter.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    if target.dtype == torch.float64:
        drafter.double()
    return drafter.to(target.device).bind(target)


@torch.no_grad()
def init_from_target(drafter: DSparkDrafter, target) -> list[str]:
    """Start the drafter's layers from the target's last ones, wherever shapes allow; return what was taken.

    The context starts as the last tap alone, normed as the input of the first copied layer is, so that its keys and
    values are close to what that layer sees in the target. Query and key norms the target lacks take the heads' typical
    size.
    """
    layers, ours = decoder_layers(target), drafter.layers
    taken = []

    def take(name, parameter, source):
        if source is not None and parameter.shape == source.shape:
            parameter.copy_(source)
            taken.append(name)

    for i, layer in enumerate(ours):
        source = dict(layers[len(layers) - len(ours) + i].named_parameters())
        for name, parameter in layer.named_parameters():
            take(f"layers.{i}.{name}", parameter, source.get(name))
        if "self_attn.q_norm.weight" not in source:
            _typical_norms(layer)
    decoder = target.get_decoder()
    take("norm.weight", drafter.norm.weight, getattr(getattr(decoder, "norm", None), "weight", None))
    first = layers[len(layers) - len(ours)]
    take(
        "hidden_norm.weight",
        drafter.hidden_norm.weight,
        getattr(getattr(first, "input_layernorm", None), "weight", None),
    )
    if drafter.config.hidden_size == drafter.config.target_hidden_size:
        size = drafter.config.hidden_size
        drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.device, dtype=drafter.dtype)
        taken.append("fc.weight (identity on the last tap)")
    return taken


def _typical_norms(layer) -> None:
    """Let query and key norms keep the size heads have for an input of independent unit entries."""
    scale = layer.input_layernorm.weight
    for norm, proj in (
        (layer.self_attn.q_norm, layer.self_attn.q_proj),
        (layer.self_attn.k_norm, layer.self_attn.k_proj),
    ):
        if hasattr(norm, "weight"):
            norm.weight.fill_((proj.weight * scale).pow(2).sum(1).mean().sqrt())


def init_from_drafter(drafter, other) -> list[str]:
    """Copy every tensor of `other` that fits by name and shape; return their names.

    The vocabulary map stays, and where the maps differ, so do the tensors with a row for each drafted id.

    Raises:
        ValueError: when nothing fits.
    """
    mine, theirs = drafter.state_dict(), other.state_dict()
    kept = {"d2t"}
    if not torch.equal(drafter.target_ids().cpu(), other.target_ids().cpu()):
        kept |= PER_DRAFTED_ID
    fits = {n: t for n, t in theirs.items() if n in mine and mine[n].shape == t.shape and n not in kept}
    if not fits:
        raise ValueError(
            "init_from names a drafter none of whose tensors fits this one: match its sizes, or drop init_from."
        )
    drafter.load_state_dict(fits, strict=False)
    return sorted(fits)
