"""All cache and mask code for targets: per-row lengths in our own buffers, and the ways in from and out to
transformers'.

transformers 5.13 renamed a layer's `get_max_cache_shape` to `get_max_length`; both are answered. `crop` is never
called: its argument changed meaning in 5.15 and it can't treat rows differently.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from uuid import uuid4

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from hf_dspark.modeling.draft_cache import RaggedBuffer, Slots

LOOPED = (
    "This target runs a layer several times per token, each time with keys and values of their own, which a cache of "
    "one entry per layer and token can't hold: generate without assistant_model."
)


@dataclass
class Fill:
    """How far each row of a cache is filled, and where the next tokens go, by `layout` where they come as one flat
    sequence: shared by all layers, owned by none of them."""

    lengths: torch.Tensor
    slots: Slots | None = None
    layout: object = None


class RaggedLayer(CacheLayerMixin):
    """One layer of a [`TargetCache`]: never evicts, a sliding window lives in the mask."""

    is_sliding = False
    is_croppable = False

    def __init__(self, fill: Fill, buffer: RaggedBuffer | None = None):
        super().__init__()
        self.fill, self.buffer, self.written = fill, buffer or RaggedBuffer(), None
        self.is_initialized = True

    def lazy_initialization(self, *args) -> None:
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        slots = self.fill.slots
        if slots is None:
            raise ValueError(
                "This cache was returned by generate(assistant_model=drafter), and its rows have their own lengths, "
                "which plain generation can't fill: pass cache.to_dynamic(), or the drafter again."
            )
        if self.written is slots:
            raise ValueError(LOOPED)
        self.written = slots
        if self.fill.layout is not None:
            key_states, value_states = self.fill.layout.heads(key_states), self.fill.layout.heads(value_states)
        return self.buffer.write(key_states, value_states, slots)

    def get_seq_length(self) -> int:
        # Models only ask for this to place a mask or positions; with ragged rows we give them both.
        return int(self.fill.lengths.max()) if len(self.fill.lengths) else 0

    def get_query_offset(self) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return self.fill.slots.end if self.fill.slots else self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class TargetCache(Cache):
    """The target's keys and values with `lengths` [B] entries per row; slot j holds the row's token j.

    `draft` carries the drafter's cache along, so a chat continues without losing its context; `drafter` says whose it
    is. `columns` [B] are the columns of the output that each row's entries belong to, once a call has ended.
    """

    def __init__(self, config, rows: int):
        self.fill = Fill(torch.zeros(rows, dtype=torch.long))
        super().__init__(layers=[RaggedLayer(self.fill) for _ in range(config.num_hidden_layers)])
        self.columns: list[torch.Tensor] | None = None
        self.draft = self.drafter = None

    @property
    def lengths(self) -> torch.Tensor:
        return self.fill.lengths

    @lengths.setter
    def lengths(self, value: torch.Tensor) -> None:
        self.fill.lengths = value

    def place(self, count: int) -> Slots:
        """Aim the next `update`s at the `count` slots behind each row."""
        self.fill.slots = Slots(self.lengths, count)
        return self.fill.slots

    def settle(self) -> None:
        """Aim nowhere: whoever updates now hasn't said where."""
        self.fill.slots = self.fill.layout = None
        for layer in self.layers:
            layer.written = None

    def advance(self, counts) -> None:
        self.lengths = self.lengths + counts

    def settle_path(self, path: torch.Tensor) -> None:
        """Bring the accepted nodes of a tree, `path` [B, L] (-1 is filling), behind the anchor, where a chain's drafts
        would be.

        Node i was written to slot `lengths + 1 + i`, the anchor to slot `lengths`."""
        order = torch.arange(path.shape[1])
        if bool(((path < 0) | (path == order)).all()):
            return
        first = self.lengths + 1
        source = first[:, None] + torch.where(path < 0, order, path)
        for layer in self.layers:
            layer.buffer.move(source, first)

    # ------------------------------------------------------------------ rows that leave and come

    def _with(self, buffers, rows: torch.Tensor) -> "TargetCache":
        new = TargetCache.__new__(TargetCache)
        new.__dict__.update(self.__dict__)
        new.fill = Fill(self.lengths[rows])
        new.layers = [RaggedLayer(new.fill, buffer) for buffer in buffers]
        if self.columns is not None:
            new.columns = [self.columns[r] for r in rows.tolist()]
        return new

    def select(self, rows: list[int]) -> "TargetCache":
        """A copy of some rows, the drafter's context with them."""
        index = torch.tensor(rows, dtype=torch.long)
        new = self._with([layer.buffer.select(index) for layer in self.layers], index)
        new.draft = None if self.draft is None else self.draft.select(index)
        return new

    def first(self, row: int, count: int, draft=None) -> "TargetCache":
        """A copy of the first `count` tokens of a row, and of what `draft`, the drafter's context of our rows, has of
        them."""
        index = torch.tensor([row])
        new = self._with([layer.buffer.select(index, count) for layer in self.layers], index)
        new.lengths, new.draft = torch.tensor([count]), None
        if draft is not None and 0 <= count - int(draft.first[row]) <= int(draft.lengths[row]):
            read = count - int(draft.first[row])
            new.draft = draft.select(index, read)
            new.draft.lengths = torch.tensor([read])
        return new

    def share(self) -> "TargetCache":
        """The same entries under a second count: what this cache holds stays as it is, whatever becomes of the
        other."""
        new = self._with([layer.buffer.share() for layer in self.layers], torch.arange(len(self.lengths)))
        new.draft = None if self.draft is None else self.draft.share()
        return new

    def keep(self, order: list[int]) -> None:
        """Let row i be what row `order[i]` was, and the rest go; see [`RaggedBuffer.keep`]."""
        self.lengths = self.lengths[torch.tensor(order, dtype=torch.long)]
        longest = int(self.lengths.max())
        for layer in self.layers:
            layer.buffer.keep(order)
            layer.buffer.shrink(longest)

    def append(self, other: "TargetCache") -> None:
        """Admit another cache's rows below ours."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.buffer.append(theirs.buffer)
        self.lengths = torch.cat([self.lengths, other.lengths])

    # ------------------------------------------------------------------ what transformers' caches can do

    def crop(self, max_length: int) -> None:
        """Take the last `-max_length` entries back from every row.

        Raises:
            ValueError: for a length to keep, which rows of different lengths don't share, or more than a row holds.
        """
        if max_length > 0 or -max_length > int(self.lengths.min()):
            raise ValueError(
                f"cache.crop({max_length}) on rows of {self.lengths.tolist()} entries: rows have lengths of their own, "
                "so pass minus the number of entries to take from every row, at most as many as the shortest holds."
            )
        self.lengths = self.lengths + max_length
        self.draft = None  # its entries lag behind by what the drafter's kind wants: read the text again
        if self.columns is not None:
            self.columns = [c[: len(c) + max_length] for c in self.columns]

    def reset(self) -> None:
        """Forget everything."""
        self.__init__(SimpleNamespace(num_hidden_layers=len(self.layers)), len(self.lengths))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` [R], in this order, the drafter's context with them."""
        self.__dict__.update(self.select(torch.as_tensor(indices).tolist()).__dict__)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def to_dynamic(self) -> DynamicCache:
        """As a `DynamicCache` whose slots are the output's columns (`columns`), or left-padded to the longest row."""
        longest = int(self.lengths.max())
        columns = self.columns or [torch.arange(longest - n, longest) for n in self.lengths.tolist()]
        width, dynamic = 1 + max((int(c.max()) for c in columns if len(c)), default=-1), DynamicCache()
        for i, layer in enumerate(self.layers):
            pair = []
            for buffer in (layer.buffer.keys, layer.buffer.values):
                out = buffer.new_zeros(len(columns), buffer.shape[1], width, buffer.shape[3])
                for row, where in enumerate(columns):
                    out[row, :, where.to(out.device)] = buffer[row, :, : len(where)]
                pair.append(out)
            dynamic.update(*pair, i)
        return dynamic

    def write_back(self, cache: Cache) -> None:
        """Leave our content in the user's own cache object, as plain generation would have."""
        if isinstance(cache, TargetCache):
            cache.__dict__.update(self.__dict__)
        else:
            cache.layers = self.to_dynamic().layers
            cache.draft, cache.drafter = self.draft, self.drafter


def drafter_key(drafter) -> str:
    """What a cache remembers of its drafter: never the object, which a copied or pickled cache would take along."""
    return drafter.__dict__.setdefault("cache_key", uuid4().hex)


def from_user_cache(config, cache, keep: torch.Tensor) -> TargetCache:
    """Our cache from the user's, without its pads; theirs stays as it is, whatever happens to ours.

    Args:
        cache: a [`TargetCache`] or `DynamicCache`, empty or not. keep: bool [B, P or more], which of its P slots hold
            real tokens.

    Raises:
        ValueError: for cache classes whose entries can't be read back, and for more entries than slots.
    """
    if not isinstance(cache, TargetCache | DynamicCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, and drafts are verified in a cache with per-row lengths "
            "that can only take over a DynamicCache or one returned by an earlier call: pass one of those, or leave it "
            "out."
        )
    columns = getattr(cache, "columns", None)
    held = cache.get_seq_length() if columns is None else 1 + max((int(c.max()) for c in columns if len(c)), default=-1)
    if held > keep.shape[1]:
        raise ValueError(
            f"past_key_values holds {held} tokens, and input_ids has {keep.shape[1]}: beside a filled cache, input_ids "
            "is the whole text, cached tokens included. Pass all of it and at least one token more, or a fresh cache."
        )
    if isinstance(cache, TargetCache):
        if cache.columns is None or all(bool(keep[r, c].all()) for r, c in enumerate(cache.columns)):
            return cache.share()
        cache = cache.to_dynamic()  # the mask hides tokens that were fed: lay the rows out anew without them
    new, keep = TargetCache(config, keep.shape[0]), keep[:, : cache.get_seq_length()]
    if not keep.shape[1]:
        return new
    for layer, theirs in zip(new.layers, cache.layers, strict=False):
        stored, total = theirs.keys.shape[-2], keep.shape[1]
        seen = keep[:, total - stored :]  # a sliding layer keeps only its last entries
        evicted = keep[:, : total - stored].sum(1).tolist()
        k = theirs.keys.new_zeros(*theirs.keys.shape[:2], total, theirs.keys.shape[3])
        v = theirs.values.new_zeros(*theirs.values.shape[:2], total, theirs.values.shape[3])
        for row in range(keep.shape[0]):
            kept = seen[row].nonzero()[:, 0].to(k.device)
            span = slice(evicted[row], evicted[row] + len(kept))
            k[row, :, span], v[row, :, span] = theirs.keys[row, :, kept], theirs.values[row, :, kept]
        layer.buffer.write(k, v, Slots(torch.zeros(keep.shape[0], dtype=torch.long), total))
    new.lengths = keep.sum(1).cpu()
    draft = getattr(cache, "draft", None)
    new.draft, new.drafter = draft and draft.share(), getattr(cache, "drafter", None)
    return new


def attention_masks(model, config, slots: Slots, device, tree: torch.Tensor | None = None, always: bool = False):
    """What to pass as `attention_mask` for queries at `slots`: None while all rows have one length, else (or `always`)
    4D masks.

    With layer types the model wants a dict, exactly where `generate` itself would build one. `tree` bool [B, count,
    count]: which of the slots each one sees, itself and those above it; windows then count positions, which are depths,
        not slots.

    Raises:
        ValueError: for attention kernels that take no 4D mask.
    """
    if slots.uniform and tree is None and not always:
        return None
    kernel = model.config._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={kernel!r} takes no mask per row and token, which rows of different lengths and "
            "draft trees need: load the target with attn_implementation='sdpa', or generate one row at a time and set "
            "tree=None."
        )
    query, key = slots.index(device)[:, :, None], torch.arange(slots.end, device=device)
    causal = key <= query
    if tree is not None:
        query, key, causal = _tree_places(slots, tree.to(device), device)

    def final(mask):
        mask = mask[:, None]
        if kernel == "sdpa":
            return mask
        zero = torch.zeros((), dtype=model.dtype, device=device)
        return torch.where(mask, zero, torch.finfo(model.dtype).min)

    def of(kind):
        if kind == "sliding_attention":
            return final(causal & (key > query - config.sliding_window))
        if kind == "chunked_attention":
            return final(causal & (key // config.attention_chunk_size == query // config.attention_chunk_size))
        return final(causal)

    types = getattr(config, "layer_types", None)
    if hasattr(config, "layer_types") and types:
        return {kind: of(kind) for kind in set(types)}
    if getattr(config, "sliding_window", None) is not None:
        return of("sliding_attention")
    return of("chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else "full_attention")


def _tree_places(slots: Slots, tree: torch.Tensor, device):
    """Positions of the queries [B, count, 1] and of all slots [B, 1, end], and which slots each query sees [B, count,
    end]."""
    first = slots.first.to(device)[:, None]
    slot = torch.arange(slots.end, device=device)[None]
    depth = tree.sum(-1) - 1
    place = (slot - first).clamp(0, slots.count - 1)
    inside = (slot >= first) & (slot < first + slots.count)
    position = torch.where(inside, first + depth.gather(1, place), slot)
    seen = tree.gather(2, place[:, None].expand(-1, slots.count, -1))
    sees = torch.where(inside[:, None], seen, slot[:, None] < first[..., None])
    return (first + depth)[..., None], position[:, None], sees
