"""The one place where verified tokens become output: cut at the first stop token, the budget, or the first
criterion."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers.generation import stopping_criteria as sc

from .probabilities import row_wise


def commit(
    tokens: list[int], stop_ids: frozenset[int], budget: int, stopped: Callable[[int], bool] | None = None
) -> tuple[list[int], str | None]:
    """Tokens to keep of one row's verified `tokens`, and why the row ends here, if it does.

    Args:
        tokens: accepted drafts and the target's token after them, in order.
        stop_ids: end-of-sequence ids; the first one is kept and ends the row.
        budget: how many more tokens the row may have, at least 1.
        stopped: `stopped(i)` tells whether a stopping criterion fires once tokens[: i + 1] are in place; asked in
            order, once per token that is kept, stop tokens included, as plain generation asks.

    Returns:
        The kept tokens, and `"stop"`, `"length"`, `"criteria"` or None; whichever comes first in token order, a stop
        token at the budget's edge counting as `"stop"`.
    """
    for i, token in enumerate(tokens):
        fired = stopped is not None and stopped(i)
        if token in stop_ids:
            return tokens[: i + 1], "stop"
        if fired:
            return tokens[: i + 1], "criteria"
        if i + 1 >= budget:
            return tokens[: i + 1], "length"
    return tokens, None


class Ends(NamedTuple):
    """What ends the rows of a call: a length in columns, prompt included; stop tokens; and the other criteria."""

    max_length: int
    stop_ids: frozenset[int]
    criteria: sc.StoppingCriteriaList


def own_criteria(criteria, generation_config) -> Ends:
    """Take the criteria that `generate` prepared apart, so that only what a text can't be cut by is called per token.

    A `MaxLengthCriteria` or `EosTokenCriteria` of the user's replaces the configuration's own in the prepared list;
    then its length or its tokens count. Subclasses of them are criteria like any other.

    Args:
        criteria (`StoppingCriteriaList`): as `_get_stopping_criteria` made them, the configuration's own included.
        generation_config (`GenerationConfig`): read for `max_length` where no criterion has one.
    """
    lengths = [c.max_length for c in criteria if type(c) is sc.MaxLengthCriteria]
    tokens = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is sc.EosTokenCriteria]
    rest = [c for c in criteria if type(c) not in (sc.MaxLengthCriteria, sc.EosTokenCriteria)]
    return Ends(
        min(lengths, default=generation_config.max_length),
        frozenset().union(*tokens),
        sc.StoppingCriteriaList(rest),
    )


def check_criteria(criteria, rows: int) -> None:
    """Refuse the user's own criteria for several rows, whose tokens plain generation would show them together.

    Raises:
        ValueError: naming the criterion, the declaration and the other way out.
    """
    for c in criteria:
        if rows > 1 and type(c).__module__ != sc.__name__ and not row_wise(c):
            raise ValueError(
                f"{type(c).__name__} is a stopping criterion of your own, given for {rows} rows: plain generation "
                "shows it all rows in one call, and rows with drafts advance by different numbers of tokens. If it "
                "treats each row by its own tokens alone and keeps no state between calls, declare that by row_wise = "
                "True on its class, or generate one row at a time."
            )


def row_stopped(
    criteria, row: torch.Tensor, start: int, scores: Callable | None = None
) -> Callable[[int], bool] | None:
    """The question `commit` asks of transformers' stopping criteria. No token is asked about twice: answers are kept.

    A loop may ask before the verdict is complete, as soon as draft i is accepted: processors of the user's own mustn't
    be shown text behind the end of a row.

    Args:
        row ([1, n]): the output row (prompt columns as given) with the new tokens in place from column `start`; may be
            filled later than here, up to the token asked about.
        scores: `scores(i)` lists the processed scores [V] of all generated tokens up to the i-th new one; None where
            they aren't kept.
    """
    if not criteria:
        return None
    answers: dict[int, bool] = {}

    def stopped(i: int) -> bool:
        if i not in answers:
            seen = None if scores is None else tuple(s[None] for s in scores(i))
            answers[i] = bool(criteria(row[:, : start + i + 1], seen).all())
        return answers[i]

    return stopped
