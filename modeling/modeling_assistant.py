"""Gemma 4's assistant: a few layers without keys and values of their own, which look at the target's."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from .configuration_assistant import TYPES, AssistantConfig
from .draft_cache import DraftCache
from .drafter import Drafter
from .layers import rotate


@dataclass
class AssistantState:
    """A chain on its way, `k` drafts long: `hidden` [B, D] is read next, `pseudo` [B, k, D] predicted the drafts."""

    hidden: torch.Tensor
    pseudo: torch.Tensor
    k: int = 0

    def select(self, rows: torch.Tensor) -> "AssistantState":
        """Rows [R] of the state."""
        return AssistantState(self.hidden[rows], self.pseudo[rows], self.k)


class AssistantDrafter(Drafter):
    """Gemma 4's assistant: a chain of drafts, each from the last state beside the last token's embedding. All steps
    stand at the anchor's position and look at the keys and values of two target layers.

    Those are computed again from the layers' tapped inputs, by the target's own modules, and kept in the draft cache:
    so rows may have any lengths, and the target's cache stays its own business. Decoding protocol as for
    [`Eagle3Drafter`]; nothing is fed to the cache while drafting, and a further stage goes on from the last state.
    """

    config_class = AssistantConfig

    def __init__(self, config: AssistantConfig):
        super().__init__(config)
        if not config.assistant:
            raise ValueError(
                "An AssistantDrafter is one of transformers' assistants, and config.assistant names none: set it."
            )
        self.body = AutoModelForCausalLM.from_config(config.body_config(), attn_implementation="sdpa")
        self.post_init()

    def bind(self, target) -> "AssistantDrafter":
        """As [`Drafter.bind`]; the two layers' modules are borrowed as well.

        Raises:
            ValueError: for a target whose layers aren't Gemma 4's.
        """
        super().bind(target)
        decoder = target.get_decoder()
        layers = [decoder.layers[i] for i in self.config.key_value_layers]
        for i, kind, layer in zip(self.config.key_value_layers, TYPES, layers, strict=True):
            attention = layer.self_attn
            if getattr(attention, "layer_type", None) != kind or not hasattr(attention, "v_norm"):
                raise ValueError(
                    f"key_value_layers={self.config.key_value_layers}: layer {i} of {type(target).__name__} has no {kind} with "
                    "keys and values of its own, and the assistant reads them: load the target it was trained for."
                )
        self._bound |= {"layers": layers, "rotary": decoder.rotary_emb}
        return self

    def keys_values(
        self, kind: int, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, heads, T, d] that the target's layer of `kind` makes of its inputs [B, T, D] at
        `positions`."""
        layer = self._borrowed("layers")[kind]
        attention, weight = layer.self_attn, layer.self_attn.k_proj.weight
        x = layer.input_layernorm(states.to(weight.device))
        k = attention.k_proj(x).unflatten(-1, (-1, attention.head_dim))
        v = k if attention.v_proj is None else attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))
        rope = self._borrowed("rotary")(x, positions.to(x.device), TYPES[kind])
        k, v = rotate(attention.k_norm(k).transpose(1, 2), rope), attention.v_norm(v).transpose(1, 2)
        return k.to(self.device, self.dtype), v.to(self.device, self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, V], at least float32, of the assistant's last states [B, H].

        With ordered embeddings only the tokens of the best few clusters are scored, and the others are impossible.
        """
        body, ordered = self.body, self.body.masked_embedding
        if ordered is None:
            logits = body.lm_head(hidden)
        else:
            best = ordered.centroids(hidden).topk(ordered.centroid_intermediate_top_k, -1).indices
            tokens = ordered.token_ordering.long().view(ordered.num_centroids, -1)[best].flatten(1)
            scores = (body.lm_head.weight[tokens] @ hidden[..., None])[..., 0]
            logits = scores.new_full((len(hidden), self.config.vocab_size), -torch.inf).scatter(1, tokens, scores)
        return logits if logits.dtype == torch.float64 else logits.float()

    # ------------------------------------------------------------------ decoding protocol

    def new_cache(self, first_positions: torch.Tensor) -> DraftCache:
        """An empty cache; `first_positions` [B] are the true positions of the first features to come."""
        return DraftCache(len(TYPES), first_positions)

    def expected_length(self, committed: torch.Tensor) -> torch.Tensor:
        """Cache entries [B] after `committed` [B] tokens: every one but the anchor has a feature."""
        return committed - 1

    def extend(self, cache, features, next_tokens, valid) -> torch.Tensor:
        """Append keys and values of committed tokens; returns the target's last state [B, D]."""
        counts = valid.sum(1).cpu()
        cache.place(features.shape[1])
        positions = cache.positions(self.device)
        *inputs, last = features.chunk(len(TYPES) + 1, -1)
        for kind, states in enumerate(inputs):
            cache.update(*self.keys_values(kind, states, positions), kind)
        cache.advance(counts)
        last = last.to(self.device, self.dtype)
        return last[torch.arange(len(counts), device=self.device), counts.to(self.device) - 1]

    def start(self, cache, anchor, seed, pseudo=None, length: int | None = None) -> AssistantState:
        """A chain behind `anchor` [B], from the target's last state `seed` [B, D] or the previous stage's `pseudo`."""
        hidden = seed if pseudo is None else pseudo[:, -1]
        return AssistantState(hidden, hidden[:, None, :][:, :0])

    def step(self, cache, state: AssistantState, prev: torch.Tensor) -> tuple[torch.Tensor, None, AssistantState]:
        """Logits [B, V] (temperature 1), no confidence, and the next state, after `prev` [B]."""
        lengths = cache.lengths.to(self.device)
        longest = int(cache.lengths.max())
        x = torch.cat([self.embed(prev[:, None]), state.hidden[:, None]], -1)
        shared = {
            kind: (buffer.keys[: len(x), :, :longest], buffer.values[: len(x), :, :longest])
            for kind, buffer in zip(TYPES, cache.layers, strict=True)
        }
        key, window = torch.arange(longest, device=self.device), self.body.config.get_text_config().sliding_window
        seen = key < lengths[:, None]
        near = seen & (key >= lengths[:, None] - 1 - window)
        masks = {kind: mask[:, None, None] for kind, mask in zip(TYPES, (seen, near), strict=True)}
        position = (cache.first.to(self.device) + lengths)[:, None]  # the anchor's, throughout
        out = self.body.model(
            inputs_embeds=self.body.pre_projection(x), attention_mask=masks, position_ids=position, shared_kv_states=shared,
            use_cache=False,
        ).last_hidden_state[:, 0]  # fmt: skip
        hidden = self.body.post_projection(out)
        pseudo = torch.cat([state.pseudo, hidden[:, None]], 1)
        return self.logits(out), None, AssistantState(hidden, pseudo, state.k + 1)

    def forward(self, *args, **kwargs):
        """Not trained here.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "Gemma 4's assistant can't be trained here, as its layers read keys and values that only decoding "
            "computes: train a DSpark, EAGLE-3 or MTP drafter for this target."
        )
