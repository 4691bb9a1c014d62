"""Attention and the decoder layer of the drafters; keys and values may come from injected context."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

RMSNorm, RotaryEmbedding, MLP = LlamaRMSNorm, LlamaRotaryEmbedding, LlamaMLP


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary embedding (cos, sin), each [B, T, dim], to `x` [B, heads, T, dim]."""
    cos, sin = (r.unsqueeze(1) for r in rope)
    return x * cos + rotate_half(x) * sin


@functools.cache
def _flex_attention(compiled: bool):
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it builds the whole score matrix, which is what the block mask is there to avoid.
    return torch.compile(flex_attention) if compiled else flex_attention


def attend(q, k, v, mask, scale: float) -> torch.Tensor:
    """Grouped-query attention of q [B, H, T, d] to k and v [B, G, S, d].

    `mask`: bool [B or 1, 1, T, S], a flex `BlockMask`, or None.
    The queries of a group are laid along the sequence, so keys are never repeated. Returns [B, T, H * d].
    """
    B, H, T, d = q.shape
    groups = H // k.shape[1]
    if mask is not None and not isinstance(mask, torch.Tensor):
        out = _flex_attention(q.is_cuda)(q, k, v, block_mask=mask, scale=scale, enable_gqa=groups > 1)
    else:
        if mask is not None and groups > 1:
            mask = mask.repeat(1, 1, groups, 1)
        q = q.reshape(B, k.shape[1], groups * T, d)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.reshape(B, H, T, d)
    return out.transpose(1, 2).reshape(B, T, H * d)


class DraftAttention(nn.Module):
    """Attention whose input may be wider than the model (EAGLE-3 reads embedding and feature side by side)."""

    def __init__(self, config, input_size: int | None = None):
        super().__init__()
        size, self.head_dim = input_size or config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(size, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(size, kv_heads * self.head_dim, bias=config.attention_bias)
        if not config.key_is_value:
            self.v_proj = nn.Linear(size, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.attention_output_bias)
        norm = RMSNorm if config.qk_norm else lambda *args, **kwargs: nn.Identity()
        self.q_norm = norm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = norm(self.head_dim, eps=config.rms_norm_eps)
        self.key_is_value = config.key_is_value
        gemma4 = config.body == "gemma4"
        self.value_eps = config.rms_norm_eps if gemma4 else None
        self.scale = 1.0 if gemma4 else self.head_dim**-0.5

    def _heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: torch.Tensor, rope) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [B, kv heads, T, d] of `x` [B, T, size]; context features and block states take the same way."""
        k = self._heads(self.k_proj(x))
        v = k if self.key_is_value else self._heads(self.v_proj(x))
        if self.value_eps is not None:
            v = F.rms_norm(v.float(), v.shape[-1:], eps=self.value_eps).to(v.dtype)
        return rotate(self.k_norm(k).transpose(1, 2), rope), v.transpose(1, 2)

    def forward(self, x, rope, past, layer_idx: int, mask) -> torch.Tensor:
        q = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), rope)
        k, v = past.update(*self.keys_values(x, rope), layer_idx)
        return self.o_proj(attend(q, k, v, mask, self.scale))


def add_mlp(layer: nn.Module, config) -> None:
    """What a layer has behind its attention."""
    names = ["post_attention_layernorm"]
    if config.body == "gemma4":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        layer.register_buffer("layer_scalar", torch.ones(1))
    for name in names:
        setattr(layer, name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    layer.mlp = MLP(config)


def finish_layer(layer: nn.Module, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The layer's output, given its residual stream `x` and what its attention made."""
    if not hasattr(layer, "layer_scalar"):
        x = x + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))
    x = x + layer.post_attention_layernorm(attended)
    x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    return x * layer.layer_scalar


class DraftLayer(GradientCheckpointingLayer):
    """Decoder layer, of the kind `config.body`."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        add_mlp(self, config)

    def forward(self, x, rope, past, layer_idx: int, mask) -> torch.Tensor:
        return finish_layer(self, x, self.self_attn(self.input_layernorm(x), rope, past, layer_idx, mask))
