"""One generate call: what transformers prepared comes in, a [`DecodeLoop`] runs, the usual outputs go out."""

import dataclasses
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from transformers.generation import GenerationMode

from hf_dspark.drafting.tree_drafts import check_trees
from hf_dspark.modeling import SpeculationConfig
from hf_dspark.verification.commit import check_criteria, own_criteria
from hf_dspark.verification.probabilities import DEFAULTS, Scorer

from .batch import Request, Settings
from .cache import from_user_cache
from .candidates import stock_generate
from .costs import policy_for
from .loop import DecodeLoop
from .options import check_options
from .outputs import RowOutputs, SpeculationStats, SpeculativeOutput, stacked
from .preparation import check_positions
from .selfcheck import check_forward
from .target import KNOWN_INPUTS, FeatureTap, Target, check_target_model

# Renamed from past_key_values in transformers 5.24; the old name stays readable there.
CACHE_FIELD = "cache" if "cache" in SpeculativeOutput.__dataclass_fields__ else "past_key_values"


# What `listening` says to the calls inside it.
_LISTENING: ContextVar[tuple] = ContextVar("listening", default=(None, None))


# A list where `generate` leaves its requests, prepared as usual, instead of running them: how an engine lets them in.
_ADMITTING: ContextVar[list | None] = ContextVar("admitting", default=None)


def prepared(target, **call) -> list[Request]:
    """The requests that `target.generate(**call)` would run, with everything transformers and this library check and
    prepare.

    Raises:
        whatever that call would raise before its first token.
    """
    waiting: list[Request] = []
    token = _ADMITTING.set(waiting)
    try:
        target.generate(**call)
    finally:
        _ADMITTING.reset(token)
    return waiting


@contextmanager
def listening(observer=None, policy=None):
    """Let every `generate` call in this block show its rounds to `observer` (a callable of a [`Round`]) and ask
    `policy`, instead of the drafter's own, for what is set to "auto"."""
    token = _LISTENING.set((observer, policy))
    try:
        yield
    finally:
        _LISTENING.reset(token)


def check_call(target, drafter, mode, config, kwargs) -> None:
    """Refuse, before any work, what this loop can't do exactly. Stands in for transformers' own validation.

    Raises:
        ValueError: naming the option, why it can't work and what to set.
    """
    check_target_model(target)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"This call asks for {mode.value} (num_beams={config.num_beams}), which compares whole hypotheses and has "
            "no exact draft-and-verify form: set num_beams=1, or drop assistant_model."
        )
    if kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("assistant_tokenizer was given, and a drafter shares its target's tokenizer: drop it.")
    if kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True (FSDP or DeepSpeed ZeRO-3, whose processes must call every module equally often) was "
            "given, and processes draft and verify different numbers of times, so they would wait for each other for "
            "ever: gather the weights first and pass synced_gpus=False, or generate without assistant_model."
        )
    if config.use_cache is False:
        raise ValueError(
            "use_cache=False was given, and drafts are verified on top of a cache: drop it or set use_cache=True."
        )
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError(
            "assistant_ensemble_weight changes the output's distribution, which this library never does: drop it."
        )
    rivals = [n for n in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp") if getattr(config, n, None)]
    if rivals:
        raise ValueError(
            f"{' and '.join(rivals)} was given beside assistant_model, and a call drafts in one way only: drop one of "
            "them."
        )
    if getattr(config, "dola_layers", None) is not None:
        raise ValueError(
            "dola_layers changes the target's distribution from inside its layers, which drafts can't be verified "
            "against: drop it, or drop assistant_model."
        )
    if getattr(config, "token_healing", False) and kwargs.get("tokenizer") is None:
        raise ValueError("token_healing=True needs tokenizer=...: pass it to generate.")
    implementation = config.cache_implementation
    if implementation is not None and ("quantized" in implementation or "offloaded" in implementation):
        raise ValueError(
            f"cache_implementation={implementation!r} can't be rolled back row by row after a rejected draft: drop it, "
            "or generate without assistant_model."
        )
    check_options(config)
    drafter.bind(target)
    speculation = resolve(drafter, config)
    if drafter.config.max_block == 0:
        check_copying(speculation)
    if (
        speculation.confidence_threshold > 0
        and not drafter.config.confidence_head
        and not drafter.config.survival_model
    ):
        raise ValueError(
            f"confidence_threshold={speculation.confidence_threshold} was set, and this drafter predicts no confidence "
            "(confidence_head=False, no survival_model): set confidence_threshold=0, or use a drafter with the head."
        )
    check_trees(target, drafter, speculation)
    check_forward(target, speculation.trust_target)
    if speculation.engine == "own":  # our loop allocates its own cache: keep generate from making one to throw away
        config.cache_implementation, config.use_cache = None, False


def check_copying(speculation: SpeculationConfig) -> None:
    """Refuse knobs of what a drafter without weights doesn't have.

    Raises:
        ValueError: naming the knob and what to set.
    """
    if speculation.copy is None:
        raise ValueError(
            "This drafter drafts nothing but copies of the text, and the call's copy=None leaves nothing to draft: set "
            "copy='auto' or a number of tokens in SpeculationConfig, or drop assistant_model."
        )
    for name, off, instead in (
        ("loop_gate", None, "copy=n sets the longest copy"),
        ("num_draft_tokens", None, "copy=n sets the longest copy"),
        ("confidence_threshold", 0.0, "copy='auto' copies only where it is expected to pay"),
    ):
        if (value := getattr(speculation, name)) != off:
            raise ValueError(
                f"{name}={value} was set, and copies of the text come from no model, so they have no stages, blocks or "
                f"confidence: leave {name}={off}; {instead}."
            )


def resolve(drafter, config) -> SpeculationConfig:
    """The call's knobs: the drafter's stored ones, then transformers' own, then `generate(speculation=...)`."""
    given = getattr(config, "speculation", None)
    if given is not None:
        if not hasattr(given, "verification"):
            raise ValueError(
                f"speculation={given!r} is a {type(given).__name__}, whose fields nobody checked: pass "
                "hf_dspark.SpeculationConfig(...)."
            )
        return given
    knobs = drafter.speculation
    changes = {}
    for ours, theirs in (
        ("num_draft_tokens", "num_assistant_tokens"),
        ("confidence_threshold", "assistant_confidence_threshold"),
    ):
        value = getattr(config, theirs, None)
        if value is not None and value != DEFAULTS.get(theirs):  # a value that equals the default is taken as not set
            changes[ours] = value
    return dataclasses.replace(knobs, **changes) if changes else knobs


def _check_inputs(input_ids, model_kwargs, inputs_tensor) -> None:
    if not input_ids.shape[1] or (inputs_tensor is not None and inputs_tensor.is_floating_point()):
        raise ValueError(
            "inputs_embeds was given, and a drafter needs the prompt's token ids (its context is looked up by token): "
            "pass input_ids, or drop assistant_model."
        )
    # Of a prompt without images, transformers still hands on an empty dict of encoder outputs.
    empty = {k for k, v in model_kwargs.items() if v is None or (isinstance(v, dict) and not v)}
    extra = sorted(model_kwargs.keys() - KNOWN_INPUTS - empty)
    if extra:
        raise ValueError(
            f"The target was given {', '.join(extra)}, which this loop can't carry from round to round exactly: leave "
            "them out (text-only prompts work), or drop assistant_model."
        )
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None and positions.dim() > 2:
        raise ValueError(
            "This target's positions have several components per token (multimodal rotary), which ragged rows can't be "
            "placed with: use its text-only sibling, or drop assistant_model."
        )
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {mask.dim()} dimensions, and rows are told from their pads by a 2D one: pass [B, T]."
        )


def _check_columns(input_ids, mask, width: int, positions) -> None:
    """The mask [B, T] must tell the whole story: which tokens there are, and at which positions."""
    if width != input_ids.shape[1]:
        raise ValueError(
            f"attention_mask has {width} columns for {input_ids.shape[1]} tokens: pass one column per token, and with "
            "a filled cache the whole text, cached tokens included, as processors and criteria see it."
        )
    if positions is not None:
        expected = mask.long().cumsum(-1) - 1
        given = positions[..., -mask.shape[1] :].to(mask.device).expand(mask.shape[0], -1)
        if given.shape != mask.shape or not torch.equal(given[mask.bool()], expected[mask.bool()]):
            raise ValueError(
                "position_ids differ from what attention_mask implies (each row's real tokens counted from 0), and "
                "rows are placed by the mask: leave position_ids out, or drop assistant_model."
            )


def _check_states(config, rows: int) -> None:
    asked = [n for n in ("output_hidden_states", "output_attentions") if getattr(config, n, False)]
    if not config.return_dict_in_generate or not asked:
        return
    if rows > 1:
        raise ValueError(
            f"{' and '.join(asked)} asked for {rows} rows, whose tokens come from different forwards: generate one row "
            "at a time, or run the target once over the result."
        )
    if config.prefill_chunk_size is not None:
        raise ValueError(
            f"{' and '.join(asked)} asked together with prefill_chunk_size={config.prefill_chunk_size}, which splits "
            "the prompt's states: drop one of them."
        )


def _settings(config, speculation, ends, processors, columns, prompts) -> Settings:
    return Settings(
        do_sample=config.do_sample,
        seed=torch.randint(2**62, ()).item() if speculation.seed is None else speculation.seed,
        stop_ids=ends.stop_ids,
        criteria=ends.criteria,
        scorer=Scorer(
            processors,
            columns,
            prompts,
            keep_min_length=config.min_new_tokens is None,
            lazy=not config.do_sample or speculation.verification != "block",
        ),
    )


def _requests(input_ids, mask, processors, criteria, config, speculation) -> tuple[list[Request], list[torch.Tensor]]:
    """One request per row, without its pads, and the columns its prompt came from."""
    ends = own_criteria(criteria, config)
    check_criteria(ends.criteria, len(input_ids))
    columns = [row.nonzero()[:, 0] for row in mask]
    for row, where in enumerate(columns):
        if not len(where):
            raise ValueError(
                f"Row {row} of attention_mask is all zeros, an empty prompt: give it at least one token (bos)."
            )
    prompts = [ids[where] for ids, where in zip(input_ids, columns)]
    settings = _settings(config, speculation, ends, processors, list(input_ids), prompts)
    budget = max(ends.max_length - input_ids.shape[1], 1)
    requests = []
    for row, (shown, prompt) in enumerate(zip(input_ids, prompts)):
        request = Request(
            key=row,
            prompt=prompt.tolist(),
            budget=budget,
            settings=settings,
            place=row,
            stream=row,
            shown=shown,
            outputs=RowOutputs(config),
        )
        requests.append(request)
    return requests, [where.cpu() for where in columns]


def _check_lengths(target, past: list[int], requests: list[Request], chunk: int | None) -> None:
    check_positions(target, past, [len(r.prompt) for r in requests], [r.budget for r in requests], chunk)


@torch.no_grad()
def speculative_generate(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus=False,
    streamer=None,
    inputs_tensor=None,
    assistant_model=None,
    assistant_tokenizer=None,
    tokenizer=None,
    stock=None,
    **model_kwargs,
):
    """`GenerationMixin._assisted_decoding` for our drafters: same arguments, same returns."""
    drafter, config = assistant_model, generation_config
    speculation = resolve(drafter, config)
    _check_inputs(input_ids, model_kwargs, inputs_tensor)
    mask = model_kwargs.get("attention_mask")
    # transformers drops a mask of ones, and notes how long it was.
    width = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    _check_columns(input_ids, mask, width, model_kwargs.get("position_ids"))
    if speculation.engine == "stock":
        check_positions(
            target, [0], mask.sum(1).tolist(), [config.max_length - input_ids.shape[1]] * len(mask), engine="stock"
        )
        kwargs = dict(logits_processor=logits_processor, stopping_criteria=stopping_criteria, generation_config=config)
        kwargs |= dict(synced_gpus=synced_gpus, streamer=streamer, inputs_tensor=inputs_tensor, tokenizer=tokenizer)
        return stock_generate(target, drafter, speculation, stock, input_ids, kwargs | model_kwargs, mask)
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(
            f"A streamer was given for {input_ids.shape[0]} rows, and rows advance by different numbers of tokens: "
            "stream one row at a time, or drop the streamer."
        )
    _check_states(config, input_ids.shape[0])
    waiting = _ADMITTING.get()
    if waiting is not None:
        requests = _requests(input_ids, mask.bool(), logits_processor, stopping_criteria, config, speculation)[0]
        for request in requests:  # they will have company, which mustn't lie on the other side of a position limit
            check_positions(target, [0, 0], [len(request.prompt), 1], [request.budget, 1])
        waiting += requests
        return input_ids
    with FeatureTap(target, drafter.config.target_layer_ids) as tap:
        return _run(target, drafter, tap, speculation, input_ids, mask, logits_processor, stopping_criteria, config, streamer,
                    model_kwargs)  # fmt: skip


def _run(target, drafter, tap, speculation, input_ids, mask, processors, criteria, config, streamer, model_kwargs):
    model = Target(target, tap)
    requests, columns = _requests(
        input_ids.to(model.device), mask.to(model.device), processors, criteria, config, speculation
    )
    given = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    keep_cache = bool(config.return_dict_in_generate) or given is not None
    observer, policy = _LISTENING.get()
    if policy is None and speculation.measures:
        policy = policy_for(drafter, target, speculation)
    loop = DecodeLoop(model, drafter, speculation, policy, observer, config.prefill_chunk_size, keep_cache)
    cache = None if given is None else from_user_cache(model.config, given, mask.bool())
    past = [0] * len(requests) if cache is None else cache.lengths.tolist()
    _check_lengths(target, past, requests, config.prefill_chunk_size)
    loop.admit(requests, lambda: cache)
    new: list[list[int]] = [[] for _ in requests]
    while loop.active:
        for commit in loop.step():
            if commit.error is not None:
                raise commit.error
            new[commit.key].extend(commit.tokens)
            if streamer is not None:
                streamer.put(torch.tensor([commit.tokens]))
    if streamer is not None:
        streamer.end()
    notes = loop.notes()
    outputs = [r.outputs for r in requests]
    stats = drafter.last_speculation = SpeculationStats.of(outputs, loop.seconds, notes)
    sequences = _sequences(input_ids, new, config)
    if not keep_cache:
        return sequences
    cache, width = loop.final_cache(), input_ids.shape[1]
    cache.columns = [torch.cat([c, torch.arange(width, width + len(t) - 1)]) for c, t in zip(columns, new)]
    if given is not None:
        cache.write_back(given)
        cache = given
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences,
        scores=stacked(outputs, "scores"),
        logits=stacked(outputs, "logits"),
        **{name: tuple(states) for name, states in outputs[0].states.items()},
        speculation=stats,
        **{CACHE_FIELD: cache},
    )


def _sequences(input_ids, new: list[list[int]], config) -> torch.Tensor:
    """Input columns as given, then the new tokens, ended rows filled with pad."""
    pad = getattr(config, "_pad_token_tensor", None)
    width = max(len(t) for t in new)
    out = input_ids.new_full((len(new), width), 0 if pad is None else int(pad))
    for row, tokens in enumerate(new):
        out[row, : len(tokens)] = torch.tensor(tokens, device=out.device)
    return torch.cat([input_ids, out], 1)
