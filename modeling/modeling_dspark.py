"""The parallel drafters: DSpark, DFlash and Domino (arXiv 2607.05147, 2602.06036, 2605.29707)."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from .configuration_dspark import DSparkConfig
from .draft_cache import DraftCache
from .drafter import Drafter
from .heads import build_correction_head, select_memory
from .layers import DraftLayer, RMSNorm, RotaryEmbedding


@dataclass
class BlockState:
    """A drafted block on its way: base logits of the slots that draft, and where the correction head stands.

    `base` [B, K, Vd]; `hidden` [B, K, D] final-normed; `first` [B, D] the state of slot 0 where that slot doesn't draft;
    `pseudo` [B, K, D] what stands for the target's features if the next stage is drafted (METHODS: h~).
    """

    base: torch.Tensor
    hidden: torch.Tensor
    pseudo: torch.Tensor
    first: torch.Tensor | None = None
    memory: object = None
    k: int = 0

    def select(self, rows: torch.Tensor) -> "BlockState":
        """Rows [R] of the state."""
        first = None if self.first is None else self.first[rows]
        memory = select_memory(self.memory, rows)
        return BlockState(self.base[rows], self.hidden[rows], self.pseudo[rows], first, memory, self.k)


class DSparkDrafter(Drafter):
    """A block drafter with injected target context and a causal correction head.

    Decoding protocol (B active rows, m taps, Dt target hidden size, K = `config.max_block` drafts):
        `cache = new_cache(first_positions[B])`
        `extend(cache, features[B, T, m*Dt], next_tokens[B, T], valid[B, T])` after prefill and after each commit
        `state = start(cache, anchor[B], seed=None, pseudo=None)` one backbone pass
        `logits[B, Vd], confidence_logit[B] | None, state = step(cache, state, prev[B])` once per draft
    """

    config_class = DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        width = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.correction = build_correction_head(config)
        if config.confidence_head:
            extra = config.markov_rank if config.confidence_with_markov else 0
            self.confidence = nn.Linear(config.hidden_size + extra, 1)
        self.post_init()

    # ------------------------------------------------------------------ pieces shared by training and decoding

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Context [..., D] of tapped target states [..., m*Dt]."""
        return self.hidden_norm(self.fc(features.to(self.device, self.dtype)))

    def pseudo_context(self, pseudo: torch.Tensor) -> torch.Tensor:
        """Context [..., D] of the drafter's own states, in place of the projected features (`config.loop_pseudo`)."""
        return self.hidden_norm(self.norm(pseudo) if self.config.loop_pseudo == "post_norm" else pseudo)

    def context_keys_values(self, context: torch.Tensor, positions: torch.Tensor) -> list[tuple]:
        """Per layer K, V [B, kv heads, T, d] of `context` [B, T, D] at true `positions` [B, T]; no input norm."""
        rope = self.rotary_emb(context, positions)
        return [layer.self_attn.keys_values(context, rope) for layer in self.layers]

    def block_ids(self, anchor: torch.Tensor) -> torch.Tensor:
        """[..., block_size] slot inputs of `anchor` [...]: the anchor, then mask tokens."""
        ids = anchor[..., None].expand(*anchor.shape, self.config.block_size).clone()
        ids[..., 1:] = self.config.mask_token_id
        return ids

    def backbone(self, ids: torch.Tensor, positions: torch.Tensor, past, masks: dict) -> torch.Tensor:
        """Last layer's states [B, Q, D], before the final norm, of slot inputs `ids` at `positions` (both [B, Q]).

        `past.update(k, v, layer)` puts the context before the block's own K/V; `masks` maps a layer type to a mask or None.
        """
        x = self.embed(ids)
        rope = self.rotary_emb(x, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, past, i, masks[self.config.layer_types[i]])
        return x

    def slots_that_draft(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split slot states [..., block_size, D] into those that draft [..., K, D] and slot 0 where it doesn't."""
        if self.config.sample_from_anchor:
            return states, None
        return states[..., 1:, :], states[..., 0, :]

    def block_logits(self, hidden, prev, first=None, base=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Teacher-forced base and corrected logits [..., K, Vd] and confidence logits [..., K], as training needs them.

        `hidden` [..., K, D] final-normed states, `prev` [..., K] the token before each draft (target ids), `first` [..., D]
        the normed slot 0 where it doesn't draft, `base` the base logits if known.
        """
        base = self.head(hidden) if base is None else base
        logits = base
        if self.correction is not None:
            logits = base + self.correction.block(prev, hidden, self.embed, first).to(base.dtype)
        return base, logits, self._confidence(hidden, prev)

    def _confidence(self, hidden, prev):
        if not self.config.confidence_head:
            return None
        if self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.correction.features(prev)], -1)
        logits = self.confidence(hidden).squeeze(-1)
        return logits if logits.dtype == torch.float64 else logits.float()

    # ------------------------------------------------------------------ decoding protocol

    def new_cache(self, first_positions: torch.Tensor) -> DraftCache:
        """An empty cache; `first_positions` [B] are the true positions of the first features to come."""
        return DraftCache(self.config.num_hidden_layers, first_positions)

    def expected_length(self, committed: torch.Tensor) -> torch.Tensor:
        """Cache entries [B] after `committed` [B] tokens: every one but the anchor has a feature."""
        return committed - 1

    def _append_context(self, cache: DraftCache, context: torch.Tensor, counts) -> None:
        cache.place(context.shape[1])
        positions = cache.positions(self.device)
        for i, (k, v) in enumerate(self.context_keys_values(context, positions)):
            cache.update(k, v, i)
        cache.advance(counts)

    def extend(self, cache, features, next_tokens, valid) -> None:
        """Append context; `valid` [B, T] marks a prefix of each row. `next_tokens` is for recursive drafters."""
        self._append_context(cache, self.project(features), valid.sum(1).cpu())

    def block_masks(self, cache: DraftCache) -> dict[str, torch.Tensor | None]:
        """Masks of a block at `cache.slots`, bool [B, 1, block_size, end]; None where everything may be seen."""
        config, slots = self.config, cache.slots
        masks = {"full_attention": None}
        if slots.uniform and "sliding_attention" not in config.layer_types:
            return masks
        key = torch.arange(slots.end)
        anchor = slots.first[:, None, None]
        query = anchor + torch.arange(slots.count)[:, None]
        seen = key < anchor + slots.count  # [B, 1, end], the same for all slots of the block
        if not slots.uniform:
            masks["full_attention"] = seen.expand(-1, slots.count, -1)[:, None].to(self.device)
        masks["sliding_attention"] = (seen & sliding_rule(config, query, key, anchor))[:, None].to(self.device)
        return masks

    def start(self, cache, anchor, seed=None, pseudo=None, length: int | None = None) -> BlockState:
        """One backbone pass over the block of `anchor` [B].

        `pseudo` [B, k, D]: states of the previous stage, appended to the context first (looped drafting; the caller rolls
        the cache back after the round). `length`: drafts wanted, at most `max_block`; the block itself is always whole.
        """
        if pseudo is not None:
            self._append_context(cache, self.pseudo_context(pseudo), pseudo.shape[1])
        cache.place(self.config.block_size)
        ids = self.block_ids(anchor.to(self.device))
        states = self.backbone(ids, cache.positions(self.device), cache, self.block_masks(cache))
        return self._block_state(states, length)

    def _block_state(self, states, length):
        drafts, first = self.slots_that_draft(states)
        pseudo = states[:, :-1] if first is not None and self.config.loop_alignment == "position" else drafts
        hidden = self.norm(drafts[:, :length])
        return BlockState(self.head(hidden), hidden, pseudo, None if first is None else self.norm(first))

    def step(self, cache, state: BlockState, prev: torch.Tensor):
        """Corrected logits [B, Vd] (temperature 1), confidence logit [B] or None, and the next state, after `prev` [B]."""
        k, memory = state.k, state.memory
        hidden, logits, prev = state.hidden[:, k], state.base[:, k], prev.to(self.device)
        if self.correction is not None:
            if k == 0 and state.first is not None and getattr(self.correction, "kind", None) == "rnn":
                _, memory = self.correction.step(memory, prev, state.first, self.embed)
            bias, memory = self.correction.step(memory, prev, hidden, self.embed)
            logits = logits + bias.to(logits.dtype)
        return logits, self._confidence(hidden, prev), replace(state, memory=memory, k=k + 1)


def sliding_rule(config: DSparkConfig, query, key, anchor) -> torch.Tensor:
    """Which keys a sliding layer's queries may see, given positions of queries, keys and anchors (broadcast together)."""
    window = config.sliding_window
    near = key > query - window if config.window_from == "slot" else key >= anchor - window
    return near & (key <= query) if config.causal_block else near
