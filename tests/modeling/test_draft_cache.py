"""The ragged cache against one list of entries per row."""

import random

import pytest
import torch

from hf_dspark.modeling.draft_cache import BUCKET, DraftCache, RaggedBuffer, Slots

LAYERS, HEADS, DIM = 2, 3, 4


def content(cache, row, length):
    return [torch.stack([b.keys[row, :, :length], b.values[row, :, :length]]) for b in cache.layers]


class Lists:
    """The same cache in the obvious form: per row and layer a tensor [2, heads, length, dim], and its first
    position."""

    def __init__(self, firsts):
        self.firsts, self.rows = list(firsts), [[torch.zeros(2, HEADS, 0, DIM)] * LAYERS for _ in firsts]

    def lengths(self):
        return [row[0].shape[2] for row in self.rows]


def write(cache, count, kept, lists):
    """Write `count` slots and count `kept` of each row, in both."""
    cache.place(count)
    expected = [[f + n + t for t in range(count)] for f, n in zip(lists.firsts, lists.lengths(), strict=True)]
    assert cache.positions("cpu").tolist() == expected
    for layer in range(LAYERS):
        new = torch.randn(2, len(kept), HEADS, count, DIM)
        keys, values = cache.update(new[0], new[1], layer)
        for row, n in enumerate(kept):
            seen = torch.cat([lists.rows[row][layer], new[:, row]], 2)
            assert torch.equal(torch.stack([keys[row], values[row]])[:, :, : seen.shape[2]], seen)
            lists.rows[row][layer] = seen[:, :, : seen.shape[2] - count + n]
    cache.advance(torch.tensor(kept))


def agree(cache, lists):
    assert cache.lengths.tolist() == lists.lengths()
    for row, layers in enumerate(lists.rows):
        for mine, theirs in zip(content(cache, row, cache.lengths[row]), layers, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_operations_equals_one_list_per_row(seed):
    rng = random.Random(seed)
    firsts = [rng.randrange(5) for _ in range(3)]
    cache, lists = DraftCache(LAYERS, torch.tensor(firsts)), Lists(firsts)
    write(cache, 3, [1, 3, 2], lists)
    for _ in range(40):
        action = rng.choice(["write", "write", "block", "rollback", "select", "append"])
        B = len(lists.rows)
        if action == "write":
            count = rng.randrange(1, 9)
            write(cache, count, [rng.randrange(count + 1) for _ in range(B)], lists)
        elif action == "block":  # written, never counted
            write(cache, 4, [0] * B, lists)
        elif action == "rollback":
            mark, before = cache.mark(), [list(row) for row in lists.rows]
            write(cache, 3, [3] * B, lists)
            cache.rollback(mark)
            lists.rows = before
        elif action == "select":
            rows = [rng.randrange(B) for _ in range(rng.randrange(1, 4))]
            cache = cache.select(torch.tensor(rows))
            lists.firsts, lists.rows = [lists.firsts[r] for r in rows], [list(lists.rows[r]) for r in rows]
        elif B < 5:
            first = rng.randrange(5)
            other, others = DraftCache(LAYERS, torch.tensor([first])), Lists([first])
            write(other, 5, [rng.randrange(6)], others)
            cache.append(other)
            lists.firsts, lists.rows = lists.firsts + others.firsts, lists.rows + others.rows
        agree(cache, lists)


def test_rows_of_one_length_and_rows_of_many_are_written_alike():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, HEADS, 3, DIM)
    even, odd = RaggedBuffer(), RaggedBuffer()
    even.write(keys, values, Slots(torch.tensor([4, 4]), 3))
    odd.write(keys, values, Slots(torch.tensor([4, 6]), 3))
    assert torch.equal(even.keys[0], odd.keys[0]) and torch.equal(even.values[0], odd.values[0])
    assert torch.equal(even.keys[1, :, 4:7], odd.keys[1, :, 6:9])
    assert not odd.keys[1, :, :6].any() and not even.keys[1, :, :4].any()


def test_buffers_grow_in_buckets_and_keep_what_they_hold():
    buffer, length, capacities = RaggedBuffer(), 0, []
    while length < 9 * BUCKET:
        new = torch.full((1, 1, 10, 1), float(length))
        buffer.write(new, -new, Slots(torch.tensor([length]), 10))
        length += 10
        capacities.append(buffer.keys.shape[2])
    wanted = torch.arange(length // 10).repeat_interleave(10) * 10.0
    assert torch.equal(buffer.keys[0, 0, :length, 0], wanted) and torch.equal(buffer.values[0, 0, :length, 0], -wanted)
    assert len(set(capacities)) <= 5 and all(c % BUCKET == 0 for c in capacities)


def test_rows_that_were_never_written_are_not_admitted():
    cache = DraftCache(1, torch.tensor([0]))
    cache.place(2)
    cache.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    with pytest.raises(AssertionError, match="after their first tokens"):
        cache.append(DraftCache(1, torch.tensor([0])))


def test_a_selection_is_a_copy():
    cache = DraftCache(1, torch.tensor([0, 0]))
    cache.place(2)
    cache.update(torch.ones(2, 1, 2, 1), torch.ones(2, 1, 2, 1), 0)
    cache.advance(2)
    chosen = cache.select(torch.tensor([1]))
    chosen.place(1)
    chosen.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    chosen.rollback(torch.tensor([0]))
    chosen.layers[0].keys.zero_()
    assert cache.lengths.tolist() == [2, 2] and cache.layers[0].keys[1, 0, :2, 0].tolist() == [1, 1]
