"""Importer of Gemma 4's assistant, a model that transformers knows: its config and weights are kept as they are."""

import json
from pathlib import Path

from hf_dspark.modeling import AssistantConfig, AssistantDrafter
from hf_dspark.modeling.configuration_assistant import TYPES
from hf_dspark.modeling.drafter import check_target

from .checkpoint import Checkpoint

NOT_OF_A_BODY = ("architectures", "dtype", "transformers_version", "_name_or_path")


def import_assistant(checkpoint: Checkpoint, target=None, overrides=None, dtype=None, **load) -> AssistantDrafter:
    """An [`AssistantDrafter`]; its target's config says which layers share their keys and values.

    Raises:
        ValueError: no target, one of other sizes, or a tensor that is missing, unknown or of another shape.
    """
    if target is None:
        raise ValueError(
            f"{checkpoint.name} is an assistant that reads keys and values of its target, whose config says which, and "
            "no target was given: pass target=...."
        )
    text = target.config.get_text_config()
    facts = {"key_value_layers": sharing_layers(text, checkpoint.name), "num_target_layers": text.num_hidden_layers}
    generation = checkpoint.fetch("generation_config.json")
    drafts = json.loads(Path(generation).read_text()).get("num_assistant_tokens") if generation else None
    if drafts:
        facts["chain_length"] = drafts
    body = {key: value for key, value in checkpoint.config.items() if key not in NOT_OF_A_BODY}
    config = AssistantConfig(body, **{**facts, **(overrides or {})})
    check_target(config, target.config)
    weights = {f"body.{name}": checkpoint.read(name) for name in checkpoint.shapes}
    embedding, head = "body.model.embed_tokens.weight", "body.lm_head.weight"
    if config.body_config().tie_word_embeddings and embedding in weights:
        weights.setdefault(head, weights[embedding])
    kind = next(iter(weights.values())).dtype if dtype in (None, "auto") else dtype
    drafter = AssistantDrafter.from_pretrained(None, config=config, state_dict=weights, dtype=kind, **load)
    drafter.config._name_or_path, drafter.config._commit_hash = checkpoint.name, checkpoint.commit
    drafter.sources = {name: f"{checkpoint.name}: {name.removeprefix('body.')}" for name in drafter.state_dict()}
    return drafter


def sharing_layers(text, name: str) -> list[int]:
    """The target's last layers with full and with sliding attention that have keys and values of their own."""
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    types = list(getattr(text, "layer_types", None) or ())[:own]
    if not set(TYPES) <= set(types):
        raise ValueError(
            f"{name} reads keys and values of a layer with full and one with sliding attention, and this {text.model_type} has "
            f"{sorted(set(types))}: load the target it was trained for."
        )
    return [own - 1 - types[::-1].index(kind) for kind in TYPES]
