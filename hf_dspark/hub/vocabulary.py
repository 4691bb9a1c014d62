"""The map from a reduced draft vocabulary to the target's: offsets, whatever way a file spells it."""

import torch


def to_offsets(d2t: torch.Tensor | None, t2d: torch.Tensor | None, size: int, vocab_size: int) -> torch.Tensor | None:
    """Offsets [Vd] with target id = draft id + offset, or `None` for the full vocabulary.

    Args:
        d2t (`torch.Tensor`, *optional*): [Vd] offsets or, as some exporters wrote, target ids.
        t2d (`torch.Tensor`, *optional*): [V] mask of the target ids that are kept, in ascending order.
        size (`int`), vocab_size (`int`): Vd and V.

    Raises:
        ValueError: the map is missing, repeats or leaves the vocabulary, or can be read both ways.
    """
    kept = None if t2d is None else t2d.bool().nonzero().flatten()
    if kept is not None and (len(t2d) != vocab_size or len(kept) != size):
        raise ValueError(
            f"t2d keeps {len(kept)} of {len(t2d)} target ids, and the drafter has {size} of {vocab_size}: the mask "
            "belongs to another checkpoint. Get the complete file."
        )
    slots = torch.arange(size)
    if d2t is None:
        if size < vocab_size and kept is None:
            raise ValueError(
                f"The drafter has {size} of the target's {vocab_size} tokens and the file has no d2t (nor t2d), so no "
                "one can tell which ones: get the file with d2t."
            )
        ids = slots if kept is None else kept
    else:
        ids = _target_ids(d2t.long().flatten(), kept, slots, vocab_size)
    return None if size == vocab_size and torch.equal(ids, slots) else ids - slots


def _target_ids(d2t, kept, slots, vocab_size):
    if len(d2t) != len(slots):
        raise ValueError(f"d2t has {len(d2t)} entries for a draft vocabulary of {len(slots)}: get the file that fits.")
    valid = {}
    for meaning, ids in (("offsets", slots + d2t), ("target ids", d2t)):
        inside = 0 <= int(ids.min()) and int(ids.max()) < vocab_size
        if inside and len(ids.unique()) == len(ids) and (kept is None or torch.equal(ids.sort().values, kept)):
            valid[meaning] = ids
    ascending = {meaning: ids for meaning, ids in valid.items() if bool((ids.diff() > 0).all())}
    if len(ascending) != 1 and len(valid) != 1:
        problem = "both as offsets and as target ids" if valid else "neither as offsets nor as target ids"
        agreeing = "" if kept is None else " that agree with t2d"
        raise ValueError(
            f"d2t (first entries {d2t[:4].tolist()}) can be read {problem} of distinct tokens below "
            f"{vocab_size}{agreeing}. Store offsets (target id - draft id), and the t2d mask beside them."
        )
    return next(iter((ascending if len(ascending) == 1 else valid).values()))
