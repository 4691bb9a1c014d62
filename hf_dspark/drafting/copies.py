"""Copies in the place of drafts: what each row's text and the shared memory offer, and a draft of them and the
drafter's."""

from dataclasses import replace

import torch

from .copying import Copy, CopyIndex, CopyMemory
from .draft import Draft

LONGEST = 10  # tokens of a copy: longer ones gain nothing on SmolLM2's answers
NOTHING = Copy([], 0)


def shortest_match(copy: int | str | None) -> int | None:
    """Tokens that must match for a row to copy under the knob `copy`, None if it never does.

    Where the policy weighs each copy by what its match length was worth, matches of one token are offered too: that
    many are right as to pay where a draft costs little. Without a policy they'd be verified wherever a word occurs
    again.
    """
    return None if copy is None else 1 if copy == "auto" else 2


def offers(
    indices: list[CopyIndex], texts: list[list[int]], room: list[int], memory: CopyMemory | None, limit: int
) -> list:
    """What each row could copy: from its own text, or from the memory where that has a longer match and as many tokens.

    Args:
        indices: of each row's text. texts: the texts themselves. room: most drafts worth making of each row.
        memory (*optional*): shared texts. limit (`int`): most tokens of a copy.

    Returns:
        per row ([`Copy`], "copy" or "memory").
    """
    out = []
    for index, text, most in zip(indices, texts, room):
        most = min(most, limit)
        mine = index.propose(most) if most > 0 else NOTHING
        theirs = memory.propose(text[-64:], most) if memory is not None and most > 0 else NOTHING
        better = theirs.match > mine.match and len(theirs.tokens) >= len(mine.tokens)
        out.append((theirs, "memory") if better else (mine, "copy"))
    return out


def with_copies(draft: Draft, copies: list[tuple[Copy, str]], lengths: list[int], room: list[int]) -> Draft:
    """The drafter's `draft`, with the first `lengths` [A] tokens of a row's copy in place of its drafts where that
    isn't 0.

    A copy is settled by the committed text: where others were drawn from a law, its own puts everything on its tokens.
    """
    copied = [i for i, n in enumerate(lengths) if n]
    if not copied:
        return draft
    rows, width = len(lengths), max(max(lengths), draft.tokens.shape[1])
    device = draft.tokens.device
    table = torch.zeros(rows, width, dtype=torch.long)
    for i in copied:
        table[i, : lengths[i]] = torch.tensor(copies[i][0].tokens[: lengths[i]])
    table, mine = table.to(device), torch.tensor([[n > 0] for n in lengths], device=device)
    tokens = torch.where(mine, table, _wide(draft.tokens, width))
    q = draft.q
    if q is not None:
        q = _wide(q, width)
        q[copied] = torch.nn.functional.one_hot(tokens[copied].to(q.device), q.shape[-1]).to(q.dtype)
    return replace(
        draft,
        tokens=tokens,
        lengths=[n or m for n, m in zip(lengths, draft.lengths)],
        q=q,
        log_q=_wide(draft.log_q, width),
        confidence=None if draft.confidence is None else _wide(draft.confidence, width),
        room=[most if n else mine for n, most, mine in zip(lengths, room, draft.room)],
        sources=[copies[i][1] if n else source for i, (n, source) in enumerate(zip(lengths, draft.sources))],
        matches=[copies[i][0].match if n else 0 for i, n in enumerate(lengths)],
    )


def _wide(values: torch.Tensor, width: int) -> torch.Tensor:
    """`values` [A, L, ...] as [A, width, ...], filled with zeros."""
    if values.shape[1] == width:
        return values
    wide = values.new_zeros(values.shape[0], width, *values.shape[2:])
    wide[:, : values.shape[1]] = values
    return wide
