"""Rows of different widths as one flat sequence: linear layers cost the tokens sent, as in DSpark (section 5.3).

The target gets ids [1, N]. Its attention finds keys and values of all rows in our cache, lays the flat queries out per
row, and calls the target's own kernel with the masks of the padded path. Where that doesn't give the padded path's
logits, at a target's first use, the padded path stays.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KERNELS = ("sdpa", "eager")

# By model and kernel: whether packed logits were those of the padded path.
_AGREES: WeakKeyDictionary = WeakKeyDictionary()
_LAYOUT: ContextVar["Layout | None"] = ContextVar("layout", default=None)


@dataclass
class Layout:
    """Where the tokens of rows of the given `widths` [A] are in a flat sequence of N tokens."""

    widths: list[int]
    _on: dict = field(default_factory=dict)

    def __post_init__(self):
        width, start, padded, flat = max(self.widths), 0, [], []
        for row, n in enumerate(self.widths):
            padded.append([start + min(t, n - 1) for t in range(width)])
            flat += range(row * width, row * width + n)
            start += n
        self.total, self._host = start, (torch.tensor(padded), torch.tensor(flat))

    def on(self, device) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat places of the padded positions [A, T], a row's last token standing in behind it, and padded places [N]
        of the flat ones."""
        if device not in self._on:
            self._on[device] = tuple(x.to(device) for x in self._host)
        return self._on[device]

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        """[A, T, ...] as [1, N, ...]."""
        return padded.flatten(0, 1)[self.on(padded.device)[1]][None]

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """[1, N, ...] as [A, T, ...]."""
        return flat[0][self.on(flat.device)[0]]

    def heads(self, states: torch.Tensor) -> torch.Tensor:
        """[1, heads, N, dim] as [A, heads, T, dim]."""
        return states[0][:, self.on(states.device)[0]].transpose(0, 1)


def agrees(model) -> bool | None:
    """Whether `model` gives the same logits packed; None while that isn't known."""
    kernel = model.config.get_text_config()._attn_implementation
    if kernel not in KERNELS or getattr(model, "_compiled_call_impl", None) is not None:
        return False
    return _AGREES.get(model, {}).get(kernel)


def compare(model, layout: Layout, padded: torch.Tensor, packed: torch.Tensor | None) -> None:
    """Settle whether packed logits [A, T, V] are the `padded` ones at real positions, up to rounding; None are not."""
    kernel, same = model.config.get_text_config()._attn_implementation, False
    if packed is not None:
        a, b = layout.flat(padded).double(), layout.flat(packed).double()
        eps = max(
            torch.finfo(padded.dtype).eps, torch.finfo(torch.float32).eps
        )  # some take the softmax in float32 always
        bound = min(1024 * eps, 0.05) * a.abs().amax()
        same = bool((a - b).abs().amax() <= bound)
    _AGREES.setdefault(model, {})[kernel] = same


@contextmanager
def packing(config, layout: Layout) -> Iterator[None]:
    """Within, attention of a model with this text `config` lays flat queries out by `layout`."""
    kernel, token = config._attn_implementation, _LAYOUT.set(layout)
    config._attn_implementation = f"hf_dspark_packed_{kernel}"
    try:
        yield
    finally:
        config._attn_implementation = kernel
        _LAYOUT.reset(token)


def _sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    layout = _LAYOUT.get()
    if (
        layout is None or kwargs.get("position_bias") is not None
    ):  # another thread's call, or what only their kernel does
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    query = layout.heads(query)
    rows, heads, width, _ = query.shape
    # Query heads that share keys become further positions, which saves a copy of the cache for each.
    grouped = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    mask = attention_mask.repeat(1, 1, grouped.shape[2] // width, 1)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return layout.flat(out.reshape(rows, heads, width, -1).transpose(1, 2)), None


def _eager(module, query, key, value, attention_mask, **kwargs):
    layout, kernel = _LAYOUT.get(), sys.modules[type(module).__module__].eager_attention_forward
    if layout is None:
        return kernel(module, query, key, value, attention_mask, **kwargs)
    out, _ = kernel(module, layout.heads(query), key, value, attention_mask, **kwargs)
    return layout.flat(out), None


for _kernel, _function in zip(KERNELS, (_sdpa, _eager)):
    AttentionInterface.register(f"hf_dspark_packed_{_kernel}", _function)
    AttentionMaskInterface.register(f"hf_dspark_packed_{_kernel}", ALL_MASK_ATTENTION_FUNCTIONS[_kernel])
