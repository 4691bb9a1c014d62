"""Logits to scores: the only place where a target's or drafter's logits meet the user's processors.

Scores are float32, temperature and warpers included; a distribution is `softmax(scores)`. Transformers' own processors
run row by row on the row's own unpadded prefix, so a padded row gets what it would get alone.

The user's own processors are shown what plain generation shows them: the row's columns, pads included, and of accepted
text only, every prefix once and in order. Where that can't be had (several rows, verification that asks about rejected
drafts) they are refused, unless they declare `row_wise = True`: "I treat each row by its own tokens alone and keep no
state between calls". Those are called row by row, about drafts too, any number of times.
"""

import copy
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as lp

from .noise import keyed_scores

# What transformers fills in where nobody set a value.
DEFAULTS = getattr(GenerationConfig, "_get_default_generation_params", dict)()
# Warpers that ignore the prefix: many rows go through in one call.
PREFIX_FREE = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.SuppressTokensLogitsProcessor,
    lp.LogitNormalization,
    lp.InfNanRemoveLogitsProcessor,
)
# They run the target on a cache of their own, or carry a running state: a rejected draft can't be taken back out of
# them.
STATEFUL = tuple(
    getattr(lp, name)
    for name in (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "WhisperNoSpeechDetection",
        "AlternatingCodebooksLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
    )
    if hasattr(lp, name)
)
# Lengths that `generate` measured on the padded batch; a row without its pads is shorter.
LENGTHS = {
    "MinNewTokensLengthLogitsProcessor": "prompt_length_to_skip",
    "MinLengthLogitsProcessor": "min_length",
    "ForcedEOSTokenLogitsProcessor": "max_length",
    "ExponentialDecayLengthPenalty": "regulation_start",
    "SuppressTokensAtBeginLogitsProcessor": "begin_index",
    "KeyedNoise": "prompt_length",
}


class KeyedNoise(LogitsProcessor):
    """Adds keyed Gumbel noise, so that `argmax` of its output is a draw: keyed sampling with `do_sample=False`.

    Args:
        seed (`int`): the key.
        prompt_length (`int`): columns of the (padded) prompt; the first generated token has index 0.
        stream (`int`, *optional*): noise stream of the only row; `None` numbers the rows of the batch.
    """

    def __init__(self, seed: int, prompt_length: int, stream: int | None = None):
        self.seed, self.prompt_length, self.stream = seed, prompt_length, stream

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows = scores.shape[0]
        streams = range(rows) if self.stream is None else [self.stream] * rows
        return keyed_scores(scores, self.seed, streams, [input_ids.shape[1] - self.prompt_length] * rows, "target")


def keyed_processors(generation_config, seed: int, prompt_length: int) -> LogitsProcessorList:
    """Processors that sample with keyed random numbers: the warpers of `generation_config`, then the noise.

    `target.generate(**inputs, do_sample=False, logits_processor=keyed_processors(config, seed, prompt_length))` samples
    with the noise that `verification="match"` and `SpeculationConfig(seed=seed)` use: token for token the same text,
    with a drafter or without, in this library's loop or transformers' own.

    Args:
        generation_config (`GenerationConfig`): read for temperature, top_k, top_p and the other warpers. What it leaves
            open is what `generate(do_sample=True)` would use (`top_k=50`).
        seed (`int`): the key.
        prompt_length (`int`): `input_ids.shape[1]` of the call, padding included.

    Returns:
        `LogitsProcessorList`, for one call.
    """
    makers = (
        ("temperature", lp.TemperatureLogitsWarper, lambda v: v != 1.0),
        ("top_h", getattr(lp, "TopHLogitsWarper", None), lambda v: True),
        ("top_k", lp.TopKLogitsWarper, lambda v: v != 0),
        ("top_p", lp.TopPLogitsWarper, lambda v: v < 1.0),
        ("min_p", lp.MinPLogitsWarper, lambda v: True),
        ("typical_p", lp.TypicalLogitsWarper, lambda v: v < 1.0),
        ("epsilon_cutoff", lp.EpsilonLogitsWarper, lambda v: 0.0 < v < 1.0),
        ("eta_cutoff", lp.EtaLogitsWarper, lambda v: 0.0 < v < 1.0),
    )
    warpers = []
    for name, make, wanted in makers:
        value = getattr(generation_config, name, None)
        value = DEFAULTS.get(name) if value is None else value
        if value is not None and wanted(value):
            warpers.append(make(value))
    return LogitsProcessorList([*warpers, KeyedNoise(seed, prompt_length)])


class AsShown:
    """A processor of the user's own, shown the columns [T] of `generate`'s input in place of the row's `prompt` [n].

    Args:
        call: `call(ids, scores)`, ids [1, T + generated tokens].
    """

    def __init__(self, call: Callable, columns: torch.Tensor, prompt: torch.Tensor):
        self.call, self.columns, self.length = call, columns[None], len(prompt)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        new = input_ids[:, self.length :]
        return self.call(torch.cat([self.columns.to(new.device), new], 1), scores)


def users_own(processor):
    """What of `processor` is the user's own code: itself, the function it asks, or None."""
    if isinstance(processor, lp.PrefixConstrainedLogitsProcessor):
        return processor._prefix_allowed_tokens_fn
    return None if type(processor).__module__ == lp.__name__ or isinstance(processor, KeyedNoise) else processor


def row_wise(own) -> bool:
    """Whether the user declared that `own` treats each row by its own tokens alone and keeps no state between calls."""
    return getattr(own, "row_wise", False) is True


def check_own(processors, rows: int, lazy: bool) -> None:
    """Refuse the user's own processors where they can't be shown what plain generation shows them.

    Args:
        processors: those of the call. rows (`int`): its rows. lazy (`bool`): whether only accepted text is asked about.

    Raises:
        ValueError: naming the processor, the declaration and the other way out.
    """
    for p in processors:
        own = users_own(p)
        if own is None or row_wise(own):
            continue
        name = getattr(own, "__name__", type(own).__name__)
        declare = (
            "If it treats each row by its own tokens alone and keeps no state between calls, declare that by row_wise "
            "= True on its class (or function)"
        )
        if rows > 1 and own is p:
            raise ValueError(
                f"{name} is a logits processor of your own, given for {rows} rows: plain generation shows it all rows "
                "in one call, and rows with drafts advance by different numbers of tokens. "
                f"{declare}, or generate one row at a time."
            )
        if not lazy:
            raise ValueError(
                f"{name} is a logits processor or constraint of your own, and verification='block' and engine='stock' "
                f"ask about drafts that are rejected afterwards, which plain generation never shows it. {declare}, or "
                "set verification='ratio' or 'match' and engine='own'."
            )


def for_row(processor, row: int, columns: torch.Tensor, prompt: torch.Tensor, keep_min_length: bool):
    """The processor that batch-1 generation of this row's `prompt` [n] would have: lengths without the pads that are
    among its `columns` [T]. The user's own code is shown the columns."""
    pads = len(columns) - len(prompt)
    if users_own(processor) is processor:
        return AsShown(processor, columns, prompt)
    name = type(processor).__name__
    attribute = LENGTHS.get(name)
    if attribute and pads and not (name == "MinLengthLogitsProcessor" and keep_min_length):
        processor = copy.copy(processor)
        setattr(processor, attribute, getattr(processor, attribute) - pads)
    if name == "KeyedNoise" and processor.stream is None:
        processor = copy.copy(processor)
        processor.stream = row
    elif isinstance(processor, lp.PrefixConstrainedLogitsProcessor):
        allowed, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        numbered = lp.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(number, sent), 1)
        processor = AsShown(numbered, columns, prompt)
    elif isinstance(processor, lp.EncoderRepetitionPenaltyLogitsProcessor):
        processor = copy.copy(processor)
        processor.encoder_input_ids = prompt[None]
    elif isinstance(processor, lp.EncoderNoRepeatNGramLogitsProcessor):
        processor = lp.EncoderNoRepeatNGramLogitsProcessor(processor.ngram_size, prompt[None])
    elif isinstance(processor, lp.RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if ignored is not None:
            processor = copy.copy(processor)
            ignored = int(ignored[row]) if isinstance(ignored, torch.Tensor) else ignored
            processor.prompt_ignore_length = max(ignored - pads, 0)
    return processor


class Scorer:
    """Applies the user's processors to target and draft logits.

    Args:
        processors (`LogitsProcessorList`): as `generate` prepared them, for the padded batch.
        columns (`list[torch.Tensor]`): each output row's columns [T] of the call's `input_ids`, pads included.
        prompts (`list[torch.Tensor]`): each row's prompt [n] without them.
        keep_min_length (`bool`): whether `min_length` counts real tokens (it was not made from `min_new_tokens`).
        lazy (`bool`): whether the verifier asks about accepted text only, once and in order.

    Raises:
        ValueError: for processors that keep a state, and the user's own where they can't be shown what they expect.
    """

    def __init__(self, processors, columns: list, prompts: list, keep_min_length: bool = False, lazy: bool = True):
        bad = [type(p).__name__ for p in processors if isinstance(p, STATEFUL)]
        if bad:
            raise ValueError(
                f"{', '.join(bad)} keeps a state of its own between calls, and a rejected draft can't be taken back "
                "out of it: call generate without assistant_model for this option (guidance_scale, watermarking), or "
                "drop the processor."
            )
        check_own(processors, len(prompts), lazy)
        own = [users_own(p) for p in processors]
        self.empty = len(processors) == 0
        self.prefix_free = all(type(p) in PREFIX_FREE for p in processors)
        # Whether some must not be asked about text beyond the row's end, as plain generation never would.
        self.own = any(o is not None and not row_wise(o) for o in own)
        self.shared = LogitsProcessorList(processors)
        # The drafter may use any q, so what must see accepted text only is left out of drafting.
        drafting = [p for p, o in zip(processors, own) if o is None or row_wise(o)]
        rows = [] if self.prefix_free else list(zip(range(len(prompts)), columns, prompts, strict=True))
        self.target = [LogitsProcessorList(for_row(p, *row, keep_min_length) for p in processors) for row in rows]
        self.draft = [LogitsProcessorList(for_row(p, *row, keep_min_length) for p in drafting) for row in rows]

    def _apply(self, processors, rows, prefixes, logits):
        scores = logits.float()
        if self.empty:
            return scores
        if self.prefix_free:
            return self.shared(None, scores)
        return torch.cat(
            [processors[r](prefix, scores[i : i + 1]) for i, (r, prefix) in enumerate(zip(rows, prefixes))]
        )

    def target_scores(self, rows: list[int], prefixes, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores [R, V] of target logits [R, V]; `rows` are output rows, `prefixes` their token ids [1,
        n]."""
        return self._apply(self.target, rows, prefixes, logits)

    def draft_scores(self, rows: list[int], prefixes, logits: torch.Tensor) -> torch.Tensor:
        """As `target_scores` for the drafter's logits, without the user's own processors that aren't `row_wise`."""
        return self._apply(self.draft, rows, prefixes, logits)
