"""Multi-token-prediction heads: a block of the target's own kind that reads its last state and the next token."""

import inspect
from dataclasses import replace

import torch
from torch import nn
from transformers import AutoModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_mtp import MTPConfig
from .draft_cache import DraftCache, Slots
from .modeling_eagle3 import ChainKeys, ChainState, RecursiveDrafter, causal_mask


class Past:
    """A cache as the target's attention calls it."""

    def __init__(self, past):
        self.past = past

    def update(self, keys, values, layer_idx: int, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.past.update(keys, values, layer_idx)


def skeleton(body):
    """A decoder of the configuration `body`, without weights: its classes are what the heads are made of.

    Raises:
        ValueError: for a target without rotary positions, which places tokens where it embeds them.
    """
    with torch.device("meta"):
        try:
            decoder = AutoModel.from_config(body, attn_implementation="sdpa")
        except (ValueError, ImportError):  # this architecture has no sdpa
            decoder = AutoModel.from_config(body, attn_implementation="eager")
    if not hasattr(decoder, "rotary_emb"):
        raise ValueError(
            f"block_config has model_type={body.model_type!r}, whose layers don't rotate by position, so a head can't "
            "tell them where its tokens lie: use a block of an architecture with rotary positions."
        )
    return decoder


class MTPHead(GradientCheckpointingLayer):
    """Two norms, a projection, a decoder block, a norm."""

    def __init__(self, config, block: nn.Module, norm_class):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_first, self.norm_output = config.hidden_first, config.norm_output
        self.enorm = norm_class(size, eps=eps)
        self.hnorm = norm_class(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.post_norm = norm_class(size, eps=eps)
        self.cache_name = "cache" if "cache" in inspect.signature(block.forward).parameters else "past_key_values"

    def forward(self, hidden, embeddings, rope, positions, past, mask) -> torch.Tensor:
        parts = [self.enorm(embeddings), self.hnorm(hidden)]
        x = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))
        self.block.gradient_checkpointing = False  # this layer's does it all, and the block's would take its cache away
        x = self.block(
            x, attention_mask=mask, position_embeddings=rope, position_ids=positions, **{self.cache_name: Past(past)}
        )
        x = x[0] if isinstance(x, tuple) else x
        return self.post_norm(x) if self.norm_output else x


class MTPDrafter(RecursiveDrafter):
    """Multi-token-prediction heads that a target was trained with, or that were trained for it (arXiv 2412.19437,
    section 2.2).

    A single head recurs on its own output. Of several, head j's slot i pairs token i + 1 with the output of head j - 1
    at slot i - 1, so draft k is what head k makes of draft k - 1; its slots begin at j. `extend` brings all heads'
    slots up to the anchor, and a further stage does the same with the last stage's outputs in place of the target's
    states.
    """

    config_class = MTPConfig

    def __init__(self, config: MTPConfig):
        super().__init__(config)
        decoder, heads = skeleton(config.block()), config.num_hidden_layers
        body = decoder.config
        found = next(m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == heads)
        block_class = type(found[-1])
        norm_class = next(type(m) for name, m in found[-1].named_modules() if "norm" in name)
        self.layers = nn.ModuleList(MTPHead(config, block_class(body, j), norm_class) for j in range(heads))
        self.rotary_emb = type(decoder.rotary_emb)(body)
        types = getattr(body, "layer_types", None) or ["full_attention"] * heads
        typed = "layer_type" in inspect.signature(self.rotary_emb.forward).parameters
        self.rope_options = [{"layer_type": types[j]} if typed else {} for j in range(heads)]
        sliding = getattr(body, "sliding_window", None)
        self.windows = [sliding if types[j] == "sliding_attention" else None for j in range(heads)]
        self.additive_mask = body._attn_implementation == "eager"
        self.body = body
        self._keep_in_fp32_modules_strict = decoder._keep_in_fp32_modules_strict
        self.post_init()

    def _init_weights(self, module):
        kind = type(module).__name__
        if "RotaryEmbedding" in kind:  # its buffers are in no file, and some architectures have one set per layer type
            with torch.device("cpu"):
                fresh = type(module)(module.config)
            for name, buffer in fresh.named_buffers():
                getattr(module, name).copy_(buffer)
            return
        super()._init_weights(module)
        if not isinstance(module, nn.Linear | nn.Embedding) and "Norm" not in kind:
            for p in module.parameters(recurse=False):  # experts and routers hold theirs themselves
                nn.init.normal_(p, std=0.02)

    # ------------------------------------------------------------------ pieces shared by training and decoding

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """The target's last states [..., D]: they are what the first head reads."""
        return features.to(self.device, self.dtype)

    def backbone(self, hidden, tokens, positions, past, mask, head: int = 0, embeddings=None) -> torch.Tensor:
        """Outputs [B, T, D] of `head`, in the form the next slot reads, of slots (`hidden` [B, T, D], `tokens` [B, T]).

        As [`Eagle3Drafter.backbone`]. `embeddings` [B, T, D] may stand for `tokens`.
        """
        embeddings = self.embed(tokens) if embeddings is None else embeddings
        if self.dtype == torch.float64:  # which torch's grouped products of experts don't know
            self.body._experts_implementation = "eager"
        positions = positions + 1
        rope = self.rotary_emb(hidden, positions, **self.rope_options[head])
        if mask is not None and self.additive_mask:
            low = torch.finfo(hidden.dtype).min
            mask = torch.zeros(mask.shape, dtype=hidden.dtype, device=mask.device).masked_fill(~mask, low)
        return self.layers[head](hidden, embeddings, rope, positions, past, mask)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd], at least float32, of outputs [..., D] of `backbone`, `extend` or `unroll`."""
        return self.head(outputs if self.config.norm_output else self.layers[0].post_norm(outputs))

    # ------------------------------------------------------------------ decoding protocol

    def new_cache(self, first_positions: torch.Tensor) -> DraftCache:
        """As [`RecursiveDrafter.new_cache`]. Behind the heads' keys and values, the outputs of all but the last head
        lie in places of their own: at the next round, the next head reads the last of them."""
        return DraftCache(2 * self.config.num_hidden_layers - 1, first_positions)

    def _feed(self, cache: DraftCache, hidden, tokens, counts, first: int = 0, embeddings=None) -> torch.Tensor:
        """Outputs [B, T, D] of head `first` for T slots on top of the cache, of which `counts` [B] are kept; the heads
        behind it are fed as well. `hidden` is what head 0 reads."""
        heads = self.config.num_hidden_layers
        embeddings = self.embed(tokens) if embeddings is None else embeddings
        slots, positions, wanted = cache.place(embeddings.shape[1]), cache.positions(self.device), None
        for j in range(first, heads):
            if j:
                hidden = self._previous(cache, j, slots)
            mask = head_mask(slots, self.device, j, self.windows[j])
            output = self.backbone(hidden, None, positions, cache, mask, j, embeddings)
            wanted = output if wanted is None else wanted
            if j < heads - 1:
                cache.update(output[:, None], output[:, None, :, :0], heads + j)
        cache.advance(counts)
        return wanted

    def _previous(self, cache: DraftCache, head: int, slots: Slots) -> torch.Tensor:
        """Outputs [B, T, D] of the head before `head`, one slot earlier than `slots`."""
        kept = cache.layers[self.config.num_hidden_layers + head - 1].keys
        index = (slots.index(self.device) - 1).clamp(min=0)
        return kept[torch.arange(len(index), device=self.device)[:, None], 0, index]

    def start(self, cache, anchor, seed, pseudo=None, length: int | None = None) -> ChainState:
        """As [`RecursiveDrafter.start`]. With several heads, `pseudo` [B, k, 2D] holds the outputs that predicted the
        drafts beside the drafts' embeddings, and every head is fed the slots that these make."""
        if self.config.num_hidden_layers == 1:
            return super().start(cache, anchor, seed, pseudo, length)
        if pseudo is not None:
            cache.advance(1 - pseudo.shape[1])  # the drafts' slots were fed to some of the heads only
            hidden, embeddings = pseudo.chunk(2, -1)
            embeddings = torch.cat([embeddings[:, :-1], self.embed(anchor[:, None])], 1)
            seed = self._feed(cache, hidden, None, pseudo.shape[1], embeddings=embeddings)[:, -1]
        return ChainState(torch.cat([seed, torch.zeros_like(seed)], -1)[:, None])

    def step(self, cache, state: ChainState, prev: torch.Tensor) -> tuple[torch.Tensor, None, ChainState]:
        """As [`RecursiveDrafter.step`]; with several heads, draft k comes from head k."""
        if self.config.num_hidden_layers == 1:
            return super().step(cache, state, prev)
        pseudo = state.pseudo
        if state.k:
            embeddings = self.embed(prev[:, None])
            output = self._feed(cache, None, None, 1, state.k, embeddings)
            pseudo = torch.cat([pseudo[:, :-1], torch.cat([pseudo[:, -1:].chunk(2, -1)[0], embeddings], -1)], 1)
            pseudo = torch.cat([pseudo, torch.cat([output, torch.zeros_like(output)], -1)], 1)
        return self.logits(pseudo[:, -1].chunk(2, -1)[0]), None, replace(state, pseudo=pseudo, k=state.k + 1)

    # ------------------------------------------------------------------ training

    def unroll(
        self, features, next_tokens, steps: int, position_ids=None, slots=None, detach_every=None
    ) -> list[torch.Tensor]:
        """As [`RecursiveDrafter.unroll`]. With several heads, step k is head k over the whole sequence, the true tokens
        fed
        in: no draft reads a draft's state but those of its own chain, so this is what decoding computes.

        Raises:
            ValueError: more steps than heads where there are several, or a head with a sliding window.
        """
        heads = self.config.num_hidden_layers
        if any(self.windows):
            raise ValueError(
                "These heads see a sliding window, which training doesn't: train a head with full attention "
                "(layer_types in block_config)."
            )
        if heads == 1:
            return super().unroll(features, next_tokens, steps, position_ids, slots, detach_every)
        if steps > heads:
            raise ValueError(
                f"Chains of {steps} drafts were asked for, and {heads} heads make one each: set loop_exposure=0, or "
                "train a single head, which recurs."
            )
        B, T = next_tokens.shape
        tokens, rows = next_tokens.to(self.device), torch.arange(B, device=self.device)[:, None]
        slots = torch.arange(T, device=self.device).expand(B, T) if slots is None else slots.to(self.device)
        positions = (torch.arange(T)[None] if position_ids is None else position_ids).to(self.device).expand(B, T)
        document = (positions == 0).cumsum(1)
        seen = (document[:, :, None] == document[:, None]).tril()
        itself = torch.eye(T, dtype=torch.bool, device=self.device)
        hidden, past, outputs = self.project(features), ChainKeys({}), []
        for k in range(steps):
            mask = seen & (positions >= k)[:, None] | itself
            hidden = self.backbone(hidden, tokens, positions, past, mask[:, None], k)
            outputs.append(hidden[rows, (slots + k) % T])
            hidden = hidden.roll(1, 1)
        return outputs


def head_mask(slots: Slots, device, head: int, window: int | None) -> torch.Tensor | None:
    """bool [B or 1, 1, count, end]: each slot of `head` sees those from number `head` on up to itself, and itself."""
    if not head and window is None:
        return causal_mask(slots, device)
    query = slots.index(device)[: 1 if slots.uniform else None, :, None]
    key = torch.arange(slots.end, device=device)
    seen = (key <= query) & (key >= head)
    if window is not None:
        seen = seen & (key > query - window)
    return (seen | (key == query))[:, None]
