"""One generate call: what transformers prepared comes in, a [`DecodeLoop`] runs, the usual outputs go out."""

import dataclasses

import torch
from transformers.generation import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_dspark.modeling import SpeculationConfig
from hf_dspark.verification.probabilities import DEFAULTS, Scorer

from .cache import from_user_cache
from .candidates import stock_generate
from .loop import DecodeLoop, Request, Settings
from .options import check_options
from .outputs import Recorder, SpeculationStats, SpeculativeOutput
from .policy import policy_for
from .preparation import check_positions
from .selfcheck import check_forward
from .target import KNOWN_INPUTS, FeatureTap, Target, check_target_model

# Renamed from past_key_values in transformers 5.24; the old name stays readable there.
CACHE_FIELD = "cache" if "cache" in SpeculativeOutput.__dataclass_fields__ else "past_key_values"


def check_call(target, drafter, mode, config, kwargs) -> None:
    """Refuse, before any work, what this loop can't do exactly. Stands in for transformers' own validation.

    Raises:
        ValueError: naming the option, why it can't work and what to set.
    """
    check_target_model(target)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"This call asks for {mode.value} (num_beams={config.num_beams}), which compares whole hypotheses and has no exact "
            "draft-and-verify form: set num_beams=1, or drop assistant_model."
        )
    if kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("assistant_tokenizer was given, and a drafter shares its target's tokenizer: drop it.")
    if config.use_cache is False:
        raise ValueError("use_cache=False was given, and drafts are verified on top of a cache: drop it or set use_cache=True.")
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("assistant_ensemble_weight changes the output's distribution, which this library never does: drop it.")
    rivals = [n for n in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp") if getattr(config, n, None)]
    if rivals:
        raise ValueError(
            f"{' and '.join(rivals)} was given beside assistant_model, and a call drafts in one way only: drop one of them."
        )
    if getattr(config, "dola_layers", None) is not None:
        raise ValueError(
            "dola_layers changes the target's distribution from inside its layers, which drafts can't be verified against: "
            "drop it, or drop assistant_model."
        )
    if getattr(config, "token_healing", False) and kwargs.get("tokenizer") is None:
        raise ValueError("token_healing=True needs tokenizer=...: pass it to generate.")
    implementation = config.cache_implementation
    if implementation is not None and ("quantized" in implementation or "offloaded" in implementation):
        raise ValueError(
            f"cache_implementation={implementation!r} can't be rolled back row by row after a rejected draft: drop it, or "
            "generate without assistant_model."
        )
    check_options(config)
    drafter.bind(target)
    speculation = resolve(drafter, config)
    if speculation.confidence_threshold > 0 and not drafter.config.confidence_head and not drafter.config.survival_model:
        raise ValueError(
            f"confidence_threshold={speculation.confidence_threshold} was set, and this drafter predicts no confidence "
            "(confidence_head=False, no survival_model): set confidence_threshold=0, or use a drafter with the head."
        )
    check_forward(target, speculation.trust_target)
    if speculation.engine == "own":  # our loop allocates its own cache: keep generate from making one to throw away
        config.cache_implementation, config.use_cache = None, False


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
            "inputs_embeds was given, and a drafter needs the prompt's token ids (its context is looked up by token): pass "
            "input_ids, or drop assistant_model."
        )
    # Of a prompt without images, transformers still hands on an empty dict of encoder outputs.
    empty = {k for k, v in model_kwargs.items() if v is None or (isinstance(v, dict) and not v)}
    extra = sorted(model_kwargs.keys() - KNOWN_INPUTS - empty)
    if extra:
        raise ValueError(
            f"The target was given {', '.join(extra)}, which this loop can't carry from round to round exactly: leave them out "
            "(text-only prompts work), or drop assistant_model."
        )
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None and positions.dim() > 2:
        raise ValueError(
            "This target's positions have several components per token (multimodal rotary), which ragged rows can't be placed "
            "with: use its text-only sibling, or drop assistant_model."
        )
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {mask.dim()} dimensions, and rows are told from their pads by a 2D one: pass [B, T]."
        )


def _check_columns(input_ids, mask, width: int, positions) -> None:
    """The mask [B, T] must tell the whole story: which tokens there are, and at which positions."""
    if width != input_ids.shape[1]:
        raise ValueError(
            f"attention_mask has {width} columns for {input_ids.shape[1]} tokens: pass one column per token, and with a filled "
            "cache the whole text, cached tokens included, as processors and criteria see it."
        )
    if positions is not None:
        expected = mask.long().cumsum(-1) - 1
        given = positions[..., -mask.shape[1] :].to(mask.device).expand(mask.shape[0], -1)
        if given.shape != mask.shape or not torch.equal(given[mask.bool()], expected[mask.bool()]):
            raise ValueError(
                "position_ids differ from what attention_mask implies (each row's real tokens counted from 0), and rows are "
                "placed by the mask: leave position_ids out, or drop assistant_model."
            )


def _check_states(config, rows: int) -> None:
    asked = [n for n in ("output_hidden_states", "output_attentions") if getattr(config, n, False)]
    if not config.return_dict_in_generate or not asked:
        return
    if rows > 1:
        raise ValueError(
            f"{' and '.join(asked)} asked for {rows} rows, whose tokens come from different forwards: generate one row at a "
            "time, or run the target once over the result."
        )
    if config.prefill_chunk_size is not None:
        raise ValueError(
            f"{' and '.join(asked)} asked together with prefill_chunk_size={config.prefill_chunk_size}, which splits the "
            "prompt's states: drop one of them."
        )


def _requests(input_ids, mask, config, device) -> tuple[list[Request], list[torch.Tensor]]:
    """One request per row, without its pads, and the columns its prompt came from."""
    budget = config.max_length - input_ids.shape[1]
    requests, columns = [], []
    for row in range(input_ids.shape[0]):
        where = mask[row].nonzero()[:, 0]
        if not len(where):
            raise ValueError(f"Row {row} of attention_mask is all zeros, an empty prompt: give it at least one token (bos).")
        prompt = input_ids[row, where].to(device)
        requests.append(Request(row, prompt, budget, input_ids[row].to(device)))
        columns.append(where.cpu())
    return requests, columns


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
        check_positions(target, [0], mask.sum(1).tolist(), [config.max_length - input_ids.shape[1]] * len(mask), engine="stock")
        kwargs = dict(logits_processor=logits_processor, stopping_criteria=stopping_criteria, generation_config=config)
        kwargs |= dict(synced_gpus=synced_gpus, streamer=streamer, inputs_tensor=inputs_tensor, tokenizer=tokenizer)
        return stock_generate(target, drafter, speculation, stock, input_ids, kwargs | model_kwargs, mask)
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(
            f"A streamer was given for {input_ids.shape[0]} rows, and rows advance by different numbers of tokens: stream one "
            "row at a time, or drop the streamer."
        )
    _check_states(config, input_ids.shape[0])
    with FeatureTap(target, drafter.config.target_layer_ids) as tap:
        return _run(target, drafter, tap, speculation, input_ids, mask, logits_processor, stopping_criteria, config, streamer,
                    model_kwargs)  # fmt: skip


def _run(target, drafter, tap, speculation, input_ids, mask, processors, criteria, config, streamer, model_kwargs):
    model = Target(target, tap)
    requests, columns = _requests(input_ids, mask, config, model.device)
    rows, given = len(requests), model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    cache = model.new_cache(rows) if given is None else from_user_cache(model.config, given, mask.bool())
    lengths, budgets = [len(r.prompt) for r in requests], [r.budget for r in requests]
    check_positions(target, cache.lengths.tolist(), lengths, budgets, config.prefill_chunk_size)
    pads = [input_ids.shape[1] - len(r.prompt) for r in requests]
    seed = torch.randint(2**62, ()).item() if speculation.seed is None else speculation.seed
    eos = getattr(config, "_eos_token_tensor", None)
    settings = Settings(
        do_sample=config.do_sample,
        seed=seed,
        stop_ids=frozenset() if eos is None else frozenset(eos.flatten().tolist()),
        criteria=StoppingCriteriaList(c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)),
        prefill_chunk=config.prefill_chunk_size,
    )
    stats, recorder = SpeculationStats.empty(rows), Recorder(config, rows)
    keep_cache = bool(config.return_dict_in_generate) or given is not None
    scorer = Scorer(processors, pads, [r.prompt for r in requests], keep_min_length=config.min_new_tokens is None)
    auto = speculation.scheduler is not None or speculation.loop_gate == "auto"
    policy = policy_for(drafter, target, speculation) if auto else None
    loop = DecodeLoop(model, drafter, speculation, settings, requests, cache, scorer, recorder, stats, keep_cache, policy)
    new: list[list[int]] = [[] for _ in requests]
    for commits in loop.run():
        for c in commits:
            new[c.row].extend(c.tokens)
            if streamer is not None:
                streamer.put(torch.tensor([c.tokens]))
    if streamer is not None:
        streamer.end()
    stats.notes += loop.proposer.notes()
    if policy is not None:
        stats.notes.append(policy.note())
    drafter.last_speculation = stats
    sequences = _sequences(input_ids, new, config)
    if not keep_cache:
        return sequences
    cache = loop.final_cache()
    width = input_ids.shape[1]
    cache.columns = [torch.cat([c, torch.arange(width, width + len(t) - 1)]) for c, t in zip(columns, new)]
    if given is not None:
        cache.write_back(given)
        cache = given
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences,
        scores=recorder.stacked("scores"),
        logits=recorder.stacked("logits"),
        **{name: tuple(states) for name, states in recorder.states.items()},
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
