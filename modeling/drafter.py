"""What every drafter shares: binding to a target, borrowed embedding and head, the vocabulary map, strict loading."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_speculation import SpeculationConfig
from .packed_blocks import chain_labels

INSTALL = (
    "This drafter needs its decoding library beside it, and only the model files are here: `pip install hf-dspark` "
    "and `import hf_dspark` before calling `generate(assistant_model=...)`."
)


def check_target(config, target_config) -> None:
    """Refuse a target this drafter wasn't made for, by sizes alone (no weights touched).

    Raises:
        ValueError: naming the size that differs.
    """
    text = target_config.get_text_config()
    asks = [
        ("vocab_size", config.vocab_size, text.vocab_size),
        ("hidden size (target_hidden_size)", config.target_hidden_size, text.hidden_size),
    ]
    if config.num_target_layers is not None:
        asks.append(("number of layers (num_target_layers)", config.num_target_layers, text.num_hidden_layers))
    if not (config.own_embedding and config.own_head):
        what = "hidden size, as the embedding or head is borrowed (hidden_size)"
        asks.append((what, config.hidden_size, text.hidden_size))
    for what, ours, theirs in asks:
        if ours != theirs:
            made_for = f" (it was made for {config.target_name})" if config.target_name else ""
            raise ValueError(
                f"This drafter expects a target with {what} {ours}, and {text.model_type} has {theirs}{made_for}: "
                "load the target it was trained for, or train a drafter for this one."
            )
    highest, last = max(config.target_layer_ids), text.num_hidden_layers + getattr(config, "last_tap", -2)
    if highest > last:
        raise ValueError(
            f"target_layer_ids={config.target_layer_ids} taps layer {highest}, and a target of "
            f"{text.num_hidden_layers} layers has taps 0..{last}: the drafter belongs to a deeper target."
        )


def _weight(module) -> torch.Tensor | None:
    """A module's weight; some quantised modules have a function that returns it, packed ones none."""
    weight = getattr(module, "weight", None)
    return weight() if callable(weight) and not isinstance(weight, torch.Tensor) else weight


@dataclass
class DrafterOutput(ModelOutput):
    """What a training forward gives: `loss` if labels were given, else the states of the first and (if another) last
    stage.

    `hidden`: per stage [B, N, K, D], final-normed; `first`: per stage [B, N, D], slot 0 where it doesn't draft, or
        None.
    """

    loss: torch.Tensor | None = None
    hidden: tuple | None = None
    first: tuple | None = None


class Drafter(PreTrainedModel):
    """Base of all drafters: weights and a pure forward. It holds no decoding state and never samples.

    Decoding drives it through `bind`, `new_cache`, `extend`, `start` and `step`; see [`DSparkDrafter`] for shapes.
    """

    is_hf_drafter = True  # what the generate() hook looks for; remote-code copies of the class have it too
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    main_input_name = "features"

    def __init__(self, config):
        super().__init__(config)
        self.speculation = SpeculationConfig.from_dict(config.speculation)
        self.last_speculation = None
        object.__setattr__(self, "_bound", {})  # borrowed modules, out of sight of state_dict, .to() and Trainer
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def __getattr__(self, name):
        # transformers' own assisted loop asks for this first: without the hook, say what is missing. A property can't,
        # as nn.Module puts its own message in place of the property's.
        if name == "generation_config":
            raise AttributeError(INSTALL)
        return super().__getattr__(name)

    def can_generate(self) -> bool:
        return False

    def get_input_embeddings(self):
        return getattr(self, "embed_tokens", None)

    def get_output_embeddings(self):
        return getattr(self, "lm_head", None)

    def save_pretrained(self, *args, ship_code: bool = False, **kwargs):
        """As for every transformers model.

        `ship_code=True` also writes these model files, for `AutoModel.from_pretrained(..., trust_remote_code=True)`
        where the package isn't installed. Drafting with a target needs the package all the same.
        """
        self.config.speculation = self.speculation.to_dict()
        self.config.__dict__.pop("auto_map", None)  # of a checkpoint that shipped its code, which this one may not
        if not ship_code:
            return super().save_pretrained(*args, **kwargs)
        classes = (type(self), "AutoModel"), (type(self.config), "AutoConfig")
        before = [cls._auto_class for cls, _ in classes]
        try:
            for cls, auto in classes:
                cls._auto_class = auto
            return super().save_pretrained(*args, **kwargs)
        finally:
            for (cls, _), auto in zip(classes, before, strict=True):
                cls._auto_class = auto

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **kwargs):
        """As for every transformers model, but strict.

        Raises:
            ValueError: when a tensor is missing, unknown or of another shape, naming it.
        """
        kwargs.setdefault("ignore_mismatched_sizes", True)  # reported below with everything else
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        faults = {k: sorted(map(str, info.get(k, ()))) for k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(faults.values()):
            listing = "; ".join(f"{k.replace('_keys', '')}: {', '.join(v)}" for k, v in faults.items() if v)
            raise ValueError(
                f"The checkpoint doesn't fit {cls.__name__} ({listing}). A half-loaded drafter drafts noise: get the "
                "complete file, or correct the config that describes it."
            )
        return (model, info) if output_loading_info else model

    # ------------------------------------------------------------------ the target

    def bind(self, target) -> "Drafter":
        """Check `target` and borrow its embedding and head: as modules, so that quantised and LoRA targets work.

        Idempotent.
        """
        check_target(self.config, target.config)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        same = [self._bound.get(k) is v for k, v in (("target", target), ("embedding", embedding), ("head", head))]
        if all(same):
            return self
        table = _weight(embedding)
        if self.config.mask_token_id is not None and table is not None and self.config.mask_token_id >= len(table):
            raise ValueError(
                f"mask_token_id={self.config.mask_token_id} lies outside the target's {len(table)} "
                "embeddings: set mask_token_id to the id the drafter was trained with, or resize the target's "
                "embeddings."
            )
        self._bound.update(target=target, embedding=embedding, head=head, rows=None)
        text = target.config.get_text_config()
        for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
            setattr(self.config, name, getattr(text, name, None))
        return self

    def _borrowed(self, what: str):
        if what not in self._bound:
            raise ValueError(
                f"This drafter borrows its {what} from the target and none is bound: call drafter.bind(target), or "
                "pass target=... to AutoDrafter.from_pretrained."
            )
        return self._bound[what]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., D] input embeddings of target ids [...], in the drafter's dtype and on its device."""
        module = self.embed_tokens if self.config.own_embedding else self._borrowed("embedding")
        weight = _weight(module)
        if weight is not None and weight.device.type != "meta":  # offloaded modules move their own inputs
            ids = ids.to(weight.device)
        # A norm inside the target's embedding belongs to the target: drafters were trained on the bare table.
        x = F.embedding(ids, module.weight) if hasattr(module, "embed_norm") else module(ids)
        x = x.to(self.device, self.dtype)
        return x if self.config.embed_scale == 1.0 else x * self.config.embed_scale

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits [..., Vd] of normed states [..., D], at least float32, soft-capped where the config says."""
        if self.config.own_head:
            logits = self.lm_head(hidden)
        else:
            logits = self._borrowed_head(hidden).to(self.device)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _borrowed_head(self, hidden):
        module = self._borrowed("head")
        weight = _weight(module)
        if weight is not None and weight.device.type != "meta":
            hidden = hidden.to(weight.device, weight.dtype if weight.is_floating_point() else hidden.dtype)
        if not hasattr(self, "d2t"):
            return module(hidden)[..., : self.config.vocab_size]
        if type(module) is not nn.Linear or weight.device.type == "meta":  # LoRA, quantised, offloaded: call it whole
            return module(hidden).index_select(-1, self.target_ids().to(hidden.device))
        rows = self._bound["rows"]
        if rows is None or rows.device != weight.device or rows.dtype != weight.dtype:
            rows = self._bound["rows"] = weight.detach()[self.target_ids().to(weight.device)]
        return F.linear(hidden, rows)

    def target_ids(self, draft_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Target ids of `draft_ids` [...]; of the whole draft vocabulary [Vd] when `None`."""
        if draft_ids is None:
            draft_ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return draft_ids + self.d2t[draft_ids] if hasattr(self, "d2t") else draft_ids

    # ------------------------------------------------------------------ training

    def previous_tokens(self, input_ids, anchors, stage: int) -> torch.Tensor:
        """[B, N, K] the true tokens before each draft of a stage (from 0): its anchor first."""
        K = self.config.max_block
        index = anchors[..., None] + stage * K + torch.arange(K, device=anchors.device)
        return input_ids.gather(1, index.clamp(0, input_ids.shape[1] - 1).flatten(1)).unflatten(1, index.shape[1:])

    def draft_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Draft ids of target ids [...]; -100 stays, and is what an id outside the draft vocabulary becomes."""
        if not hasattr(self, "d2t"):
            return labels
        known = self.target_ids()
        place = torch.searchsorted(known, labels.clamp(min=0)).clamp(max=len(known) - 1)
        return torch.where((labels >= 0) & (known[place] == labels), place, -100)

    def _output(self, states, stages: int, input_ids, labels, anchors, position_ids, decay) -> DrafterOutput:
        """What `forward` returns for the `states` (hidden, first) of the first and the last of `stages`; `decay`
        [K]."""
        hidden, first = zip(*states, strict=True)
        if labels is None:
            return DrafterOutput(hidden=hidden, first=first if first[0] is not None else None)
        K, losses = self.config.max_block, []
        wanted = chain_labels(labels, position_ids, anchors, stages * K).split(K, -1)
        for s, h, f in zip((0, stages - 1), hidden, first, strict=False):
            losses.append(self._cross_entropy(h, self.previous_tokens(input_ids, anchors, s), f, wanted[s], decay))
        return DrafterOutput(loss=torch.stack(losses).mean())

    def _cross_entropy(self, hidden, prev, first, labels, decay):
        keep = labels[..., 0] != -100
        _, logits, _ = self.block_logits(hidden[keep], prev[keep], None if first is None else first[keep])
        labels = self.draft_labels(labels[keep])
        weight = decay * (labels != -100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        return (loss.unflatten(0, labels.shape) * weight).sum() / weight.sum().clamp(min=1e-9)
