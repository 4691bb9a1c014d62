"""What plain generation does between its forwards that a loop of our own has to do too, or else refuse.

Two things: some targets compute a forward by the longest text in it (rotary frequencies that change at a length), and
some prepare their own inputs. Neither shows in a forward of a few tokens.
"""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache, GenerationMixin

BASE = GenerationMixin.prepare_inputs_for_generation
CACHE = "cache" if "cache" in inspect.signature(BASE).parameters else "past_key_values"
WITHOUT_EFFECT = {"logits_to_keep", "use_cache", "cache_position"}


class PositionLimit(NamedTuple):
    """A length at which a target's forwards change.

    Args:
        at (`int`): forwards whose texts all have at most `at` tokens are computed alike.
        one_by_one (`bool`): beyond it, each length is computed in its own way, so a forward may hold one token only.
        cause (`str`): for messages.
    """

    at: int
    one_by_one: bool
    cause: str


def position_limits(config) -> list[PositionLimit]:
    """The lengths at which a text model of this configuration changes how it computes all tokens of a forward.

    Longrope (arXiv 2402.13753) has two sets of frequencies, one per side. Dynamic NTK scaling has one for every length,
    and dynamic masks (Doge) are drawn from all keys there are.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    longest, limits = getattr(config, "max_position_embeddings", None), set()
    for part in [rope, *(p for p in rope.values() if isinstance(p, dict))]:
        kind = part.get("rope_type", part.get("type")) or "default"
        if kind == "longrope":
            at = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", longest
            )
            limits.add(PositionLimit(at, False, "longrope"))
        elif "dynamic" in kind:
            limits.add(PositionLimit(longest, True, "dynamic NTK rotary scaling"))
    if getattr(config, "keep_window_size", None) is not None:
        limits.add(PositionLimit(config.keep_window_size, True, "a dynamic attention mask"))
    return sorted(limits)


def draft_room(limits: Sequence[PositionLimit], length: int) -> float:
    """Most drafts behind `length` committed tokens for which the forward lies on one side of every limit."""
    room = float("inf")
    for limit in limits:
        if length <= limit.at:
            room = min(room, limit.at - length)
        elif limit.one_by_one:
            room = 0
    return room


def check_positions(model, past, prompts, budgets, chunk: int | None = None, engine: str = "own") -> None:
    """Refuse calls in which a forward may lie on both sides of a limit, or plain generation's own steps can't be
    repeated.

    Args:
        model: the target. past, prompts, budgets (`Sequence[int]`, one per row): tokens cached, tokens given in all,
            and most tokens to generate. chunk (`int`, *optional*): tokens per forward of the prefill. engine (`str`):
                of the call.

    Raises:
        ValueError: naming the limit and what to set.
    """
    name = type(model).__name__
    for limit in position_limits(model.config.get_text_config()):
        # The last token is never fed.
        if all(n + budget - 1 <= limit.at for n, budget in zip(prompts, budgets)):
            continue
        beyond = min(prompts) > limit.at and (chunk is None or min(past) >= limit.at)
        where = f"{name} computes a forward by the longest text in it from {limit.at} tokens on ({limit.cause})"
        way_out = f"keep prompt and max_new_tokens within {limit.at} tokens, or generate without assistant_model."
        if engine == "stock":
            raise ValueError(f"{where}, which transformers' assisted loop doesn't heed: set engine='own', or {way_out}")
        if len(prompts) > 1 and (limit.one_by_one or not beyond):
            raise ValueError(
                f"{where}, and the {len(prompts)} rows of this batch may reach over it at different times: generate "
                f"one row at a time, {way_out}"
            )
        if recomputes(model, limit) and max(prompts) > limit.at and (chunk or 0 < max(past) <= limit.at):
            raise ValueError(
                f"{where} and then drops a cache of fewer tokens, which can't be followed with a filled cache or with "
                f"prefill_chunk_size={chunk}: leave both out, or generate without assistant_model."
            )


def recomputes(model, limit: PositionLimit) -> bool:
    """Whether plain generation drops its cache and feeds the whole text again just beyond `limit`, as Phi-3 does."""
    if limit.one_by_one or not _overrides(model):
        return False
    return _prepared(model, model.prepare_inputs_for_generation, limit.at + 1, _cache(limit.at)).get(CACHE) is None


def check_preparation(model) -> None:
    """Refuse a target whose own `prepare_inputs_for_generation` gives its forward other inputs than transformers'
    would.

    It is tried on a prompt and on a step, so neither a model's class nor an adapter around it needs to be known by
    name.

    Raises:
        ValueError: naming the inputs that differ, or `adapter_names`.
    """
    hooks = (h for m in model.modules() for h in m._forward_pre_hooks.values())
    if any("adapter_names" in getattr(h, "keywords", {}) for h in hooks):
        raise ValueError(
            "adapter_names gives every row an adapter of its own, and rows leave a drafted batch as they end: generate "
            "the rows of one adapter at a time (set_adapter), or drop assistant_model."
        )
    if not _overrides(model):
        return
    for count, cache in ((3, DynamicCache()), (3, _cache(2))):
        plain = _prepared(model, BASE.__get__(model), count, cache)
        try:
            own = _prepared(model, model.prepare_inputs_for_generation, count, cache)
        except Exception as error:
            own = {f"{type(error).__name__}: {error}": None}
        odd = sorted(k for k in {*plain, *own} if not _same(plain.get(k), own.get(k)) or (k in own) != (k in plain))
        if odd:
            raise ValueError(
                f"{type(model).__name__} prepares its own inputs ({', '.join(odd)} differ from what transformers "
                "prepares), as adapters with virtual tokens do, and drafts are verified without them: merge or disable "
                "the adapter, or generate without assistant_model."
            )


def _overrides(model) -> bool:
    return getattr(model.prepare_inputs_for_generation, "__func__", None) is not BASE


def _cache(length: int) -> DynamicCache:
    cache, empty = DynamicCache(), torch.zeros(1, 1, length, 1)
    cache.update(empty, empty, 0)
    return cache


def _prepared(model, method, count: int, cache) -> dict:
    """The inputs `method` makes of a text of `count` tokens, those in `cache` being cached."""
    past = cache.get_seq_length()
    ids = torch.ones(1, count, dtype=torch.long, device=model.device if model.device.type != "meta" else "cpu")
    places = torch.arange(count, device=ids.device)
    given = {CACHE: cache, "attention_mask": ids, "position_ids": places[None], "use_cache": True}
    parameters = inspect.signature(BASE).parameters
    optional = {
        "is_first_iteration": not past,
        "next_sequence_length": 1 if past else None,
        "cache_position": places[past:],
    }
    given |= {k: v for k, v in optional.items() if k in parameters}
    with torch.no_grad():
        inputs = method(ids, **given)
    return {k: v for k, v in inputs.items() if v is not None and k not in WITHOUT_EFFECT}


def _same(a, b) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b)
