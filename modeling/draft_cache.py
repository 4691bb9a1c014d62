"""Key-value buffers whose rows have their own lengths: written at per-row slots, never cropped, grown in buckets."""

from dataclasses import dataclass

import torch

BUCKET = 64


@dataclass
class Slots:
    """`count` consecutive slots per row, from `first` [B] (host). Rows that start at one slot take the slice path."""

    first: torch.Tensor
    count: int

    def __post_init__(self):
        low, high = (int(x) for x in torch.aminmax(self.first))
        self.uniform = low == high
        self.end = high + self.count

    def index(self, device) -> torch.Tensor:
        """[B, count] slot numbers."""
        return (self.first[:, None] + torch.arange(self.count)).to(device)


class RaggedBuffer:
    """Keys and values of one layer, [B, heads, capacity, dim] each."""

    def __init__(self):
        self.keys = self.values = None

    def _grown(self, old, like, capacity):
        new = like.new_zeros(like.shape[0], like.shape[1], capacity, like.shape[3])
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `keys`, `values` [B, heads, T, dim] at `slots`; return views of everything up to the last slot."""
        if self.keys is None or slots.end > self.keys.shape[2]:
            old = 0 if self.keys is None else self.keys.shape[2]
            capacity = max(-(-slots.end // BUCKET) * BUCKET, min(2 * old, old + 1024))
            self.keys, self.values = self._grown(self.keys, keys, capacity), self._grown(self.values, values, capacity)
        elif self.keys.is_inference() and not torch.is_inference_mode_enabled():  # a chat may leave inference_mode
            self.keys, self.values = self.keys.clone(), self.values.clone()
        if slots.uniform:
            self.keys[:, :, slots.end - slots.count : slots.end] = keys
            self.values[:, :, slots.end - slots.count : slots.end] = values
        else:
            rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
            index = slots.index(keys.device)
            self.keys[rows, :, index] = keys.transpose(1, 2)
            self.values[rows, :, index] = values.transpose(1, 2)
        return self.keys[:, :, : slots.end], self.values[:, :, : slots.end]

    def select(self, rows: torch.Tensor) -> "RaggedBuffer":
        """A copy of some rows [R]."""
        new = RaggedBuffer()
        if self.keys is not None:
            rows = rows.to(self.keys.device)
            new.keys, new.values = self.keys[rows], self.values[rows]
        return new

    def append(self, other: "RaggedBuffer") -> None:
        """Admit another buffer's rows below ours."""
        assert other.keys is not None or self.keys is None, "rows are admitted after their first tokens"
        if self.keys is None:
            self.keys, self.values = other.keys, other.values
            return
        capacity = max(self.keys.shape[2], other.keys.shape[2])
        for name in ("keys", "values"):
            parts = [getattr(b, name) for b in (self, other)]
            setattr(self, name, torch.cat([self._grown(p, p, capacity) for p in parts]))


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

    def select(self, rows: torch.Tensor) -> "DraftCache":
        """A copy of some rows [R]."""
        rows = rows.cpu()
        new = DraftCache(0, self.first[rows])
        new.layers = [layer.select(rows) for layer in self.layers]
        new.lengths = self.lengths[rows]
        return new

    def append(self, other: "DraftCache") -> None:
        """Admit another cache's rows below ours."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append(theirs)
        self.first = torch.cat([self.first, other.first])
        self.lengths = torch.cat([self.lengths, other.lengths])
