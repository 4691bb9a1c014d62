"""Export a drafter to the layouts that vLLM, SGLang and the training libraries read.

Each is written with every key its readers look for, and refused where they have no runtime for the drafter.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from . import block_layouts, chain_layouts, head_layouts

LAYOUTS = {"blocks": block_layouts, "chains": chain_layouts, "heads": head_layouts}
FORMATS = ("deepspec", "speculators", "sglang", "zlab")


def export(drafter, folder, to: str, target=None, dtype=None, allow_unservable: bool = False) -> Path:
    """Write `drafter` to `folder` as `config.json` and safetensors.

    Args:
        drafter ([`DSparkDrafter`], [`Eagle3Drafter`] or [`MTPDrafter`]).
        folder (`str` or `PathLike`): where to.
        to (`str`): `"speculators"` (vLLM), `"deepspec"` (DeepSpec; vLLM with `method: dspark`), `"sglang"` (SGLang) or
            `"zlab"` (plain DFlash: vLLM, SGLang, z-lab's own code).
        target (`PreTrainedModel`, *optional*): gives embedding, head, name and number of layers where the layout asks
            for them and the drafter has none of its own. Defaults to the one the drafter is bound to.
        dtype (`torch.dtype`, *optional*): of the weights. Defaults to the drafter's; servers want bfloat16.
        allow_unservable (`bool`): write a speculators file although vLLM has no runtime for the correction head.

    Returns:
        `Path`: the folder.

    Raises:
        ValueError: the layout can't say what this drafter is, its server can't run it, or a target is missing.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is no export format: set one of {FORMATS}.")
    source = Source(drafter, to, target, allow_unservable)
    published = drafter.config.layouts not in LAYOUTS
    source.refuse_if(published, f"the family {drafter.config.family}", "servers read its published checkpoint as it is")
    source.refuse_unnamed()
    config, tensors = getattr(LAYOUTS[drafter.config.layouts], to)(source)
    dtype = dtype or drafter.dtype
    weights = {name: t.detach().to("cpu", dtype if t.is_floating_point() else None) for name, t in tensors.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if source.config.confidence_temperatures:
        config["confidence_temperatures"] = source.config.confidence_temperatures
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_torch_state_dict({name: t.contiguous() for name, t in weights.items()}, str(folder))
    return folder


def borrow(drafter, target=None) -> list[str]:
    """Drop the drafter's own embedding and head where they are copies of the target's, in place; returns their names.

    Published files often carry such copies, which are most of their size.
    """
    source, dropped = Source(drafter, "own", target), []
    for name, flag in (("embed_tokens", "own_embedding"), ("lm_head", "own_head")):
        if hasattr(drafter, name) and source.is_the_targets(name):
            delattr(drafter, name)
            if name == "embed_tokens":  # some targets scale what they embed
                drafter.config.embed_scale /= getattr(source.target.get_input_embeddings(), "scalar_embed_scale", 1.0)
            setattr(drafter.config, flag, False)
            dropped.append(name)
    return dropped


class Source:
    """A drafter and its target, as the layouts look at them."""

    def __init__(self, drafter, to, target=None, allow_unservable=False):
        self.drafter, self.config, self.to, self.allow_unservable = drafter, drafter.config, to, allow_unservable
        self.target = target or drafter._bound.get("target")

    def refuse_unnamed(self):
        """Options that no layout has a key for."""
        config = self.config
        gemma4, cap = getattr(config, "body", "llama") == "gemma4", config.final_logit_softcapping
        scale = config.hidden_size**0.5 if gemma4 and config.own_embedding else 1.0
        self.refuse_if(config.embed_scale != scale, f"embed_scale={config.embed_scale}", "no layout has that key")
        self.refuse_if(
            gemma4 and self.to != "deepspec", "a Gemma 4 body", "only DeepSpec has one", 'export to "deepspec"'
        )
        self.refuse_if(
            cap is not None and not gemma4, f"final_logit_softcapping={cap}", "no layout has that key for this body"
        )
        self.refuse_if(
            config.attention_bias != config.attention_output_bias,
            f"attention_bias={config.attention_bias} with attention_output_bias={config.attention_output_bias}",
            "every layout has one key for both",
        )

    def refuse_if(self, condition, given, why, instead="keep the drafter in our own format (save_pretrained)"):
        if condition:
            raise ValueError(
                f"The drafter has {given}, which can't be exported to {self.to!r}: {why}. Instead, {instead}."
            )

    def _need_target(self, what):
        if self.target is None:
            raise ValueError(
                f"A {self.to!r} checkpoint needs {what}, and this drafter borrows it from its target: pass target=..., "
                "or bind the drafter first."
            )
        return self.target

    def _weight(self, module, what):
        weight = getattr(module, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.device.type == "meta":
            raise ValueError(
                f"The target's {what} is quantised, wrapped or offloaded, and its plain weights are needed: load the "
                "target in its full precision on one device for the export."
            )
        return weight

    def embedding(self) -> torch.Tensor:
        """[V, D], the drafter's or the target's."""
        if self.config.own_embedding:
            return self.drafter.embed_tokens.weight
        module = self._need_target("the embedding").get_input_embeddings()
        return self._weight(module, "embedding")[: self.config.vocab_size]

    def head(self) -> torch.Tensor:
        """[Vd, D], the drafter's or those rows of the target's."""
        if self.config.own_head:
            return self.drafter.lm_head.weight
        weight = self._weight(self._need_target("the head").get_output_embeddings(), "head")
        return weight[self.drafter.target_ids().to(weight.device)]

    def is_the_targets(self, name: str) -> bool:
        """Whether the drafter's own `embed_tokens` or `lm_head` is a copy of the target's (of the drafted rows)."""
        target = self._need_target(f"a look at the target's {name}")
        own = getattr(self.drafter, name).weight
        if name == "embed_tokens":
            theirs = self._weight(target.get_input_embeddings(), "embedding")[: own.shape[0]]
        else:
            theirs = self._weight(target.get_output_embeddings(), "head")
            theirs = theirs[self.drafter.target_ids().to(theirs.device)]
        return theirs.shape == own.shape and torch.equal(theirs.to(own), own)

    def leave_to_target(self, *names) -> None:
        """Check that leaving out the drafter's own embedding or head loses nothing, as readers take the target's."""
        for name in names:
            lost = hasattr(self.drafter, name) and not self.is_the_targets(name)
            self.refuse_if(lost, f"an own {name} that differs from the target's", "its readers always use the target's")

    def weights(self, their_name) -> dict[str, torch.Tensor]:
        """Everything but embedding, head and vocabulary map, by the layout's names."""
        skip = ("embed_tokens.weight", "lm_head.weight", "d2t")
        return {their_name(name): t for name, t in self.drafter.state_dict().items() if name not in skip}

    def vocabulary(self) -> dict[str, torch.Tensor]:
        """`d2t` offsets int64 [Vd] and `t2d` bool [V] of a reduced vocabulary, nothing of a full one."""
        if not self.reduced:
            return {}
        kept = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        kept[self.drafter.target_ids().cpu()] = True
        return {"d2t": self.drafter.d2t.cpu(), "t2d": kept}

    @property
    def reduced(self) -> bool:
        return self.config.draft_vocab_size < self.config.vocab_size

    def num_target_layers(self) -> int:
        if self.config.num_target_layers is not None:
            return self.config.num_target_layers
        return self._need_target("the number of target layers").config.get_text_config().num_hidden_layers

    def body(self, model_type: str) -> dict:
        """The decoder body in transformers' keys, rotary embedding in both spellings."""
        if self.config.body == "gemma4":
            return self._gemma4_body()
        config, rope = self.config, dict(self.config.rope_parameters)
        default = rope["rope_type"] == "default"
        length = config.max_position_embeddings
        if default and self.target is not None:  # some engines refuse longer contexts than this
            length = max(length, getattr(self.target.config.get_text_config(), "max_position_embeddings", 0))
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        keys += ("head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "vocab_size")
        return {
            "model_type": model_type,
            **{key: getattr(config, key) for key in keys},
            "max_position_embeddings": length,
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if default else {k: v for k, v in rope.items() if k != "rope_theta"},
            "tie_word_embeddings": False,
        }

    def _gemma4_body(self) -> dict:
        config = self.config
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        keys += ("head_dim", "rms_norm_eps", "attention_bias", "vocab_size", "max_position_embeddings")
        local = {"rope_type": "default", "rope_theta": 10000.0}  # of layers that aren't there, but readers build it
        return {
            "model_type": "gemma4_text",
            "target_model_type": "gemma4",
            "target_text_model_type": "gemma4_text",
            **{key: getattr(config, key) for key in keys},
            "global_head_dim": config.head_dim,
            "num_global_key_value_heads": config.num_key_value_heads,
            "attention_k_eq_v": config.key_is_value,
            "hidden_activation": config.hidden_act,
            "final_logit_softcapping": config.final_logit_softcapping,
            "rope_parameters": {"full_attention": dict(config.rope_parameters), "sliding_attention": local},
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
        }

    def architecture(self, kind: str) -> list[str]:
        """DeepSpec's name of the body's class."""
        return [f"{'Gemma4' if self.config.body == 'gemma4' else 'Qwen3'}{kind}"]

    def envelope(self, kind: str, architecture: str, body: dict) -> dict:
        """What every speculators config says."""
        name, architectures = self.config.target_name, None
        if self.target is not None:
            name = name or self.target.config._name_or_path
            architectures = self.target.config.architectures or [type(self.target).__name__]
        self.refuse_if(not name, "no target_name", "vLLM reads the target's name there", "pass target=..., or set it")
        return {
            "architectures": [architecture],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",  # the release whose layout this is
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": self.config.max_block,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": name, "architectures": architectures or []},
            },
            "transformer_layer_config": body,
            "draft_vocab_size": self.config.draft_vocab_size,
            "target_hidden_size": None
            if self.config.target_hidden_size == self.config.hidden_size
            else self.config.target_hidden_size,
            "tie_word_embeddings": False,
        }
