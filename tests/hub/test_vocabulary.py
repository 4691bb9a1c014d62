"""The map of a reduced vocabulary is read in every spelling, and refused where it can't be what it claims."""

import pytest
import torch

from hf_dspark.hub.vocabulary import to_offsets

IDS = torch.tensor([2, 3, 7, 8, 11])  # five of V = 12 tokens
OFFSETS = IDS - torch.arange(5)
MASK = torch.zeros(12, dtype=torch.bool).index_fill(0, IDS, True)


@pytest.mark.parametrize("d2t", [OFFSETS, IDS, None])
def test_offsets_target_ids_and_the_bare_mask_mean_the_same(d2t):
    assert torch.equal(to_offsets(d2t, MASK, 5, 12), OFFSETS)


@pytest.mark.parametrize("d2t", [OFFSETS, IDS])
def test_without_the_mask_the_two_spellings_are_told_apart(d2t):
    assert torch.equal(to_offsets(d2t, None, 5, 12), OFFSETS)


@pytest.mark.parametrize("d2t", [None, torch.zeros(6, dtype=torch.long), torch.arange(6)])
def test_the_full_vocabulary_needs_no_map(d2t):
    assert to_offsets(d2t, None, 6, 6) is None
    assert to_offsets(d2t, torch.ones(6, dtype=torch.bool), 6, 6) is None


def test_a_prefix_of_the_vocabulary_is_all_zero_offsets():
    assert to_offsets(torch.zeros(5, dtype=torch.long), None, 5, 12).tolist() == [0] * 5


def test_a_map_in_an_order_of_its_own_is_kept():
    shuffled = torch.tensor([8, 2, 11, 3, 7])
    assert torch.equal(to_offsets(shuffled, MASK, 5, 12) + torch.arange(5), shuffled)


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        (None, None, "no d2t"),
        (torch.arange(5), None, "both as offsets and as target ids"),  # the well-known wrong default: i -> 2i
        (torch.arange(5), MASK, "neither"),
        (OFFSETS + 1, None, "neither"),  # leaves the vocabulary
        (torch.tensor([0, 0, -1, 0, 0]), None, "neither"),  # repeats a token
        (torch.zeros(5, dtype=torch.long), MASK, "neither"),  # another file's mask
        (OFFSETS[:4], MASK, "4 entries"),
        (OFFSETS, MASK[:11], "t2d keeps 4 of 11"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused(d2t, t2d, words):
    with pytest.raises(ValueError, match=words):
        to_offsets(d2t, t2d, 5, 12)
