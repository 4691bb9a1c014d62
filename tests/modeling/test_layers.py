"""Grouped-query attention against a loop over heads."""

import pytest
import torch

from hf_dspark.modeling.layers import attend


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("mask_rows", [None, 1, 2])
def test_attention_equals_a_loop_over_heads_and_queries(heads, kv_heads, mask_rows):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, heads, 3, 5).double(), *torch.randn(2, 2, kv_heads, 7, 5).double()
    mask = None
    if mask_rows:
        mask = torch.rand(mask_rows, 1, 3, 7) < 0.6
        mask[..., 2] = True
    out = attend(q, k, v, mask, 0.3)
    for b in range(2):
        for h in range(heads):
            for t in range(3):
                keep = torch.ones(7, dtype=torch.bool) if mask is None else mask[b % mask_rows, 0, t]
                g = h // (heads // kv_heads)
                weights = torch.softmax(k[b, g, keep] @ q[b, h, t] * 0.3, 0)
                torch.testing.assert_close(out[b, t, h * 5 : h * 5 + 5], weights @ v[b, g, keep])
