"""The target model: its decoder layers, the features tapped from them, and one forward with a ragged cache."""

import inspect
import math
from contextlib import suppress
from functools import cached_property
from threading import get_ident

import torch

from . import packed as packed_path
from .cache import LOOPED, TargetCache, attention_masks
from .packed import Layout
from .preparation import check_preparation, draft_room, position_limits, recomputes

UNTRACEABLE = "Unsupported"  # what torch.compile raises; its module is slow to import
FULLGRAPH = (
    "The target's forward was compiled with fullgraph=True, and neither the hooks that read a drafter's features nor "
    "rows of different lengths fit in one graph: compile it without fullgraph=True, or generate without "
    "assistant_model."
)
# What generate() prepares by itself; anything else is an input this loop doesn't know how to continue.
KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
}


def decoder_layers(target) -> torch.nn.ModuleList:
    """The target's decoder layers, whatever its architecture calls them.

    Raises:
        ValueError: if no list of `num_hidden_layers` modules is found.
    """
    count = target.config.get_text_config().num_hidden_layers
    # Some models call their head decoder, so what get_decoder() gives may hold no layers.
    for decoder in (target.get_decoder(), target.base_model):
        for module in decoder.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == count:
                return module
    raise ValueError(
        f"{type(target).__name__} has no list of {count} decoder layers, as its config's num_hidden_layers says, so "
        "its features can't be tapped: use a decoder-only model with standard layers."
    )


def execution_device(model) -> torch.device:
    """Where the model computes; offloaded weights sit on "meta" between calls, and their hooks know."""
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(m, "_hf_hook", None) for m in model.modules())
    return torch.device(next(h.execution_device for h in hooks if getattr(h, "execution_device", None) is not None))


class FeatureTap:
    """Forward hooks on tapped layers, removed on exit. Hooks see every layer's output before the final norm.

    Unlike `output_hidden_states`, whose indices changed meaning between transformers releases, a hook has one meaning.

    Args:
        target: the model. layer_ids (`list[int]`): 0-based layers; -1 is the input of layer 0, and the number of layers
            is the last layer's output behind the final norm.
    """

    def __init__(self, target, layer_ids: list[int]):
        self.layer_ids = list(layer_ids)
        self.layers = decoder_layers(target) if self.layer_ids else []
        self.decoder = target.get_decoder()
        self.shape = (0, 0)  # of the ids of the last forward
        self.layout: Layout | None = None  # of the last forward, where that was packed
        self.captured: dict[int, torch.Tensor] = {}
        self.handles: list = []

    def __enter__(self) -> "FeatureTap":
        thread = get_ident()  # other threads may run the same target: their states are not ours

        def output_of(i):
            def hook(module, args, output):
                if get_ident() == thread:
                    self.captured[i] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        def input_of(module, args, kwargs):
            if get_ident() == thread:
                self.captured[-1] = args[0] if args else kwargs["hidden_states"]

        for i in self.layer_ids:
            if i == -1:
                self.handles.append(self.layers[0].register_forward_pre_hook(input_of, with_kwargs=True))
            else:
                module = self.decoder if i == len(self.layers) else self.layers[i]
                self.handles.append(module.register_forward_hook(output_of(i)))
        return self

    def __exit__(self, *exc) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.captured.clear()

    def features(self, device=None) -> torch.Tensor:
        """[B, T, m*D] of the last forward, taps side by side in the listed order, on `device` (default: the first
        tap's)."""
        if not self.layer_ids:
            return torch.zeros(*self.shape, 0, device=device)
        parts = [self.captured[i] for i in self.layer_ids]
        for i, p in zip(self.layer_ids, parts):
            if p.dim() != 3:
                raise ValueError(
                    f"Layer {i} of this target gives states of shape {tuple(p.shape)}, several streams per token, and "
                    "drafters read one: generate without assistant_model."
                )
        device = device or parts[0].device
        features = torch.cat([p.to(device) for p in parts], -1)
        return features if self.layout is None else self.layout.rows(features)


class Target:
    """A bound target inside one generate call, called with ragged rows."""

    def __init__(self, model, tap: FeatureTap):
        self.model, self.tap = model, tap
        self.config, self.device = model.config.get_text_config(), execution_device(model)
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.keeps_logits = "logits_to_keep" in parameters
        self.limits = position_limits(self.config)
        self.fed = 0
        self.restarts = [limit.at + 1 for limit in self.limits if recomputes(model, limit)]

    @cached_property
    def places(self) -> int | None:
        """Positions that a target with learned position embeddings has; None where positions are computed."""
        limit, words = getattr(self.config, "max_position_embeddings", None) or 0, self.model.get_input_embeddings()
        tables = [m for m in self.model.get_decoder().modules() if isinstance(m, torch.nn.Embedding) and m is not words]
        sizes = [m.num_embeddings for m in tables if limit <= m.num_embeddings <= limit + 8]  # a few have an offset
        return limit if sizes else None

    @property
    def packs(self) -> bool:
        """Whether rows of different widths cost the tokens sent; False while that isn't known."""
        return bool(packed_path.agrees(self.model))

    def draft_room(self, length: int) -> float:
        """Most drafts that can be verified exactly behind `length` committed tokens of a row."""
        return draft_room(self.limits, length)

    def restart(self, ids: torch.Tensor, cache: TargetCache, lengths: list[int]) -> None:
        """Compute the cache of the one row anew where plain generation does; `ids` [1, ...] begins with its `lengths`
        tokens.

        The forward reaches over the limit, so all keys are those of the far side. The anchor is fed again with its
        drafts.
        """
        if self.restarts and lengths[0] in self.restarts:
            cache.lengths = torch.zeros_like(cache.lengths)
            self.forward(ids[:, : lengths[0]], cache, lengths, torch.tensor([lengths[0] - 1], device=self.device))
            cache.lengths = torch.tensor(lengths) - 1

    def room(self, n: int) -> float:
        """Drafts that fit behind `n` tokens before the target's last position; unlimited where the text is past it
        already."""
        limit = getattr(self.config, "max_position_embeddings", None) or 0
        return limit - n if limit >= n else math.inf

    def _positions(self, slots, tree) -> torch.Tensor:
        if tree is None:
            return slots.index(self.device)
        return slots.first.to(self.device)[:, None] + (tree.sum(-1) - 1).to(self.device)

    def new_cache(self, rows: int) -> TargetCache:
        return TargetCache(self.config, rows)

    def forward(self, ids: torch.Tensor, cache: TargetCache, ends, keep=0, tree=None, widths=None, **outputs):
        """One forward over `ids` [A, T] at each row's next slots; the cache counts nothing until `advance`.

        `ends` [A]: where each row's real tokens end; what lies behind is filling, and learned positions may not reach
        so far. `keep`: positions [n] whose logits are wanted, or 0 for all. `tree` bool [A, T, T]: which of the tokens
        each one sees, where they aren't a chain; see [`ancestors`]. `widths` [A]: of each row, the tokens that matter;
        the others' logits and features are of no use. `outputs`: flags such as `output_attentions`.
        Returns the model's output, with logits [A, n or T, V], and leaves the features in `self.tap`; `self.fed` tokens
        were computed.
        """
        layout, agrees, packed = None, False, None
        if widths is not None and sum(widths) < ids.numel():
            layout, agrees = Layout(widths), packed_path.agrees(self.model)
        if agrees:
            return self._packed(ids, cache, ends, tree, layout)
        if agrees is None:
            with suppress(Exception):
                packed = self._packed(ids, cache, ends, tree, layout).logits
        out = self._padded(ids, cache, ends, keep, tree, **outputs)
        if agrees is None:
            packed_path.compare(self.model, layout, out.logits, packed)
        return out

    def _padded(self, ids, cache, ends, keep, tree, **outputs):
        slots, positions = self._place(ids, cache, ends, tree)
        masks = attention_masks(self.model, self.config, slots, self.device, tree)
        out = self._call(cache, ids, positions, masks, keep, outputs)
        if not self.keeps_logits and not isinstance(keep, int):
            out.logits = out.logits[:, keep]
        return out

    def _packed(self, ids, cache, ends, tree, layout: Layout):
        slots, positions = self._place(ids, cache, ends, tree, layout)
        masks = attention_masks(self.model, self.config, slots, self.device, tree, always=True)
        with packed_path.packing(self.config, layout):
            out = self._call(cache, layout.flat(ids), layout.flat(positions), masks, 0, {})
        out.logits = layout.rows(out.logits)
        return out

    def _place(self, ids, cache: TargetCache, ends, tree, layout: Layout | None = None):
        """The slots of the tokens `ids`, and their positions [A, T]."""
        slots = cache.place(ids.shape[1])
        cache.fill.layout, self.fed = layout, ids.numel() if layout is None else layout.total
        if self.tap is not None:
            self.tap.shape, self.tap.layout = tuple(ids.shape), layout
        last = torch.as_tensor(ends, device=self.device)[:, None] - 1
        return slots, torch.minimum(self._positions(slots, tree), last)

    def _call(self, cache: TargetCache, ids, positions, masks, keep, outputs: dict):
        inputs = {
            "input_ids": ids.to(self.device),
            "position_ids": positions,
            "attention_mask": masks,
            self.cache_name: cache,
            "use_cache": True,
            **outputs,
        }
        if self.keeps_logits:
            inputs["logits_to_keep"] = keep
        try:
            with torch.no_grad():
                out = self.model(**inputs, return_dict=True)
        except Exception as error:
            if type(error).__module__ == "torch._dynamo.exc" and type(error).__name__ == UNTRACEABLE:
                raise ValueError(FULLGRAPH) from error
            raise
        finally:
            cache.settle()
        if len(cache.layers) != self.config.num_hidden_layers:
            raise ValueError(LOOPED)
        return out


def check_target_model(model) -> None:
    """Refuse targets the loop can't be exact with, in words.

    Raises:
        ValueError: for targets whose cache can't be rolled back or whose positions can't be set.
    """
    name, text = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model, and drafters read the hidden states of decoder-only targets: use a "
            "causal language model, or transformers' own assistant for this one."
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state that can't be taken back when a draft is rejected: generate without "
            "assistant_model, or use a target with attention layers only."
        )
    odd = sorted(
        set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    )
    if odd:
        raise ValueError(
            f"{name} has layers of type {', '.join(odd)}, whose cache can't be rolled back row by row: generate "
            "without assistant_model, or use a target with attention layers only."
        )
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters or getattr(text, "alibi", False):
        why = "adds ALiBi biases by slot" if getattr(text, "alibi", False) else "takes no position_ids"
        raise ValueError(
            f"{name} {why}, so rows of different lengths can't be placed: generate without assistant_model, or use a "
            "target with rotary or learned positions that takes position_ids."
        )
    if "cache" not in parameters and "past_key_values" not in parameters:
        raise ValueError(
            f"{name} keeps no cache, and drafts are verified on top of one: generate without assistant_model."
        )
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise ValueError(
            f"{name} measures the window of its local layers in cache slots, which rows of different lengths don't "
            "share: generate without assistant_model."
        )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(rope, dict) and rope.get("mrope_section"):
        raise ValueError(
            f"{name} uses multimodal rotary positions (mrope_section), which have three components per token: use its "
            "text-only sibling, or generate without assistant_model."
        )
    if getattr(decoder_layers(model)[0], "is_decoder", None) is False:
        raise ValueError(
            f"{name} is loaded as an encoder (is_decoder=False), in which a token sees those behind it, so drafts "
            "would change what comes before them: load it with is_decoder=True, or generate without assistant_model."
        )
    check_preparation(model)
