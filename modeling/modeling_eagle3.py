"""The recursive drafter EAGLE-3 (arXiv 2503.01840), and 3.1, which recurs on the normed output."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_eagle3 import Eagle3Config
from .draft_cache import DraftCache, Slots
from .drafter import Drafter, DrafterOutput
from .layers import DraftAttention, DraftLayer, RMSNorm, RotaryEmbedding, add_mlp, finish_layer
from .packed_blocks import dense_anchors

EXTEND_CHUNK = 512  # slots per pass of `extend`: bounds the mask of a long prompt


class FusionLayer(GradientCheckpointingLayer):
    """The first layer: its attention reads embedding and feature side by side, its residual stream is the feature."""

    def __init__(self, config):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, input_size=2 * config.hidden_size)
        add_mlp(self, config)

    def forward(self, hidden, embeddings, rope, past, mask) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], -1)
        x = normed if self.norm_before_residual else hidden
        return finish_layer(self, x, self.self_attn(both, rope, past, 0, mask))


@dataclass
class ChainState:
    """A chain on its way, `k` drafts long.

    `pseudo` [B, k, D]: the outputs that predicted the drafts, which stand for the target's features if the next stage
    is drafted. Before the first step it holds the one that will predict the first draft.
    """

    pseudo: torch.Tensor
    k: int = 0

    def select(self, rows: torch.Tensor) -> "ChainState":
        """Rows [R] of the state."""
        return ChainState(self.pseudo[rows], self.k)


class ChainKeys:
    """K/V of one more step of an unrolled chain, behind those of the steps `before` (which stay as they are, so that
    gradient checkpointing may replay a layer)."""

    def __init__(self, before: dict[int, tuple]):
        self.before, self.layers = before, {}

    def update(self, keys, values, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.before:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.before[layer_idx], (keys, values), strict=True))
        self.layers[layer_idx] = keys, values
        return keys, values


class RecursiveDrafter(Drafter):
    """Base of drafters that recur on their own output, one slot per draft.

    Slot i is the pair (feature of position i, token i + 1); the feature is the target's, as `project` gives it, or the
    output of slot i - 1. Decoding protocol (B active rows, m taps, Dt target hidden size):
        `cache = new_cache(first_positions[B])`
        `seed[B, D] = extend(cache, features[B, T, m*Dt], next_tokens[B, T], valid[B, T])` at prefill, after commits
        `state = start(cache, anchor[B], seed)`; `start(cache, anchor[B], None, pseudo)` for a further stage
        `logits[B, Vd], None, state = step(cache, state, prev[B])` once per draft
    A family brings `project`, `backbone` and `logits`.
    """

    # ------------------------------------------------------------------ decoding protocol

    def new_cache(self, first_positions: torch.Tensor) -> DraftCache:
        """An empty cache; `first_positions` [B] are the true positions of the first features to come."""
        return DraftCache(self.config.num_hidden_layers, first_positions)

    def expected_length(self, committed: torch.Tensor) -> torch.Tensor:
        """Cache entries [B] after `committed` [B] tokens: the anchor is the last slot's token and has no own slot."""
        return committed - 1

    def _feed(self, cache: DraftCache, hidden, tokens, counts) -> torch.Tensor:
        """Outputs [B, T, D] of T slots on top of the cache, `counts` [B] of which are kept."""
        slots = cache.place(hidden.shape[1])
        mask = causal_mask(slots, self.device)
        outputs = self.backbone(hidden, tokens.to(self.device), cache.positions(self.device), cache, mask)
        cache.advance(counts)
        return outputs

    def extend(self, cache, features, next_tokens, valid) -> torch.Tensor:
        """Append slots of committed tokens; returns the last one's output [B, D], which predicts the first draft.

        `valid` [B, T] marks a prefix of each row, of at least one slot; `next_tokens` [B, T] are one position ahead of
        `features`, so that a row's last one is its anchor.
        """
        counts, outputs = valid.sum(1).cpu(), []
        for first in range(0, features.shape[1], EXTEND_CHUNK):
            part = slice(first, first + EXTEND_CHUNK)
            hidden = self.project(features[:, part])
            outputs.append(self._feed(cache, hidden, next_tokens[:, part], (counts - first).clamp(0, hidden.shape[1])))
        rows = torch.arange(len(counts), device=self.device)
        return torch.cat(outputs, 1)[rows, counts.to(self.device) - 1]

    def start(self, cache, anchor, seed, pseudo=None, length: int | None = None) -> ChainState:
        """A chain behind `anchor` [B], whose first draft `seed` [B, D] predicts: no pass is needed.

        `pseudo` [B, k, D]: the outputs of the previous stage, whose last draft is `anchor`. All slots before it are
        still in the cache, so one more continues the chain (the caller rolls the cache back after the round).
        """
        if pseudo is not None:
            seed = self._feed(cache, pseudo[:, -1:], anchor[:, None], 1)[:, 0]
        return ChainState(seed[:, None])

    def step(self, cache, state: ChainState, prev: torch.Tensor) -> tuple[torch.Tensor, None, ChainState]:
        """Logits [B, Vd] (temperature 1), no confidence, and the next state, after `prev` [B].

        From the second draft on, a slot is fed and counted in the cache.
        """
        pseudo = state.pseudo
        if state.k:
            pseudo = torch.cat([pseudo, self._feed(cache, pseudo[:, -1:], prev[:, None], 1)], 1)
        return self.logits(pseudo[:, -1]), None, ChainState(pseudo, state.k + 1)

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
        step_decay: float | None = None,
    ) -> DrafterOutput:
        """The chains of all anchors by training-time test: K = `config.chain_length` steps, the true tokens fed in.

        A further stage is K more steps of the same chain (arXiv 2610.07659); only the outputs of the first and the last
        stage are returned. Draft k of anchor a is step k of the chain that starts at slot a - 1.

        Args:
            features (`torch.Tensor`): [B, T, m*Dt], the target's tapped states of `input_ids`.
            input_ids, labels (`torch.Tensor`): [B, T]; labels not shifted, -100 where not supervised.
            anchors (`torch.Tensor`, *optional*): [B, N] indices into the row, -1 for none. All possible ones by
                default.
            position_ids (`torch.Tensor`, *optional*): [B, T], restarting at 0 with each packed document.
            stages (`int`), detach_chain (`bool`): length of the chains; whether gradients stop between stages.
            step_decay (`float`, *optional*): the loss of draft k (from 0) weighs step_decay^k. The family's by default.

        Returns:
            [`DrafterOutput`]: with `labels` the cross entropy, averaged over weights, of the labels the draft
            vocabulary holds (the stages' mean); without them the outputs.

        Raises:
            ValueError: neither labels nor anchors.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if anchors is None:
            if labels is None:
                raise ValueError("forward() got neither labels nor anchors, so no chain is known: pass one of them.")
            anchors = dense_anchors(labels, position_ids)
        anchors, K = self.usable_anchors(anchors, position_ids), self.config.max_block
        slots = (anchors - 1).clamp(min=0)
        steps = self.unroll(
            features, input_ids.roll(-1, 1), stages * K, position_ids, slots, K if detach_chain else None
        )
        states = [(torch.stack(steps[s * K : (s + 1) * K], 2), None) for s in sorted({0, stages - 1})]
        decay = (self.config.step_decay if step_decay is None else step_decay) ** torch.arange(K, device=anchors.device)
        return self._output(states, stages, input_ids, labels, anchors, position_ids, decay)

    def usable_anchors(self, anchors, position_ids) -> torch.Tensor:
        """`anchors` [B, N], -1 in place of those that begin a document: no slot predicts a document's second token."""
        begins = position_ids.gather(1, anchors.clamp(min=0)) == 0
        return anchors.masked_fill(begins, -1)

    def block_logits(self, hidden, prev, first=None, base=None, detach_confidence=False):
        """[`DSparkDrafter.block_logits`] of outputs [..., K, D]: base and corrected logits are one, confidence is
        None."""
        logits = self.logits(hidden)
        return logits, logits, None

    def unroll(
        self, features, next_tokens, steps: int, position_ids=None, slots=None, detach_every=None
    ) -> list[torch.Tensor]:
        """Training-time test: outputs [B, N, D] of each of `steps` steps of the chains that start at `slots`.

        Step j of the chain that starts at slot i reads its own output of step j - 1 and token i + 1 + j. It lies at
        position i + j, sees the real slots <= i and its own steps 1..j, and predicts token i + 2 + j; where that lies
        outside the document the output means nothing. Give the steps that carry a loss to `logits`. Source: EAGLE-3,
        arXiv 2503.01840, section 3.2.

        Args:
            features: [B, T, m*Dt]. next_tokens: [B, T], token i + 1 at i.
            position_ids: [B, T] of the features, restarting at 0 with each packed document.
            slots: [B, N] indices into the row; all T slots by default. Those that start no chain cost one step only.
            detach_every (`int`, *optional*): steps after which gradients stop running back into earlier steps.
        """
        B, T = next_tokens.shape
        tokens, rows = next_tokens.to(self.device), torch.arange(B, device=self.device)[:, None]
        slots = torch.arange(T, device=self.device).expand(B, T) if slots is None else slots.to(self.device)
        positions = (torch.arange(T)[None] if position_ids is None else position_ids).to(self.device).expand(B, T)
        document = (positions == 0).cumsum(1)
        mask, past = (document[:, :, None] == document[:, None]).tril(), ChainKeys({})
        hidden = self.backbone(self.project(features), tokens, positions, past, mask[:, None])[rows, slots]
        mask, own, outputs = (
            mask[rows, slots],
            torch.eye(slots.shape[1], dtype=torch.bool, device=self.device),
            [hidden],
        )
        for j in range(1, steps):
            cut = detach_every and j % detach_every == 0
            past = ChainKeys(detached_after(T, past.layers) if cut else past.layers)
            mask = torch.cat([mask, own.expand(B, -1, -1)], -1)
            hidden = hidden.detach() if cut else hidden
            hidden = self.backbone(
                hidden, tokens[rows, (slots + j) % T], positions[rows, slots] + j, past, mask[:, None]
            )
            outputs.append(hidden)
        return outputs


class Eagle3Drafter(RecursiveDrafter):
    """EAGLE-3 (arXiv 2503.01840): one pass per draft; the first layer reads the next token's embedding beside the
    target's fused hidden states, or its own output where the target has read no token yet. Load one with
    [`AutoDrafter`]."""

    config_class = Eagle3Config

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        taps, size, eps = len(config.target_layer_ids), config.target_hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps=eps) for _ in range(taps))
        self.fc = nn.Linear(taps * size, config.hidden_size, bias=config.fc_bias)
        deeper = (DraftLayer(config) for _ in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FusionLayer(config), *deeper])
        self.norm = RMSNorm(config.hidden_size, eps=eps) if config.norm_head else nn.Identity()
        self.rotary_emb = RotaryEmbedding(config)
        self.post_init()

    # ------------------------------------------------------------------ pieces shared by training and decoding

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Fused features [..., D] of tapped target states [..., m*Dt]."""
        x = features.to(self.device, self.dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            taps = x.chunk(len(self.fc_norm), -1)
            x = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)
        return self.fc(x).to(self.dtype)  # the residual stream starts here: no bfloat16 under autocast

    def backbone(self, hidden, tokens, positions, past, mask) -> torch.Tensor:
        """Outputs [B, T, D], in the form the next slot reads, of slots (`hidden` [B, T, D], `tokens` [B, T]).

        `positions` [B, T] are the features'; `past.update(k, v, layer)` puts earlier slots before these; `mask` as in
        `attend`.
        """
        rope = self.rotary_emb(hidden, positions + self.config.position_offset)
        x = self.layers[0](hidden, self.embed(tokens), rope, past, mask)
        for i, layer in enumerate(self.layers[1:], 1):
            x = layer(x, rope, past, i, mask)
        return self.norm(x) if self.config.norm_output else x

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd], at least float32, of outputs [..., D] of `backbone`, `extend` or `unroll`."""
        return self.head(outputs if self.config.norm_output else self.norm(outputs))


def detached_after(count: int, keys_values: dict[int, tuple]) -> dict[int, tuple]:
    """Keys and values per layer, the same but without gradient for all but the first `count` slots."""
    halves = {i: [(x[:, :, :count], x[:, :, count:].detach()) for x in pair] for i, pair in keys_values.items()}
    return {i: tuple(torch.cat(x, 2) for x in pair) for i, pair in halves.items()}


def causal_mask(slots: Slots, device) -> torch.Tensor | None:
    """bool [B or 1, 1, count, end]: each slot sees those up to itself; `None` where that is everything."""
    if slots.uniform and slots.count == 1:
        return None
    index = slots.index(device)[: 1 if slots.uniform else None]
    return (torch.arange(slots.end, device=device) <= index[..., None])[:, None]
