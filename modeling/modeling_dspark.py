"""The parallel drafters: DSpark, DFlash and Domino (arXiv 2607.05147, 2602.06036, 2605.29707)."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from .configuration_dspark import DSparkConfig
from .draft_cache import DraftCache
from .drafter import Drafter, DrafterOutput
from .heads import build_correction_head, select_memory
from .layers import DraftLayer, RMSNorm, RotaryEmbedding
from .packed_blocks import PackedContext, block_places, context_places, dense_anchors, packed_masks


@dataclass
class BlockState:
    """A drafted block on its way: base logits of the slots that draft, and where the correction head stands.

    `base` [B, K, Vd]; `hidden` [B, K, D] final-normed; `first` [B, D] the state of slot 0 where that slot doesn't
    draft; `pseudo` [B, K, D] what stands for the target's features if the next stage is drafted. K is the drafts
    wanted.
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
    """DSpark, DFlash and Domino: one pass fills a block, then a correction head draws its tokens from left to right.

    Sources: arXiv 2607.05147 (DSpark), 2602.06036 (DFlash), 2605.29707 (Domino). Load one with [`AutoDrafter`].

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

        `past.update(k, v, layer)` puts the context before the block's own K/V; `masks` maps a layer type to a mask or
        None.
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

    def block_logits(
        self, hidden, prev, first=None, base=None, detach_confidence=False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Teacher-forced base and corrected logits [..., K, Vd] and confidence logits [..., K], as training needs them.

        `hidden` [..., K, D] final-normed states, `prev` [..., K] the token before each draft (target ids), `first`
        [..., D] the normed slot 0 where it doesn't draft, `base` the base logits if known. `detach_confidence`: a loss
        on the confidence reaches the confidence head alone.
        """
        base = self.head(hidden) if base is None else base
        logits = base
        if self.correction is not None:
            logits = base + self.correction.block(prev, hidden, self.embed, first).to(base.dtype)
        return base, logits, self._confidence(hidden, prev, detach_confidence)

    def _confidence(self, hidden, prev, detach=False):
        if not self.config.confidence_head:
            return None
        if self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.correction.features(prev)], -1)
        hidden = hidden.detach() if detach else hidden
        logits = self.confidence(hidden).squeeze(-1)
        return logits if logits.dtype == torch.float64 else logits.float()

    # ------------------------------------------------------------------ training

    accepts_loss_kwargs = False  # the loss is a mean over this batch's own weights

    def forward(
        self,
        features,
        input_ids,
        labels=None,
        anchors=None,
        position_ids=None,
        stages: int = 1,
        detach_chain: bool = False,
        position_decay: float = 4.0,
    ) -> DrafterOutput:
        """All blocks of a batch in one pass: the drafts of every anchor, given the target's features before it.

        Blocks are packed behind the context under one mask (DSpark, section 3.4). Stage s of a chain starts K tokens
        after stage s-1, on the true token, and sees the earlier stages' own states in place of the features it wouldn't
        have (loop-aware training, arXiv 2610.07659); only the first and the last stage are returned.

        Args:
            features (`torch.Tensor`): [B, T, m*Dt], the target's tapped states of `input_ids`.
            input_ids, labels (`torch.Tensor`): [B, T]; labels not shifted, -100 where not supervised.
            anchors (`torch.Tensor`, *optional*): [B, N] indices into the row, -1 for none. All possible ones by
                default.
            position_ids (`torch.Tensor`, *optional*): [B, T], restarting at 0 with each packed document.
            stages (`int`), detach_chain (`bool`): length of the chains; whether gradients stop between stages.
            position_decay (`float`): the loss of draft k (from 0) weighs exp(-k / position_decay).

        Returns:
            [`DrafterOutput`]: with `labels` the cross entropy, averaged over weights, of the labels the draft
            vocabulary holds (the stages' mean); without them the states.

        Raises:
            ValueError: neither labels nor anchors.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if anchors is None:
            if labels is None:
                raise ValueError("forward() got neither labels nor anchors, so no block is known: pass one of them.")
            anchors = dense_anchors(labels, position_ids)
        states = self._chains(features, input_ids, anchors, position_ids, stages, detach_chain)
        decay = torch.exp(-torch.arange(self.config.max_block, device=anchors.device) / position_decay)
        return self._output(states[:: stages - 1 or 1], stages, input_ids, labels, anchors, position_ids, decay)

    def _chains(self, features, input_ids, anchors, position_ids, stages, detach_chain) -> list[tuple]:
        """Final-normed states and slot 0 of stages 1..`stages`: [B, N, K, D] and [B, N, D] or None each."""
        config, K = self.config, self.config.max_block
        past = PackedContext(self.context_keys_values(self.project(features), position_ids))
        keys = context_places(position_ids)
        origin = position_ids.gather(1, anchors.clamp(min=0)) - anchors.clamp(min=0)  # position minus index in the row
        out = []
        for s in range(stages):
            block = block_places(position_ids, anchors, s * K, config.block_size)
            masks = packed_masks(config.layer_types, block, keys.followed_by(block), self._sliding)
            shift = origin.repeat_interleave(config.block_size, 1)
            ids = self.block_ids(self.previous_tokens(input_ids, anchors, s)[..., 0])
            states = self.backbone(ids.flatten(1), (block.index + shift).clamp(min=0), past, masks)
            states = states.unflatten(1, (anchors.shape[1], config.block_size))
            drafts, first = self.slots_that_draft(states)
            out.append((self.norm(drafts), None if first is None else self.norm(first)))
            if s + 1 < stages:
                pseudo = states[..., :-1, :] if first is not None and config.loop_alignment == "position" else drafts
                pseudo = (pseudo.detach() if detach_chain else pseudo).flatten(1, 2)
                places = block_places(position_ids, anchors, s * K, K)
                positions = (places.index + origin.repeat_interleave(K, 1)).clamp(min=0)
                past = past.append(self.context_keys_values(self.pseudo_context(pseudo), positions))
                keys = keys.followed_by(places)
        return out

    def _sliding(self, query, key):
        return sliding_rule(self.config, query.index, key.index, query.block_anchor)

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
        if "sliding_attention" in config.layer_types:
            near = (seen & sliding_rule(config, query, key, anchor)).expand(-1, slots.count, -1)
            masks["sliding_attention"] = near[:, None].to(self.device)
        return masks

    def start(self, cache, anchor, seed=None, pseudo=None, length: int | None = None) -> BlockState:
        """One backbone pass over the block of `anchor` [B].

        `pseudo` [B, k, D]: states of the previous stage, appended to the context first (looped drafting; the caller
        rolls the cache back after the round). `length`: drafts wanted, at most `max_block`; the block itself is always
        whole.
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
        return BlockState(self.head(hidden), hidden, pseudo[:, :length], None if first is None else self.norm(first))

    def step(self, cache, state: BlockState, prev: torch.Tensor):
        """Corrected logits [B, Vd] (temperature 1), confidence logit [B] or None, and the next state, after `prev`
        [B]."""
        k, memory = state.k, state.memory
        hidden, logits, prev = state.hidden[:, k], state.base[:, k], prev.to(self.device)
        if self.correction is not None:
            if k == 0 and state.first is not None and getattr(self.correction, "kind", None) == "rnn":
                _, memory = self.correction.step(memory, prev, state.first, self.embed)
            bias, memory = self.correction.step(memory, prev, hidden, self.embed)
            logits = logits + bias.to(logits.dtype)
        return logits, self._confidence(hidden, prev), replace(state, memory=memory, k=k + 1)


def sliding_rule(config: DSparkConfig, query, key, anchor) -> torch.Tensor:
    """Which keys a sliding layer's queries may see, given positions of queries, keys and anchors (broadcast
    together)."""
    window = config.sliding_window
    near = key > query - window if config.window_from == "slot" else key >= anchor - window
    return near & (key <= query) if config.causal_block else near
