"""From a published checkpoint to one of our drafters: decide, check, and only then read weights."""

from types import SimpleNamespace

import torch

from hf_dspark.modeling.drafter import check_target

from . import blocks, chains
from .checkpoint import Checkpoint
from .facts import REDUNDANT, class_defaults, reconcile
from .formats import detect, refuse
from .vocabulary import to_offsets

# Formats whose files bring these; elsewhere they are the target's, unless the file brings them all the same.
CARRY_EMBEDDING = ("deepspec", "eagle3-deepspec", "eagle3-speculators")
CARRY_HEAD = (*CARRY_EMBEDDING, "eagle3")
BORROWED = "target (borrowed)"


def import_drafter(checkpoint: Checkpoint, target_config=None, overrides=None, **load):
    """A drafter of any published format. `overrides`: facts in the words of our config that win over the file's own
    config.

    Raises:
        ValueError: an unsupported format, a config that contradicts itself or the tensors, a target of other sizes, or
            a tensor that is missing, unknown or of another shape, each by name.
    """
    config = checkpoint.config
    overrides = {k: (v, f"argument {k}") for k, v in (overrides or {}).items() if v is not None}
    family = detect(checkpoint.name, config)
    if family and target_config is not None:
        check_stated(_stated(config, family, target_config, overrides), target_config)
    names = short_names(checkpoint)
    family = detect(checkpoint.name, config, list(names))
    shapes = {short: checkpoint.shapes[name] for short, name in names.items()}
    facts = _stated(config, family, target_config, overrides)
    importer = _importer(family)
    seen = importer.measured(shapes, facts, config, family)
    if _head_is_tied(config, shapes, family):
        names["lm_head.weight"], seen["own_head"] = names["embed_tokens.weight"], (True, "embed_tokens.weight")
    if family == "zlab" and checkpoint.fetch("mask_embedding.pt"):
        refuse(checkpoint.name, "mask_embedding.pt", "the drafter's mask slots have an embedding of their own")
    values = _completed(reconcile(facts, seen), checkpoint.name, config, target_config)
    check_borrowing(checkpoint.name, family, values, overrides)
    drafter_config = importer.build(values, config)
    if target_config is not None:
        check_target(drafter_config, target_config)
    return _load(checkpoint, names, drafter_config, importer, family, load)


def _importer(family):
    return chains if family.startswith("eagle3") else blocks


def _stated(config, family, target_config, overrides):
    layers = None if target_config is None else target_config.get_text_config().num_hidden_layers
    return _importer(family).stated(config, family, overrides, layers)


def check_borrowing(name, family, values, given) -> None:
    """Refuse a file that lost the embedding or head its format carries; they may differ from the target's."""
    reduced = values.get("draft_vocab_size", values["vocab_size"]) < values["vocab_size"]
    carried = {
        "own_embedding": ("embed_tokens.weight", family in CARRY_EMBEDDING),
        "own_head": ("lm_head.weight", family in CARRY_HEAD or reduced),
    }
    for key, (tensor, expected) in carried.items():
        if expected and not values[key] and key not in given:
            raise ValueError(
                f"{name} has no tensor {tensor}, which files of its format ({family}) carry: get the complete file. "
                f"If the target's own is meant, pass {key}=False to borrow it."
            )


def _head_is_tied(config, shapes, family):
    """A file that was saved tied has no head tensor. Only formats that carry an embedding on purpose are read so."""
    own = "embed_tokens.weight" in shapes and not {"lm_head.weight", "d2t"} & shapes.keys()
    return own and config.get("tie_word_embeddings", False) and family in ("deepspec", "eagle3", "eagle3-deepspec")


def short_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Names without `model.` and `logit_head.` -> names in the file; tensors that can be recomputed are left out."""
    names = {}
    for name in checkpoint.shapes:
        short = name.removeprefix("model.").removeprefix("logit_head.").replace("midlayer.", "layers.0.")
        if REDUNDANT.search(short):
            continue
        if short in names:
            raise ValueError(
                f"{checkpoint.name} holds both {names[short]} and {name}, which mean one tensor: remove one of them."
            )
        names[short] = name
    return names


def check_stated(facts: dict, target_config) -> None:
    """Refuse a wrong target by the drafter's config alone, before any weight is fetched or opened."""
    text = target_config.get_text_config()
    value = {key: fact[0] for key, fact in facts.items()}
    hidden = value.get("target_hidden_size") or value.get("hidden_size") or text.hidden_size
    check_target(
        SimpleNamespace(
            vocab_size=value.get("vocab_size", text.vocab_size),
            hidden_size=value.get("hidden_size", hidden),
            target_hidden_size=hidden,
            num_target_layers=value.get("num_target_layers"),
            target_layer_ids=value["target_layer_ids"],
            target_name=value.get("target_name"),
            own_embedding=True,
            own_head=True,
        ),
        target_config,
    )


def _completed(values, name, config, target_config):
    """The two facts some files leave to the target or to the reader."""
    if "vocab_size" not in values:
        if target_config is not None:
            values["vocab_size"] = target_config.get_text_config().vocab_size
        elif "transformer_layer_config" in config:
            values["vocab_size"] = class_defaults(config["transformer_layer_config"]).vocab_size
        else:
            raise ValueError(f"{name} doesn't say how large its vocabulary is: pass target=..., which knows.")
    if values.get("sample_from_anchor", ...) is None or "block_size" in values and "sample_from_anchor" not in values:
        raise ValueError(
            f"{name} doesn't say whether slot k of a block predicts position p + k + 1 or p + k, and its kind of file "
            "exists both ways; the wrong way loads cleanly and drafts noise. Pass sample_from_anchor=True (a block of "
            f"{values['block_size']} gives {values['block_size']} drafts) or False (one less)."
        )
    return values


def _load(checkpoint, names, config, importer, family, load):
    model_class = importer.MODEL
    plan = {importer.our_name(short, family): name for short, name in names.items() if short not in ("d2t", "t2d")}
    offsets = to_offsets(
        *(checkpoint.read(names[key]) if key in names else None for key in ("d2t", "t2d")),
        config.draft_vocab_size,
        config.vocab_size,
    )
    check_complete(checkpoint, plan, config, importer, family)
    weights = {ours: checkpoint.read(name) for ours, name in plan.items()}
    if load.get("dtype") in (None, "auto"):
        load["dtype"] = weights["fc.weight"].dtype
    if offsets is not None:
        weights["d2t"] = offsets
    drafter = model_class.from_pretrained(None, config=config, state_dict=weights, **load)
    drafter.config._name_or_path, drafter.config._commit_hash = checkpoint.name, checkpoint.commit
    if offsets is not None:
        plan["d2t"] = names.get("d2t", names.get("t2d"))
    drafter.sources = {ours: f"{checkpoint.name}: {name}" for ours, name in plan.items()}
    return drafter


def check_complete(checkpoint, plan: dict[str, str], config, importer, family) -> None:
    """Every tensor of the model has one of its shape in the file, and the other way round; by the file's names."""
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in importer.MODEL(config).state_dict().items() if name != "d2t"}
    faults = [f"missing {importer.their_name(ours, family)}" for ours in expected.keys() - plan.keys()]
    faults += [f"unknown {plan[ours]}" for ours in plan.keys() - expected.keys()]
    for ours in expected.keys() & plan.keys():
        found = checkpoint.shapes[plan[ours]]
        if found != expected[ours]:
            faults.append(f"{plan[ours]} has shape {list(found)} instead of {list(expected[ours])}")
    if faults:
        raise ValueError(
            f"{checkpoint.name}: the tensors don't make a {importer.MODEL.__name__}: {'; '.join(sorted(faults))}. "
            "Half-loaded it would draft noise: get the complete file, or correct the config that describes it."
        )
