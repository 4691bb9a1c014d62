"""Key-value buffers whose rows have their own lengths: written at per-row slots, never cropped, grown in buckets."""

from dataclasses import dataclass, field

import torch

BUCKET = 64


@dataclass
class Slots:
    """`count` consecutive slots per row, from `first` [B] (host). Rows that start at one slot take the slice path."""

    first: torch.Tensor
    count: int
    _index: dict = field(default_factory=dict)

    def __post_init__(self):
        low, high = (int(x) for x in torch.aminmax(self.first))
        self.uniform = low == high
        self.end = high + self.count

    def index(self, device) -> torch.Tensor:
        """[B, count] slot numbers; copied to a device once."""
        device = torch.device(device)
        if device not in self._index:
            self._index[device] = (self.first[:, None] + torch.arange(self.count)).to(device)
        return self._index[device]


class RaggedBuffer:
    """Keys and values of one layer, stored as [rows, heads, capacity, dim]; the first `rows` of them are in use.

    Rows leave and come without a copy of the others. A `shared` buffer is also somebody else's: nothing that they
    count is written over, so rows are moved in a copy.
    """

    def __init__(self):
        self.keys = self.values = None
        self.rows, self.shared = 0, False

    def _reserve(self, rows: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Room for `rows` rows of `length` slots, of the kind of `keys` and `values`."""
        have = (0, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[2])
        if rows > have[0] or length > have[1]:
            longest = -(-length // BUCKET) * BUCKET
            if length > have[1]:
                longest = max(longest, min(2 * have[1], have[1] + 1024))
            shape = max(rows, have[0]), max(longest, have[1])
            self.keys, self.values = self._grown(self.keys, keys, shape), self._grown(self.values, values, shape)
            self.shared = False
        elif self.keys.is_inference() and not torch.is_inference_mode_enabled():  # a chat may leave inference_mode
            self.keys, self.values = self.keys.clone(), self.values.clone()
            self.shared = False

    def _grown(self, old, like, shape):
        new = like.new_zeros(shape[0], like.shape[1], shape[1], like.shape[3])
        if old is not None:
            new[: self.rows, :, : old.shape[2]] = old[: self.rows]
        return new

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `keys`, `values` [B, heads, T, dim] at `slots`; return views of everything up to the last slot."""
        rows = keys.shape[0]
        self._reserve(rows, slots.end, keys, values)
        self.rows = rows
        if slots.uniform:
            self.keys[:rows, :, slots.end - slots.count : slots.end] = keys
            self.values[:rows, :, slots.end - slots.count : slots.end] = values
        else:
            index = slots.index(keys.device)
            every = torch.arange(rows, device=keys.device)[:, None]
            self.keys[every, :, index] = keys.transpose(1, 2)
            self.values[every, :, index] = values.transpose(1, 2)
        return self.keys[:rows, :, : slots.end], self.values[:rows, :, : slots.end]

    def move(self, source: torch.Tensor, first: torch.Tensor) -> None:
        """Let the slots from `first` [B] on hold what is in the slots `source` [B, L] (both on the host)."""
        if self.keys is None:  # a layer that reads another one's
            return
        device = self.keys.device
        every = torch.arange(len(source), device=device)[:, None]
        aim = (first[:, None] + torch.arange(source.shape[1])).to(device)
        source = source.to(device)
        for values in (self.keys, self.values):
            values[every, :, aim] = values[every, :, source]

    def keep(self, order: list[int]) -> None:
        """Let row i be what row `order[i]` was. Every row moves to a place in front of it, or stays."""
        if self.keys is None:
            return
        if self.shared:
            index = torch.tensor(order, dtype=torch.long, device=self.keys.device)
            self.keys, self.values, self.shared = self.keys[index], self.values[index], False
        else:
            for row, source in enumerate(order):
                if row != source:
                    self.keys[row] = self.keys[source]
                    self.values[row] = self.values[source]
        self.rows = len(order)

    def shrink(self, length: int) -> None:
        """Give back what our rows, of at most `length` entries, don't need, where that is more than half of what is
        held."""
        longest = (length // BUCKET + 2) * BUCKET
        if self.keys is None or self.shared or self.keys.shape[0] * self.keys.shape[2] <= 2 * self.rows * longest:
            return
        self.keys = self.keys[: self.rows, :, :longest].clone()
        self.values = self.values[: self.rows, :, :longest].clone()

    def select(self, rows: torch.Tensor, length: int | None = None) -> "RaggedBuffer":
        """A copy of some rows [R], or of their first `length` slots."""
        new = RaggedBuffer()
        if self.keys is not None:
            index = rows.to(self.keys.device)
            new.keys, new.values = self.keys[:, :, :length][index], self.values[:, :, :length][index]
            new.rows = len(rows)
        return new

    def share(self) -> "RaggedBuffer":
        """The same storage under a second count: what this one holds stays as it is."""
        new = RaggedBuffer()
        new.keys, new.values, new.rows, new.shared = self.keys, self.values, self.rows, True
        return new

    def append(self, other: "RaggedBuffer") -> None:
        """Admit another buffer's rows below ours."""
        assert other.keys is not None or self.keys is None, "rows are admitted after their first tokens"
        if not self.rows:
            self.keys, self.values, self.rows, self.shared = other.keys, other.values, other.rows, other.shared
            return
        if self.shared:
            self.keep(list(range(self.rows)))
        self._reserve(self.rows + other.rows, other.keys.shape[2], other.keys, other.values)
        below = slice(self.rows, self.rows + other.rows)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine[below, :, : theirs.shape[2]] = theirs[: other.rows]
        self.rows += other.rows


class DraftCache:
    """A drafter's cache: K/V of context features, `lengths` [B] entries per row, of true positions `first[b] + slot`.

    A block is written behind the context without being counted, so the next `extend` overwrites it; what a drafter
    feeds itself (pseudo-context, recursion) is counted until `rollback`.
    """

    def __init__(self, num_layers: int, first_positions: torch.Tensor):
        self.layers = [RaggedBuffer() for _ in range(num_layers)]
        self.first = first_positions.cpu().clone()
        self.lengths = torch.zeros_like(self.first)
        self.slots: Slots | None = None

    def place(self, count: int) -> Slots:
        """Aim the next `update`s of every layer at the `count` slots behind each row's context."""
        self.slots = Slots(self.lengths, count)
        return self.slots

    def positions(self, device) -> torch.Tensor:
        """True positions [B, count] of the slots aimed at."""
        if not self.first.any():
            return self.slots.index(device)
        return self.slots.index(device) + self.first.to(device)[:, None]

    def update(self, keys, values, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[layer_idx].write(keys, values, self.slots)

    def advance(self, counts: torch.Tensor | int) -> None:
        """Count `counts` [B] of the slots just written as context."""
        self.lengths = self.lengths + counts

    def mark(self) -> torch.Tensor:
        return self.lengths

    def rollback(self, mark: torch.Tensor) -> None:
        """Drop everything counted since `mark`."""
        self.lengths = mark

    def _like(self, layers, rows: torch.Tensor) -> "DraftCache":
        new = DraftCache(0, self.first[rows])
        new.layers, new.lengths = layers, self.lengths[rows]
        return new

    def select(self, rows: torch.Tensor, length: int | None = None) -> "DraftCache":
        """A copy of some rows [R], or of their first `length` slots."""
        rows = rows.cpu()
        return self._like([layer.select(rows, length) for layer in self.layers], rows)

    def share(self) -> "DraftCache":
        """The same entries under a second count: what this cache holds stays as it is."""
        return self._like([layer.share() for layer in self.layers], torch.arange(len(self.first)))

    def keep(self, order: list[int]) -> None:
        """Let row i be what row `order[i]` was; see [`RaggedBuffer.keep`]."""
        for layer in self.layers:
            layer.keep(order)
        index = torch.tensor(order, dtype=torch.long)
        self.first, self.lengths = self.first[index], self.lengths[index]
        for layer in self.layers:
            layer.shrink(int(self.lengths.max()))

    def append(self, other: "DraftCache") -> None:
        """Admit another cache's rows below ours."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append(theirs)
        self.first = torch.cat([self.first, other.first])
        self.lengths = torch.cat([self.lengths, other.lengths])
