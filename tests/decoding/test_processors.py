"""Processors of the user's own see what plain generation shows them, or are refused; transformers' own see the unpadded
row."""

import pytest
import tiny
import torch
from tiny import generated
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, WatermarkingConfig
from transformers.generation import RepetitionPenaltyLogitsProcessor

from hf_dspark import SpeculationConfig, keyed_processors


class Recording(LogitsProcessor):
    """Notes what it is shown, and changes the scores by how often it was called: a state that no draft may touch."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores) == 1
        self.seen.append(input_ids[0].tolist())
        bias = torch.zeros_like(scores)
        bias[0, len(self.seen) % 7 :: 7] = 4.0
        return scores + bias


class Declared(LogitsProcessor):
    """Makes the parity of a row's tokens alternate, by nothing but the row itself."""

    row_wise = True

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            scores[row, int(ids[-1]) % 2 :: 2] = -torch.inf
        return scores


def sample(target, drafter, batch, **kwargs):
    return target.generate(**batch, assistant_model=drafter, max_new_tokens=tiny.NEW, **kwargs)


def one_row(batch, row):
    return {name: value[row : row + 1] for name, value in batch.items()}


def shown(ids, new):
    """What plain generation shows a processor while it writes `new` behind the columns `ids`."""
    return [ids + new[:i] for i in range(len(new))]


# ---------------------------------------------------------------------- processors of the user's own


@pytest.mark.parametrize("row", range(4))
def test_a_processor_of_the_users_own_is_shown_what_plain_generation_shows_it(llama, row):
    batch = one_row(llama.padded(), row)  # pads on the left included
    plain = Recording()
    args = dict(max_new_tokens=tiny.NEW, do_sample=False)
    expected = llama.target.generate(**batch, **args, logits_processor=[plain])
    assert plain.seen == shown(batch["input_ids"][0].tolist(), expected[0, 9:].tolist())
    text = llama.prompts[row].tolist() + expected[0, 9:].tolist()
    for drafter in (
        tiny.oracle([text]),
        tiny.good([text]),
        tiny.make_drafter(llama.target),
        tiny.make_eagle3(llama.target),
    ):
        ours = Recording()
        out = llama.target.generate(**batch, **args, logits_processor=[ours], assistant_model=drafter)
        assert out.equal(expected) and ours.seen == plain.seen
    assert expected[0, 9:].tolist() != llama.new[row]


@pytest.mark.parametrize("verification", ["match", "ratio"])
def test_in_sampling_too(llama, verification):
    knobs, accepted, drafted = SpeculationConfig(verification=verification, seed=5), 0, 0
    for row, prompt in enumerate(llama.prompts):
        spy, batch = Recording(), one_row(llama.padded(), row)
        drafter = tiny.Twin(llama.target, [prompt], block=4)
        args = dict(logits_processor=[spy], do_sample=True, temperature=2.0, speculation=knobs)
        out = sample(llama.target, drafter, batch, **args)
        assert spy.seen == shown(batch["input_ids"][0].tolist(), out[0, 9:].tolist())
        accepted += sum(drafter.last_speculation.acceptance_lengths[0]) - len(
            drafter.last_speculation.acceptance_lengths[0]
        )
        drafted += sum(drafter.last_speculation.draft_lengths[0])
    assert 0.05 < accepted / drafted < 0.9


def test_keyed_sampling_shows_a_processor_the_same_with_a_drafter_and_without(llama):
    batch, seen = one_row(llama.padded(), 2), []
    noise = keyed_processors(GenerationConfig(), 5, 9)
    plain = llama.target.generate(
        **batch, max_new_tokens=9, do_sample=False, logits_processor=[spy := Recording(), *noise]
    )
    seen.append(spy.seen)
    ours = llama.target.generate(
        **batch, max_new_tokens=9, do_sample=True, logits_processor=[spy := Recording()],
        assistant_model=tiny.Twin(llama.target, [llama.prompts[2]], block=4),
        speculation=SpeculationConfig(verification="match", seed=5),
    )  # fmt: skip
    assert ours.equal(plain) and spy.seen == seen[0]


@pytest.mark.parametrize("end", ["stop token", "criterion"])
def test_processors_are_not_shown_what_follows_the_end_of_a_row(llama, end):
    last = llama.new[0][5]

    class Quiet(Recording):
        def __call__(self, input_ids, scores):
            super().__call__(input_ids, scores)
            return scores

    spy = Quiet()
    stopping = dict(eos_token_id=last)
    if end == "criterion":
        stopping = dict(stopping_criteria=[At(last)], output_scores=True, return_dict_in_generate=True)
    llama.target.generate(
        llama.prompts[0][None], assistant_model=tiny.oracle(llama.texts), max_new_tokens=tiny.NEW, do_sample=False,
        logits_processor=[spy], **stopping,
    )  # fmt: skip
    stop = llama.new[0].index(last)
    assert spy.seen == shown(llama.prompts[0].tolist(), llama.new[0][: stop + 1])


class At(StoppingCriteria):
    """Fires while the last token is this one; asked once per token, in order, with the scores of all tokens."""

    def __init__(self, token):
        self.token, self.calls = token, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        assert len(scores) == self.calls and input_ids.shape[1] == 9 + self.calls
        return input_ids[:, -1] == self.token


class ThinkingBudget(LogitsProcessor):
    """Ends a thought by force after a number of tokens; counts columns and remembers that it has ended one."""

    def __init__(self, budget, end, columns):
        self.budget, self.end, self.columns, self.ended = budget, end, columns, False

    def __call__(self, input_ids, scores):
        new = input_ids[0, self.columns :]
        self.ended |= self.end in new.tolist()
        if not self.ended and len(new) >= self.budget:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, self.end] = 0.0
            return forced
        return scores


@pytest.mark.parametrize("budget", [0, 3, 13, 20])
def test_a_thinking_budget(llama, budget):
    batch, args = one_row(llama.padded(), 3), dict(max_new_tokens=tiny.NEW, do_sample=False)
    expected = llama.target.generate(**batch, **args, logits_processor=[ThinkingBudget(budget, 20, 9)])
    text = llama.prompts[3].tolist() + expected[0, 9:].tolist()
    assert (20 in expected[0, 9:].tolist()) == (budget < tiny.NEW)
    for drafter in (tiny.oracle([text]), tiny.good(llama.texts)):
        out = llama.target.generate(
            **batch, **args, logits_processor=[ThinkingBudget(budget, 20, 9)], assistant_model=drafter
        )
        assert out.equal(expected)


REFUSED = {
    "rows": (dict(), dict(do_sample=False), 4),
    "returned sequences": (dict(), dict(do_sample=True, num_return_sequences=2), 1),
    "block": (dict(verification="block"), dict(do_sample=True), 1),
    "stock": (dict(engine="stock"), dict(do_sample=False), 1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_undeclared_processors_are_refused_where_they_would_be_shown_something_else(llama, case):
    knobs, args, rows = REFUSED[case]
    batch = {name: value[:rows] for name, value in llama.padded().items()}
    args |= dict(speculation=SpeculationConfig(**knobs), max_new_tokens=4, assistant_model=tiny.good(llama.texts))
    with pytest.raises(ValueError, match="Recording is a logits processor.*row_wise = True"):
        llama.target.generate(**batch, logits_processor=[spy := Recording()], **args)
    assert not spy.seen
    llama.target.generate(**batch, logits_processor=[Declared()], **args)


@pytest.mark.parametrize("verification", ["match", "ratio", "block", "greedy"])
def test_declared_processors_hold_for_rows_of_any_length_and_help_to_draft(llama, verification):
    args = dict(do_sample=verification != "greedy", logits_processor=[Declared()])
    if verification != "greedy":
        args["speculation"] = SpeculationConfig(verification=verification, seed=3)
    drafter = tiny.Twin(llama.target, llama.prompts, block=4)
    out = sample(llama.target, drafter, llama.padded(), **args)
    assert ((out[:, 9:] + out[:, 8:-1]) % 2 == 1).all()
    if verification == "greedy":
        for row, prompt in enumerate(llama.prompts):
            text = tiny.plain(llama.target, prompt, max_new_tokens=tiny.NEW, logits_processor=[Declared()])
            assert out[row, 9:].tolist() == text[len(prompt) :]
    assert drafter.last_speculation.acceptance_rate > 0.2


# ---------------------------------------------------------------------- prefix_allowed_tokens_fn


class Automaton:
    """A constraint with a state per row: wants to be asked about each text of its row once, token by token."""

    def __init__(self):
        self.texts = {}

    def __call__(self, row, prefix):
        text, before = prefix.tolist(), self.texts.get(row)
        assert before is None or text[:-1] == before, "asked about text that isn't there"
        self.texts[row] = text
        return [t for t in range(3, tiny.V) if t % 4 == (row + len(text)) % 4]


def test_a_constraint_with_a_state_is_asked_about_the_text_alone(llama):
    args = dict(max_new_tokens=tiny.NEW, do_sample=False)
    plain, batch = Automaton(), llama.padded()
    expected = llama.target.generate(**batch, **args, prefix_allowed_tokens_fn=plain)
    texts = [p.tolist() + new for p, new in zip(llama.prompts, expected[:, 9:].tolist())]
    for drafter in (
        tiny.oracle(texts),
        tiny.good(texts),
        tiny.make_drafter(llama.target),
        tiny.make_eagle3(llama.target),
    ):
        ours = Automaton()
        out = llama.target.generate(**batch, **args, prefix_allowed_tokens_fn=ours, assistant_model=drafter)
        assert out.equal(expected) and ours.texts == plain.texts
    for verification in ("ratio", "match"):
        knobs = SpeculationConfig(verification=verification, seed=2)
        out = sample(
            llama.target, drafter, batch, prefix_allowed_tokens_fn=Automaton(), do_sample=True, speculation=knobs
        )
        place = torch.arange(9, 9 + tiny.NEW) + torch.arange(4)[:, None]
        assert (out[:, 9:] % 4 == place % 4).all()


def test_a_constraint_is_refused_where_it_would_be_asked_about_rejected_drafts(llama):
    knobs, drafter = SpeculationConfig(verification="block"), tiny.Twin(llama.target, llama.prompts, block=4)
    args = dict(do_sample=True, speculation=knobs)
    with pytest.raises(ValueError, match="Automaton is .* constraint of your own.*row_wise = True"):
        sample(llama.target, drafter, llama.padded(), prefix_allowed_tokens_fn=Automaton(), **args)

    def allowed(row, prefix):
        return [t for t in range(3, tiny.V) if t % 2 != int(prefix[-1]) % 2]

    allowed.row_wise = True
    out = sample(llama.target, drafter, llama.padded(), prefix_allowed_tokens_fn=allowed, **args)
    assert ((out[:, 9:] + out[:, 8:-1]) % 2 == 1).all()


@pytest.mark.parametrize("declared", [False, True])
def test_constraints_get_the_row_they_are_for_and_no_prefix_that_cannot_be(llama, declared):
    eos, length = 2, 9

    def choices(row, new):
        assert eos not in new and len(new) < length, "asked about what comes behind the end"
        return [t for t in range(3, tiny.V) if t % 4 == row] if len(new) < 4 + row else [eos]

    def allowed(row, prefix):
        assert prefix[:9].equal(llama.padded()["input_ids"][row]), "the columns, pads included"
        return choices(row, prefix[9:].tolist())

    allowed.row_wise = declared
    alone = []
    for row, prompt in enumerate(llama.prompts):
        text = tiny.plain(
            llama.target, prompt, max_new_tokens=length, eos_token_id=eos, pad_token_id=tiny.PAD,
            prefix_allowed_tokens_fn=lambda _, prefix, row=row: choices(row, prefix[tiny.LENGTHS[row] :].tolist()),
        )  # fmt: skip
        alone.append(text)
    new = [text[len(p) :] for text, p in zip(alone, llama.prompts)]
    assert [len(n) for n in new] == [5, 6, 7, 8]
    for drafter in (
        tiny.oracle(alone),
        tiny.good(alone),
        tiny.make_drafter(llama.target),
        tiny.make_eagle3(llama.target),
    ):
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

    row_wise = True

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
    assert out[0].tolist() == tiny.plain(
        llama.target, llama.prompts[0], max_new_tokens=6, logits_processor=[Forbid(11)]
    )
