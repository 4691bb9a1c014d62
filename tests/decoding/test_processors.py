"""The user's processors meet each position once, on the true prefix of the unpadded row, and never one that can't be."""

import pytest
import tiny
import torch
from tiny import generated
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig
from transformers.generation import RepetitionPenaltyLogitsProcessor

from hf_dspark import SpeculationConfig


class Recording(LogitsProcessor):
    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.extend(input_ids.tolist())
        return scores


def sample(target, drafter, batch, **kwargs):
    return target.generate(**batch, assistant_model=drafter, max_new_tokens=tiny.NEW, **kwargs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_processor_sees_the_prefix_of_every_token_once_and_nothing_else(llama, side):
    spy = Recording()
    sample(llama.target, tiny.good(llama.texts), llama.padded(side), logits_processor=[spy], do_sample=False)
    expected = [text[: len(p) + i] for text, p in zip(llama.texts, llama.prompts) for i in range(tiny.NEW)]
    assert sorted(spy.seen) == sorted(expected)


@pytest.mark.parametrize("verification", ["match", "ratio"])
def test_in_sampling_too(llama, verification):
    spy, knobs = Recording(), SpeculationConfig(verification=verification, seed=5)
    drafter, batch = tiny.Twin(llama.target, llama.prompts, block=4), llama.padded()
    out = sample(llama.target, drafter, batch, logits_processor=[spy], do_sample=True, speculation=knobs)
    assert 0.2 < drafter.last_speculation.acceptance_rate < 0.9
    real = torch.cat([batch["attention_mask"].bool(), torch.ones(4, tiny.NEW) > 0], 1)
    texts = [row[mask].tolist() for row, mask in zip(out, real)]
    expected = [text[: len(p) + i] for text, p in zip(texts, llama.prompts) for i in range(tiny.NEW)]
    assert sorted(spy.seen) == sorted(expected)


def test_block_verification_shows_every_verified_prefix_once(llama):
    spy, drafter = Recording(), tiny.Twin(llama.target, llama.prompts[:1], block=4)
    batch, knobs = dict(input_ids=llama.prompts[0][None]), SpeculationConfig(verification="block", seed=5)
    sample(llama.target, drafter, batch, logits_processor=[spy], do_sample=True, speculation=knobs)
    stats, start, lengths = drafter.last_speculation, 10, [9]
    for drafts, emitted in zip(stats.draft_lengths[0], stats.acceptance_lengths[0]):
        lengths += range(start, start + drafts + 1)
        start += emitted
    assert list(map(len, spy.seen)) == lengths
    assert 1 < stats.tau < 4


def test_processors_are_not_asked_about_what_follows_a_stop_token(llama):
    spy, eos = Recording(), llama.new[0][5]
    llama.target.generate(
        llama.prompts[0][None], assistant_model=tiny.oracle(llama.texts), max_new_tokens=tiny.NEW, do_sample=False,
        eos_token_id=eos, logits_processor=[spy],
    )  # fmt: skip
    end = llama.new[0].index(eos)
    assert sorted(map(len, spy.seen)) == list(range(9, 9 + end + 1))


# ---------------------------------------------------------------------- prefix_allowed_tokens_fn


def test_constraints_get_the_row_they_are_for_and_no_prefix_that_cannot_be(llama):
    eos, length = 2, 9

    def allowed(row, prefix):
        new = prefix[len(llama.prompts[row]) :].tolist()
        assert eos not in new and len(new) < length, "asked about what comes behind the end"
        return [t for t in range(3, tiny.V) if t % 4 == row] if len(new) < 4 + row else [eos]

    alone = []
    for row, prompt in enumerate(llama.prompts):
        text = tiny.plain(
            llama.target, prompt, max_new_tokens=length, eos_token_id=eos, pad_token_id=tiny.PAD,
            prefix_allowed_tokens_fn=lambda _, prefix, row=row: allowed(row, prefix),
        )  # fmt: skip
        alone.append(text)
    new = [text[len(p) :] for text, p in zip(alone, llama.prompts)]
    assert [len(n) for n in new] == [5, 6, 7, 8]
    for drafter in (tiny.oracle(alone), tiny.good(alone), tiny.make_drafter(llama.target), tiny.make_eagle3(llama.target)):
        out = llama.target.generate(
            **llama.padded(), assistant_model=drafter, max_new_tokens=length, do_sample=False, eos_token_id=eos,
            pad_token_id=tiny.PAD, prefix_allowed_tokens_fn=allowed,
        )  # fmt: skip
        assert generated(out, 9, map(len, new)) == new


def test_constraints_of_returned_sequences_get_the_numbers_plain_generate_gives_them(llama):
    seen = set()

    def allowed(row, prefix):
        seen.add(row)
        return [t for t in range(3, tiny.V) if t % 2 == row % 2]

    ids = torch.stack([llama.prompts[0], llama.prompts[0].flip(0)])
    args = dict(max_new_tokens=6, do_sample=True, num_return_sequences=3, prefix_allowed_tokens_fn=allowed)
    plain = llama.target.generate(ids, **args)[:, 9:] % 2
    out = llama.target.generate(ids, assistant_model=tiny.make_drafter(llama.target), **args)
    assert (out[:, 9:] % 2).equal(plain)
    assert len(seen) in (2, 6), "by prompt, or by row in older releases"


# ---------------------------------------------------------------------- every processor in a ragged batch


EOS = 17
OPTIONS = {
    "min_new_tokens": dict(min_new_tokens=8, eos_token_id=[17, 24, 31, 45]),
    "min_length": dict(min_length=14, eos_token_id=[17, 24, 31, 45]),
    "forced_eos": dict(forced_eos_token_id=EOS, eos_token_id=EOS),
    "begin_suppress": dict(begin_suppress_tokens=list(range(3, 50))),
    "exponential_decay": dict(exponential_decay_length_penalty=(3, 1.5), eos_token_id=EOS),
    "encoder_repetition": dict(encoder_repetition_penalty=0.2),
    "encoder_no_repeat_ngram": dict(encoder_no_repeat_ngram_size=1),
    "repetition": dict(repetition_penalty=5.0),
    "no_repeat_ngram": dict(no_repeat_ngram_size=1),
    "bad_words": dict(bad_words_ids=[[t] for t in range(3, 60, 2)]),
    "sequence_bias": dict(sequence_bias=[[[t], 9.0] for t in range(3, 60, 5)] + [[[8, 13], -20.0]]),
    "suppress": dict(suppress_tokens=list(range(20, 40)), renormalize_logits=True),
    "remove_invalid": dict(remove_invalid_values=True, suppress_tokens=list(range(3, 20))),
    "watermark": dict(watermarking_config=WatermarkingConfig(greenlist_ratio=0.3, bias=9.0)),
    "repetition but for the prompt": dict(logits_processor="ignore prompt"),
}


@pytest.fixture(params=OPTIONS)
def option(request):
    return OPTIONS[request.param]


def made(option, prompt_columns):
    """The option, its processor made for a prompt of so many columns."""
    if "logits_processor" not in option:
        return {**option, "pad_token_id": tiny.PAD}
    return dict(logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(9.0, prompt_columns)]))


def test_ragged_rows_equal_their_own_plain_runs_under_every_processor(llama, option):
    texts = [tiny.plain(llama.target, p, max_new_tokens=tiny.NEW, **made(option, len(p))) for p in llama.prompts]
    new = [text[len(p) :] for text, p in zip(texts, llama.prompts)]
    stops = option.get("eos_token_id", [])
    stops = [stops] if isinstance(stops, int) else stops
    unaware = [n[: next((i + 1 for i, t in enumerate(n) if t in stops), None)] for n in llama.new]
    assert new != unaware, "the option does something"
    for drafter, side in ((tiny.good(texts), "left"), (tiny.oracle(texts, sharpness=1e4), "right")):
        out = sample(llama.target, drafter, llama.padded(side), do_sample=False, **made(option, 9))
        assert generated(out, 9, map(len, new)) == new


def test_returned_sequences_share_their_prompt_with_encoder_processors(llama):
    prompt, forbidden = llama.prompts[0], set(llama.prompts[0].tolist())
    out = llama.target.generate(
        prompt[None], assistant_model=tiny.make_drafter(llama.target), max_new_tokens=8, do_sample=True,
        num_return_sequences=3, encoder_no_repeat_ngram_size=1, temperature=3.0,
    )  # fmt: skip
    assert not forbidden & set(out[:, 9:].flatten().tolist())


# ---------------------------------------------------------------------- nothing left to choose


class Forbid(LogitsProcessor):
    """Leaves nothing possible behind `length` tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] == self.length else scores


@pytest.mark.parametrize("verification", ["match", "ratio", "block"])
@pytest.mark.parametrize("length", [9, 11])
def test_a_token_cannot_be_sampled_where_processors_forbid_everything(llama, verification, length):
    with pytest.raises(ValueError, match="left no token possible"):
        llama.target.generate(
            llama.prompts[0][None], assistant_model=tiny.oracle(llama.texts), max_new_tokens=8, do_sample=True,
            temperature=1e-3, logits_processor=[Forbid(length)],
            speculation=SpeculationConfig(verification=verification),
        )  # fmt: skip


def test_the_greedy_token_where_everything_is_forbidden_is_plain_generates(llama):
    args = dict(max_new_tokens=6, do_sample=False, logits_processor=[Forbid(11)])
    out = llama.target.generate(llama.prompts[0][None], assistant_model=tiny.good(llama.texts), **args)
    assert out[0].tolist() == tiny.plain(llama.target, llama.prompts[0], max_new_tokens=6, logits_processor=[Forbid(11)])
