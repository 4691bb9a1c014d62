"""With do_sample=False every drafter must leave the text as plain `generate` writes it, in every target and batch."""

import pytest
import tiny
import torch
from tiny import generated

from hf_dspark import SpeculationConfig

DRAFTERS = {
    "random": lambda case: tiny.make_drafter(case.target),
    "good": lambda case: tiny.good(case.texts),
    "oracle": lambda case: tiny.oracle(case.texts),
    "always wrong": lambda case: tiny.always_wrong(case.texts),
}


@pytest.fixture(params=DRAFTERS)
def drafter(request, case):
    return DRAFTERS[request.param](case)


def test_targets_write_varied_text(case):
    assert len({token for text in case.new for token in text}) > 8


def test_one_row_equals_plain_generate(case, drafter):
    prompt = case.prompts[1][None]
    out = case.target.generate(prompt, assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
    assert out[0].tolist() == case.texts[1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_ragged_batch_equal_their_own_runs_and_end_on_their_own(case, drafter, side):
    eos = case.new[1][4]
    expected = [new[: new.index(eos) + 1] if eos in new else new for new in case.new]
    out = case.target.generate(
        **case.padded(side), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False, eos_token_id=eos,
        pad_token_id=tiny.PAD,
    )  # fmt: skip
    assert generated(out, max(tiny.LENGTHS), map(len, expected)) == expected


def test_an_oracle_is_accepted_whole_in_every_round(case):
    drafter = tiny.oracle(case.texts, block=4)
    case.target.generate(**case.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
    # 1 token from the prefill, then rounds of 4 drafts and a bonus; the budget leaves room for 2 drafts in the last.
    assert drafter.last_speculation.acceptance_lengths == [[5, 5, 3]] * 4
    assert drafter.last_speculation.draft_lengths == [[4, 4, 2]] * 4
    assert drafter.last_speculation.acceptance_rate == 1.0


def test_a_drafter_that_is_always_wrong_costs_one_round_per_token(case):
    drafter = tiny.always_wrong(case.texts)
    case.target.generate(**case.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
    assert drafter.last_speculation.acceptance_lengths == [[1] * (tiny.NEW - 1)] * 4


@pytest.mark.parametrize("fast", range(4))
def test_a_row_may_run_far_ahead_of_the_others(llama, fast):
    winner = llama.texts[fast]

    def plan(prefix, ahead):
        text = tiny.continuation(llama.texts, prefix)
        right = min(len(text) - 2, 6) if winner[1 : len(prefix) + 1] == prefix else 0
        return text[:right] + [tiny.wrong(t) for t in text[right:]]

    out = llama.target.generate(
        **llama.padded(), assistant_model=tiny.Scripted(plan), max_new_tokens=tiny.NEW, do_sample=False
    )
    assert generated(out, max(tiny.LENGTHS), [tiny.NEW] * 4) == llama.new


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8, 40])
def test_any_number_of_draft_tokens_gives_the_same_text(llama, num_draft_tokens):
    out = llama.target.generate(
        **llama.padded(), assistant_model=tiny.make_drafter(llama.target), max_new_tokens=tiny.NEW, do_sample=False,
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
    )  # fmt: skip
    assert generated(out, max(tiny.LENGTHS), [tiny.NEW] * 4) == llama.new


def test_learned_positions_hold_a_row_that_ends_at_the_last_one_beside_slower_rows():
    target = tiny.make_target("gpt2", max_position_embeddings=24)
    prompts = [torch.randint(3, tiny.V, (n,)) for n in (16, 4)]
    texts = [tiny.plain(target, p, max_new_tokens=8) for p in prompts]

    def plan(prefix, ahead):  # the long row wins, the short one loses
        text = tiny.continuation(texts, prefix)
        return text[:5] if len(prefix) >= 15 else [tiny.wrong(t) for t in text]

    out = target.generate(
        **tiny.padded(prompts), assistant_model=tiny.Scripted(plan), max_new_tokens=8, do_sample=False
    )
    assert generated(out, 16, [8, 8]) == [text[-8:] for text in texts]
