"""A new multi-token-prediction head for a target that was trained without one."""

import torch

from ..decoding.target import decoder_layers
from ..modeling import MTPConfig, MTPDrafter
from ..modeling.configuration_mtp import block_config_of
from .initialization import _bound


def new_mtp(target, draft_ids: torch.Tensor | None = None, chain_length: int = 3, **options) -> MTPDrafter:
    """A randomly initialised [`MTPDrafter`] of one head for `target`, bound to it, in float32 or the target's float64.

    Args:
        target: the model it drafts for; the block is of its last layer's kind, embedding and head are borrowed.
        draft_ids (`torch.Tensor`, *optional*): [Vd] ascending target ids of a reduced vocabulary.
        chain_length (`int`, defaults to 3): drafts of a chain, in training and by default in decoding.
        options: further fields of [`MTPConfig`].
    """
    text = target.config.get_text_config()
    experts = any("experts" in name for name, _ in decoder_layers(target)[-1].named_parameters())
    fields = {
        "draft_vocab_size": None if draft_ids is None else len(draft_ids),
        "num_target_layers": text.num_hidden_layers,
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        "target_name": target.config._name_or_path or None,
        "chain_length": chain_length,
        **{key: value for key, value in options.items() if value is not None},
    }
    return _bound(MTPDrafter(MTPConfig(block_config_of(text, 1, experts), **fields)), target, draft_ids)


@torch.no_grad()
def init_mtp(drafter: MTPDrafter, target) -> list[str]:
    """Start the head from the target's last layer and final norm, wherever shapes allow; return what was taken.

    The projection starts as the state alone, so that the block sees what it would see behind the target's last layer.
    """
    head, source, taken = drafter.layers[0], dict(decoder_layers(target)[-1].named_parameters()), []
    for name, parameter in head.block.named_parameters():
        if name in source and source[name].shape == parameter.shape:
            parameter.copy_(source[name])
            taken.append(f"layers.0.block.{name}")
    norm = getattr(getattr(target.get_decoder(), "norm", None), "weight", None)
    if norm is not None and norm.shape == head.post_norm.weight.shape:
        head.post_norm.weight.copy_(norm)
        taken.append("layers.0.post_norm.weight")
    size = drafter.config.hidden_size
    first = 0 if drafter.config.hidden_first else size
    head.eh_proj.weight[:, first : first + size] += torch.eye(size, device=drafter.device, dtype=drafter.dtype)
    return [*taken, "layers.0.eh_proj.weight (identity on the state)"]
