"""Where a text ends: at the token where plain `generate` ends it, wherever that lies in a block."""

import time

import pytest
import tiny
import torch
from tiny import generated
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_dspark import SpeculationConfig

DRAFTERS = {"oracle": tiny.oracle, "good": tiny.good}


@pytest.fixture(params=DRAFTERS)
def drafter(request, llama):
    return DRAFTERS[request.param](llama.texts)


def run(target, prompt, drafter=None, **kwargs):
    ids = prompt[None] if prompt.dim() == 1 else prompt
    return target.generate(ids, do_sample=False, assistant_model=drafter, **{"max_new_tokens": tiny.NEW, **kwargs})[
        0
    ].tolist()


def test_a_stop_token_at_every_place_of_a_block(llama, drafter):
    prompt, new = llama.prompts[0], llama.new[0]
    for token in new:
        out = run(llama.target, prompt, drafter, eos_token_id=token, pad_token_id=tiny.PAD)
        assert out == prompt.tolist() + new[: new.index(token) + 1]


def test_a_list_of_stop_tokens(llama, drafter):
    prompt, new = llama.prompts[2], llama.new[2]
    for a in range(0, tiny.NEW, 3):
        stops = [new[a], new[(a + 5) % tiny.NEW], 60]
        end = min(i for i, t in enumerate(new) if t in stops)
        assert (
            run(llama.target, prompt, drafter, eos_token_id=stops, pad_token_id=tiny.PAD)
            == prompt.tolist() + new[: end + 1]
        )


def test_no_stop_token_and_a_text_in_circles(llama):
    prompt = torch.tensor([7, 8, 9] * 4)
    expected = tiny.plain(llama.target, prompt, max_new_tokens=30, eos_token_id=None)
    assert run(llama.target, prompt, tiny.constant(8), eos_token_id=None, max_new_tokens=30) == expected


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_the_budget_is_met_to_the_token(llama, drafter, max_new_tokens):
    out = run(llama.target, llama.prompts[1], drafter, max_new_tokens=max_new_tokens)
    assert out == llama.texts[1][: llama.prompts[1].numel() + max_new_tokens]
    assert sum(drafter.last_speculation.acceptance_lengths[0]) == max_new_tokens - 1
    assert max(drafter.last_speculation.draft_lengths[0], default=0) <= max(max_new_tokens - 2, 0)


def test_max_length_counts_the_prompt(llama, drafter):
    out = run(llama.target, llama.prompts[0], drafter, max_new_tokens=None, max_length=13)
    assert out == llama.texts[0][:13]


def test_the_budget_of_a_batch_is_counted_from_its_width(llama, drafter):
    out = llama.target.generate(**llama.padded(), assistant_model=drafter, max_length=13, do_sample=False)
    assert generated(out, 9, [4] * 4) == [new[:4] for new in llama.new]


# ---------------------------------------------------------------------- criteria


class AtLength(StoppingCriteria):
    def __init__(self, length):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class OnToken(StoppingCriteria):
    """Fires while the last token is one of some; a check once per block would run past it."""

    row_wise = True

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


def test_a_criterion_at_every_length(llama, drafter):
    prompt = llama.prompts[0]
    for n in range(1, tiny.NEW + 1):
        criterion = AtLength(9 + n)
        assert run(llama.target, prompt, drafter, stopping_criteria=[criterion]) == llama.texts[0][: 9 + n]
        assert criterion.seen == list(range(10, 9 + n + 1)), "asked once per token, in order"


def test_a_criterion_on_the_last_token(llama, drafter):
    for token in llama.new[3]:
        criteria = StoppingCriteriaList([OnToken([token])])
        expected = tiny.plain(llama.target, llama.prompts[3], max_new_tokens=tiny.NEW, stopping_criteria=criteria)
        assert run(llama.target, llama.prompts[3], drafter, stopping_criteria=criteria) == expected


def test_rows_of_a_batch_meet_criteria_on_their_own(llama, drafter):
    criteria = [OnToken([llama.new[row][2 * row + 1] for row in range(4)])]
    texts = [tiny.plain(llama.target, p, max_new_tokens=tiny.NEW, stopping_criteria=criteria) for p in llama.prompts]
    expected = [text[len(p) :] for text, p in zip(texts, llama.prompts)]
    assert len(set(map(len, expected))) > 2
    out = llama.target.generate(
        **llama.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False, stopping_criteria=criteria
    )
    assert generated(out, 9, map(len, expected)) == expected


class Patience(StoppingCriteria):
    """Counts its calls, and fires for all rows at the n-th."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


def test_a_criterion_that_counts_its_calls(llama, drafter):
    for calls, stop in ((5, None), (30, 8), (9, 8)):
        stops = dict(eos_token_id=None if stop is None else llama.new[0][stop], pad_token_id=tiny.PAD)
        plain, ours = Patience(calls), Patience(calls)
        expected = tiny.plain(
            llama.target, llama.prompts[0], max_new_tokens=tiny.NEW, stopping_criteria=[plain], **stops
        )
        assert run(llama.target, llama.prompts[0], drafter, stopping_criteria=[ours], **stops) == expected
        assert ours.left == plain.left


def test_a_criterion_that_may_end_all_rows_together_is_refused_for_several(llama, drafter):
    with pytest.raises(
        ValueError, match="Patience is a stopping criterion of your own, given for 4 rows.*row_wise = True"
    ):
        llama.target.generate(
            **llama.padded(), assistant_model=drafter, max_new_tokens=9, stopping_criteria=[Patience(5)]
        )


class Subclass(MaxLengthCriteria):
    pass


@pytest.mark.parametrize("length", [9, 11, 17, 30])
@pytest.mark.parametrize("kind", [MaxLengthCriteria, Subclass])
def test_a_length_criterion_of_the_users_own(llama, drafter, kind, length):
    args = dict(stopping_criteria=[kind(length)], max_new_tokens=12)
    expected = tiny.plain(llama.target, llama.prompts[0], **args)
    assert len(expected) == max(length, 10) if kind is MaxLengthCriteria else min(max(length, 10), 21)
    assert run(llama.target, llama.prompts[0], drafter, **args) == expected


@pytest.mark.parametrize("own", [3, 9])
@pytest.mark.parametrize("configured", [None, 6])
def test_stop_tokens_of_the_users_own_replace_the_configured_ones(llama, drafter, own, configured):
    new, pad = llama.new[0], tiny.PAD
    args = dict(max_new_tokens=12, pad_token_id=pad, eos_token_id=None if configured is None else new[configured])
    args["stopping_criteria"] = [EosTokenCriteria(new[own])]
    expected = tiny.plain(llama.target, llama.prompts[0], **args)
    assert expected == llama.texts[0][: 9 + new.index(new[own]) + 1]
    assert run(llama.target, llama.prompts[0], drafter, **args) == expected


class Unsure(StoppingCriteria):
    """Reads the scores of the latest token."""

    def __init__(self, limit):
        self.limit, self.tops = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.tops.append(round(float(scores[-1].softmax(-1).max()), 5))
        return torch.tensor([self.tops[-1] < self.limit])


def test_criteria_that_read_scores(llama, drafter):
    args = dict(max_new_tokens=tiny.NEW, output_scores=True, return_dict_in_generate=True, do_sample=False)
    for limit in (0.0, 0.25, 0.5):
        plain, ours, ids = Unsure(limit), Unsure(limit), llama.prompts[0][None]
        expected = llama.target.generate(ids, **args, stopping_criteria=[plain])
        out = llama.target.generate(ids, **args, stopping_criteria=[ours], assistant_model=drafter)
        assert out.sequences.equal(expected.sequences)
        assert ours.tops == plain.tops


def test_time_that_is_up_ends_the_text_after_the_next_token(llama, drafter):
    assert run(llama.target, llama.prompts[0], drafter, max_time=0.0) == llama.texts[0][:10]
    late = MaxTimeCriteria(max_time=1e6, initial_timestamp=time.time())
    assert run(llama.target, llama.prompts[0], drafter, stopping_criteria=[late]) == llama.texts[0]


# ---------------------------------------------------------------------- stop strings


@pytest.fixture(scope="module")
def tokenizer():
    """Tokens of one and two letters, so that stop strings cross tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(97 + i) for i in range(26)]
    words = (letters + [a + b for a in "stuvwx" for b in letters])[: tiny.V]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="a")


def test_stop_strings_that_start_and_end_inside_tokens(llama, drafter, tokenizer):
    prompt = llama.prompts[0]
    words = tokenizer.convert_ids_to_tokens(llama.new[0])
    for i in range(1, tiny.NEW):
        for string in (words[i], words[i - 1][1:] + words[i][:1], words[i - 1] + words[i][:1]):
            args = dict(stop_strings=[string], tokenizer=tokenizer, max_new_tokens=tiny.NEW)
            assert run(llama.target, prompt, drafter, **args) == tiny.plain(llama.target, prompt, **args)


# ---------------------------------------------------------------------- streaming


class Recorder:
    def __init__(self):
        self.chunks, self.ended = [], 0

    def put(self, value):
        assert not self.ended and value.device.type == "cpu"
        self.chunks.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("stop", [None, 6])
def test_a_streamer_gets_committed_tokens_only(llama, drafter, stop):
    streamer, eos = Recorder(), None if stop is None else llama.new[0][stop]
    out = run(llama.target, llama.prompts[0], drafter, streamer=streamer, eos_token_id=eos, pad_token_id=tiny.PAD)
    prompt, *chunks = streamer.chunks
    assert prompt == llama.prompts[0].tolist()
    assert sum(chunks, prompt) == out
    assert [len(c) for c in chunks] == [1, *drafter.last_speculation.acceptance_lengths[0]]
    assert max(map(len, chunks)) <= 8 and min(map(len, chunks)) >= 1
    assert streamer.ended == 1


def test_text_streamers_write_the_text(llama, drafter, tokenizer, capsys):
    from transformers import TextIteratorStreamer, TextStreamer

    run(llama.target, llama.prompts[0], drafter, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == "".join(tokenizer.convert_ids_to_tokens(llama.new[0]))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    run(llama.target, llama.prompts[0], drafter, streamer=streamer)
    assert "".join(streamer) == "".join(tokenizer.convert_ids_to_tokens(llama.new[0]))


def test_a_streamer_of_a_sampled_text_gets_it_as_returned(llama):
    streamer, twin = Recorder(), tiny.Twin(llama.target, llama.prompts[:1], block=3)
    out = llama.target.generate(
        llama.prompts[0][None], assistant_model=twin, do_sample=True, max_new_tokens=tiny.NEW, streamer=streamer,
        speculation=SpeculationConfig(verification="block"),
    )  # fmt: skip
    assert sum(streamer.chunks, []) == out[0].tolist()
