"""Many blocks in one forward, as training packs them: where every slot lies and what it may see."""

from typing import NamedTuple

import torch


class Places(NamedTuple):
    """Where the tokens [B, L] of an attention call lie; an index counts the row's tokens from its start.

    `chain`: number of the chain of blocks a slot belongs to, -1 for a real token; `index`; `document`; and, for slots,
    `anchor`: index of the chain's first anchor (-1 for a chain that isn't there); `block_anchor`: of this block's own.
    """

    chain: torch.Tensor
    index: torch.Tensor
    document: torch.Tensor
    anchor: torch.Tensor
    block_anchor: torch.Tensor

    def at(self, *where) -> "Places":
        return Places(*(x[where] for x in self))

    def followed_by(self, other: "Places") -> "Places":
        return Places(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))


def may_see(query: Places, key: Places) -> torch.Tensor:
    """Whether a slot may look at a key: real tokens of its document before its chain's first anchor, and its own chain.

    Elementwise, so it makes a dense mask by broadcasting and a flex mask index by index. What a chain holds at a time
    is the pseudo-context of its earlier stages and the block at work, and all of that may be seen.
    """
    context = (key.chain < 0) & (key.document == query.document) & (key.index < query.anchor)
    return context | (key.chain == query.chain)


def context_places(position_ids: torch.Tensor) -> Places:
    """Places of the real tokens; `position_ids` [B, T] restart at 0 with each document (padding: every token its
    own)."""
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    nothing = torch.full_like(index, -1)
    return Places(nothing, index, (position_ids == 0).cumsum(1), nothing, nothing)


def block_places(position_ids: torch.Tensor, anchors: torch.Tensor, offset: int, count: int) -> Places:
    """Places [B, N * count] of slots at `anchors` [B, N] + `offset` + 0..count-1."""
    start = anchors[..., None] + offset
    index = start + torch.arange(count, device=anchors.device)
    chain = torch.arange(anchors.shape[1], device=anchors.device)[:, None]
    document = (position_ids == 0).cumsum(1).gather(1, anchors.clamp(min=0))[..., None]
    return Places(*(x.expand_as(index).flatten(1) for x in (chain, index, document, anchors[..., None], start)))


def packed_masks(layer_types, query: Places, key: Places, sliding) -> dict:
    """A mask per layer type: bool [B, 1, Q, S] on the CPU, a flex `BlockMask` on a GPU, where most of it is empty.

    `sliding(query, key)`: the extra rule of sliding layers.
    """
    rules = {"full_attention": may_see, "sliding_attention": lambda q, k: may_see(q, k) & sliding(q, k)}
    make = flex_mask if query.index.is_cuda else dense_mask
    return {kind: make(rules[kind], query, key) for kind in set(layer_types)}


def dense_mask(rule, query: Places, key: Places) -> torch.Tensor:
    return rule(query.at(..., None), key.at(slice(None), None))[:, None]


def flex_mask(rule, query: Places, key: Places):
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b, h, q, k):
        return rule(query.at(b, q), key.at(b, k))

    (rows, queries), keys = query.index.shape, key.index.shape[1]
    return create_block_mask(mask_mod, rows, None, queries, keys, device=query.index.device)


class PackedContext:
    """What all blocks of a forward look back at, in place of a decoding cache: keys and values per layer."""

    def __init__(self, keys_values: list[tuple]):
        self.layers = keys_values

    def append(self, keys_values: list[tuple]) -> "PackedContext":
        """A longer context; the old one stays as it is for gradient checkpointing to run again."""
        pairs = zip(self.layers, keys_values, strict=True)
        return PackedContext([tuple(torch.cat(both, 2) for both in zip(old, new, strict=True)) for old, new in pairs])

    def update(self, keys, values, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        old_keys, old_values = self.layers[layer_idx]
        return torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)


def chain_labels(labels: torch.Tensor, position_ids: torch.Tensor, anchors: torch.Tensor, count: int) -> torch.Tensor:
    """Labels [B, N, count] of the tokens after each anchor; -100 from the first one that isn't supervised or not the
    anchor's.

    `labels` [B, T] are the ids themselves where supervised, else -100 (not shifted). An anchor of -1 gets none.
    """
    index = anchors[..., None] + 1 + torch.arange(count, device=anchors.device)
    inside = (anchors[..., None] >= 0) & (index < labels.shape[1])
    index = index.clamp(0, labels.shape[1] - 1).flatten(1)
    found = labels.gather(1, index).unflatten(1, inside.shape[1:])
    good = inside & (found != -100) & (position_ids.gather(1, index).unflatten(1, inside.shape[1:]) != 0)
    return found.masked_fill(good.cumprod(-1) == 0, -100)


def dense_anchors(labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Every possible anchor [B, N] of each row, those whose next token is supervised, in order, then -1."""
    everywhere = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    good = chain_labels(labels, position_ids, everywhere, 1)[..., 0] != -100
    order = good.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(good.sum(1).max()))]
    return torch.where(good.gather(1, order), order, -1)
