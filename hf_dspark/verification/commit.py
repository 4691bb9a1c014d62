"""The one place where verified tokens become output: cut at the first stop token, the budget, or the first criterion."""

from collections.abc import Callable

import torch


def commit(
    tokens: list[int], stop_ids: frozenset[int], budget: int, stopped: Callable[[int], bool] | None = None
) -> tuple[list[int], str | None]:
    """Tokens to keep of one row's verified `tokens`, and why the row ends here, if it does.

    Args:
        tokens: accepted drafts and the target's token after them, in order.
        stop_ids: end-of-sequence ids; the first one is kept and ends the row.
        budget: how many more tokens the row may have, at least 1.
        stopped: `stopped(i)` tells whether a stopping criterion fires once tokens[: i + 1] are in place; asked in order.

    Returns:
        The kept tokens, and `"stop"`, `"length"`, `"criteria"` or None; whichever comes first in token order, a stop token
        at the budget's edge counting as `"stop"`.
    """
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1], "stop"
        if stopped is not None and stopped(i):
            return tokens[: i + 1], "criteria"
        if i + 1 >= budget:
            return tokens[: i + 1], "length"
    return tokens, None


def row_stopped(criteria, row: torch.Tensor, start: int, scores) -> Callable[[int], bool] | None:
    """The question `commit` asks of transformers' stopping criteria.

    `row` [1, n]: the output row (prompt columns as given) with the new tokens in place from column `start`; `scores`: the
    processed scores [V] of all generated tokens, the new ones included, or None.
    """
    if not criteria:
        return None

    def stopped(i: int) -> bool:
        seen = None if scores is None else tuple(s[None] for s in scores[: len(scores) - row.shape[1] + start + i + 1])
        return bool(criteria(row[:, : start + i + 1], seen).all())

    return stopped
