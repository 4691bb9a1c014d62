"""What becomes of every generation option with a drafter: tried out on a tiny target and written to docs/generation_options.md.

python tests/generation_options.py      rewrites the file; a test says when that is needed
"""

import string
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, LogitsProcessor, StoppingCriteria  # noqa: E402

from hf_dspark import SpeculationConfig, keyed_processors  # noqa: E402
from hf_dspark.decoding.generate import CACHE_FIELD  # noqa: E402
from hf_dspark.decoding.options import FOREIGN, WITHOUT_EFFECT  # noqa: E402

DOC, NEW, SEED = ROOT / "docs" / "generation_options.md", 10, 5
TEXT = """# Generation options

What becomes of an option of `generate()` when a drafter is passed as `assistant_model`. This file is written by
`tests/generation_options.py`, which tries every option on a small model in float64, and the tests fail when it is out of date.

* **exact**: the output equals plain generation's, token for token (and score for score where scores are asked for). Under
  *sampled*, plain generation is keyed sampling (`keyed_processors`) and ours is `SpeculationConfig(verification="match",
  seed=...)`; the verifications `ratio` and `block` use the same probabilities and give the same distribution.
* **refused**: a `ValueError` that says why and what to set instead.

No option is silently ignored: those without effect are listed last. `SpeculationConfig(engine="stock")` runs transformers' own
assisted loop instead of ours: one row, the same greedy tokens and the same distribution, none of the rest is promised. `cache`
was called `past_key_values` before transformers 5.24.
"""


class Option(NamedTuple):
    """`name` as shown, the code in it before a semicolon; `kwargs` for `generate`, or a function of the prompt that makes them
    anew for each call. `only`: "sampled" for what greedy decoding doesn't read, "ours" for what plain generation can't do here,
    or a name in KNOBS."""

    name: str
    kwargs: object
    only: str = ""
    rows: int = 1


class AddOne(LogitsProcessor):
    """A processor of a user's own, which depends on the prefix."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) + 1) % scores.shape[-1]] += 2.0
        return scores


class Silent(BaseStreamer):
    def put(self, value): ...

    def end(self): ...


class StopAtLength(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] % 13 == 0)


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose every id is a letter or digit, as stop strings need to know how tokens are spelt."""
    characters = string.ascii_letters + string.digits
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters[: tiny.V])}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def cache_of(target, prompt):
    cache = DynamicCache(config=target.config)
    target(prompt[:, :-1], **{CACHE_FIELD: cache}, use_cache=True)
    return {CACHE_FIELD: cache}


def options(case) -> dict[str, list[Option]]:
    target, prompt = case.target, case.prompts[0][None]
    tokenizer, word = letters(), case.new[0][4]
    stop = tokenizer.decode(case.new[0][4:6])
    return {
        "Length and stopping": [
            Option("max_new_tokens", dict(max_new_tokens=7)),
            Option("max_length", dict(max_new_tokens=None, max_length=prompt.shape[1] + 6)),
            Option("min_length", dict(min_length=prompt.shape[1] + 7, eos_token_id=word)),
            Option("min_new_tokens", dict(min_new_tokens=7, eos_token_id=word)),
            Option("eos_token_id; one or several", dict(eos_token_id=[word, 7], pad_token_id=0)),
            Option("stop_strings", dict(stop_strings=[stop], tokenizer=tokenizer)),
            Option("stopping_criteria", dict(stopping_criteria=StoppingCriteriaList([StopAtLength()]))),
            Option("max_time", dict(max_time=100.0)),
        ],
        "Sampling": [
            Option("temperature", dict(temperature=0.7), "sampled"),
            Option("top_k", dict(top_k=5), "sampled"),
            Option("top_p", dict(top_p=0.8), "sampled"),
            Option("min_p", dict(min_p=0.05), "sampled"),
            Option("top_h", dict(top_h=0.6), "sampled"),
            Option("typical_p", dict(typical_p=0.9), "sampled"),
            Option("epsilon_cutoff", dict(epsilon_cutoff=0.01), "sampled"),
            Option("eta_cutoff", dict(eta_cutoff=0.01), "sampled"),
            Option("renormalize_logits", dict(renormalize_logits=True)),
            Option("num_return_sequences", dict(num_return_sequences=3), "sampled"),
        ],
        "Processors": [
            Option("repetition_penalty", dict(repetition_penalty=1.3)),
            Option("encoder_repetition_penalty", dict(encoder_repetition_penalty=1.3)),
            Option("no_repeat_ngram_size", dict(no_repeat_ngram_size=2)),
            Option("encoder_no_repeat_ngram_size", dict(encoder_no_repeat_ngram_size=2)),
            Option("bad_words_ids", dict(bad_words_ids=[[word], case.new[0][1:3]])),
            Option("sequence_bias", dict(sequence_bias=[[[word], -5.0], [case.new[0][1:3], 3.0]])),
            Option("suppress_tokens", dict(suppress_tokens=[word])),
            Option("begin_suppress_tokens", dict(begin_suppress_tokens=[case.new[0][0]])),
            Option("forced_bos_token_id", dict(forced_bos_token_id=word)),
            Option("forced_eos_token_id", dict(forced_eos_token_id=word)),
            Option("exponential_decay_length_penalty", dict(exponential_decay_length_penalty=(3, 1.5), eos_token_id=word)),
            Option("remove_invalid_values", dict(remove_invalid_values=True)),
            Option("prefix_allowed_tokens_fn", dict(prefix_allowed_tokens_fn=lambda row, ids: list(range(3, 60, 2)))),
            Option("logits_processor; your own", lambda p: dict(logits_processor=LogitsProcessorList([AddOne()]))),
            Option("guidance_scale; classifier-free guidance", dict(guidance_scale=1.5)),
            Option("watermarking_config; SynthID", lambda p: dict(watermarking_config=_synthid())),
        ],
        "Inputs and caches": [
            Option("; several rows, left-padded", {}, rows=4),
            Option("inputs_embeds", lambda p: dict(input_ids=None, inputs_embeds=target.get_input_embeddings()(p).detach())),
            Option("cache; a DynamicCache, or one from an earlier call", lambda p: cache_of(target, p)),
            Option("use_cache=False", dict(use_cache=False)),
            Option("cache_implementation='static'", dict(cache_implementation="static")),
            Option("cache_implementation='offloaded'; or 'quantized'", dict(cache_implementation="offloaded"), "ours"),
            Option("prefill_chunk_size", dict(prefill_chunk_size=4)),
        ],
        "Outputs": [
            Option("output_scores", dict(output_scores=True)),
            Option("output_logits", dict(output_logits=True)),
            Option("output_hidden_states; one row", dict(output_hidden_states=True)),
            Option("output_hidden_states; several rows", dict(output_hidden_states=True), rows=2),
            Option("output_attentions; one row", dict(output_attentions=True)),
            Option("streamer; one row", lambda p: dict(streamer=Silent())),
            Option("streamer; several rows", lambda p: dict(streamer=Silent()), "ours", rows=2),
        ],
        "Other ways to generate": [
            Option("num_beams", dict(num_beams=2)),
            Option("prompt_lookup_num_tokens", dict(prompt_lookup_num_tokens=3)),
            Option("assistant_early_exit", dict(assistant_early_exit=1), "ours"),
            Option("dola_layers", dict(dola_layers="high"), "ours"),
            Option("assistant_tokenizer", dict(assistant_tokenizer=tokenizer), "ours"),
            Option("num_assistant_tokens", dict(num_assistant_tokens=2)),
            *(Option(name, {name: "heuristic" if "schedule" in name else 7}, "ours") for name in FOREIGN),
            Option("SpeculationConfig(verification='block')", {}, "block"),
            Option("SpeculationConfig(loop_gate=-0.5)", {}, "loop"),
        ],
    }  # fmt: skip


def _synthid():
    from transformers import SynthIDTextWatermarkingConfig

    return SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)


KNOBS = {"block": dict(verification="block"), "loop": dict(loop_gate=-0.5)}


def outcome(case, option: Option, sampled: bool) -> tuple[str, str]:
    """("exact" | "refused" | "different", the reason of a refusal)."""
    target, batch = case.target, tiny.padded(case.prompts[: option.rows])
    knobs = dict(verification="match", seed=SEED) if sampled else {}
    speculation = SpeculationConfig(**{**knobs, **KNOBS.get(option.only, {})})

    def call(**more):
        given = option.kwargs(batch["input_ids"]) if callable(option.kwargs) else dict(option.kwargs)
        more = {**given, **more}
        if "logits_processor" in given and "logits_processor" in more:
            more["logits_processor"] = LogitsProcessorList([*given["logits_processor"], *more["logits_processor"]])
        base = dict(max_new_tokens=NEW, return_dict_in_generate=True, **batch)
        return target.generate(**{k: v for k, v in {**base, **more}.items() if v is not None})

    expected = None
    if option.only != "ours":
        expected = _plain(call, option, sampled, batch)
    texts = case.texts
    if expected is not None:
        texts = [_real(row, batch, i, len(expected.sequences)) for i, row in enumerate(expected.sequences)]
    try:
        ours = call(do_sample=sampled, assistant_model=tiny.good(texts, block=4), speculation=speculation)
    except ValueError as error:
        return "refused", str(error).split(": ")[0]
    return ("exact" if expected is not None and _equal(expected, ours, sampled) else "different"), ""


def _plain(call, option: Option, sampled: bool, batch: dict):
    """Plain generation; sampled, it is greedy decoding behind the same warpers and keyed noise."""
    if not sampled:
        return call(do_sample=False)
    warpers = dict(option.kwargs) if option.only == "sampled" else {}
    rows = {k: v.repeat_interleave(warpers.pop("num_return_sequences", 1), 0) for k, v in batch.items()}
    noise = keyed_processors(GenerationConfig(do_sample=True, **warpers), SEED, batch["input_ids"].shape[1])
    return call(do_sample=False, logits_processor=noise, **rows, **dict.fromkeys([*warpers, "num_return_sequences"]))


def _real(row: torch.Tensor, batch: dict, i: int, rows: int) -> list[int]:
    """A row without its left pads, as scripted drafters know texts."""
    i = i * batch["attention_mask"].shape[0] // rows
    return row[int((batch["attention_mask"][i] == 0).sum()) :].tolist()


def _equal(a, b, sampled: bool) -> bool:
    """Sequences, and what else was asked for. (Keyed sampling's scores hold its noise, so sampled ones aren't compared.)"""
    same = a.sequences.shape == b.sequences.shape and torch.equal(a.sequences, b.sequences)
    for name in ("scores", "logits"):
        x, y = getattr(a, name, None), getattr(b, name, None)
        same &= (x is None) == (y is None)
        same &= x is None or sampled or all(torch.allclose(i, j.to(i), atol=1e-5) for i, j in zip(x, y, strict=True))
    for name in ("hidden_states", "attentions"):
        x, y = getattr(a, name, None), getattr(b, name, None)
        same &= (x is None) == (y is None) and (x is None or len(x) == len(y))
    return same


@torch.no_grad()
def table() -> dict[str, list[tuple[str, str, str, str]]]:
    """Per group: name, greedy, sampled, note."""
    case, out = tiny.load_case("llama"), {}
    for group, choices in options(case).items():
        out[group] = []
        for option in choices:
            greedy, note = ("-", "") if option.only == "sampled" else outcome(case, option, False)
            sampled, why = ("-", "") if option.only == "block" else outcome(case, option, True)
            out[group].append((option.name, greedy, sampled, note or why))
    return out


def markdown() -> str:
    parts = [TEXT]
    for group, rows in table().items():
        parts.append(f"\n## {group}\n\n| Option | Greedy | Sampled | |\n|---|---|---|---|\n")
        parts += [f"| {_shown(name)} | {greedy} | {sampled} | {note} |\n" for name, greedy, sampled, note in rows]
    parts.append("\n## Without effect\n\n| Option | Why |\n|---|---|\n")
    parts += [f"| `{name}` | {why} |\n" for name, why in WITHOUT_EFFECT.items()]
    return "".join(parts)


def _shown(name: str) -> str:
    code, _, words = name.partition(";")
    return f"`{code}`{',' if words else ''}{words}" if code else words.strip()


if __name__ == "__main__":
    DOC.write_text(markdown(), encoding="utf-8")
