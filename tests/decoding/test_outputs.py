"""What a call returns beside the tokens: the outputs of plain `generate`, and statistics that mean what they say."""

import math

import pytest
import tiny
import torch
import transformers
from packaging.version import Version

from hf_dspark import SpeculationConfig, SpeculationStats

needs_stock = pytest.mark.skipif(Version(transformers.__version__) < Version("5.18"), reason="refused before 5.18")

WANTED = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, dict(repetition_penalty=3.0), dict(suppress_tokens=list(range(30)))])
def test_scores_and_logits_equal_plain_generates(llama, options):
    ids = llama.prompts[0][None]
    plain = llama.target.generate(ids, **WANTED, **options, max_new_tokens=tiny.NEW, do_sample=False)
    for drafter in (tiny.good([plain.sequences[0].tolist()]), tiny.make_drafter(llama.target)):
        out = llama.target.generate(
            ids, **WANTED, **options, max_new_tokens=tiny.NEW, do_sample=False, assistant_model=drafter
        )
        assert out.sequences.equal(plain.sequences)
        for name in ("scores", "logits"):
            ours, theirs = getattr(out, name), getattr(plain, name)
            assert [x.shape for x in ours] == [x.shape for x in theirs]
            assert ours[0].dtype == theirs[0].dtype
            close(torch.cat(ours), torch.cat(theirs))


@pytest.mark.parametrize("verification", ["match", "ratio", "block"])
def test_scores_of_a_sampled_text_are_the_targets_on_it(llama, verification):
    ids = llama.prompts[0][None]
    out = llama.target.generate(
        ids, **WANTED, max_new_tokens=tiny.NEW, do_sample=True, temperature=0.7, top_k=9,
        assistant_model=tiny.Twin(llama.target, llama.prompts[:1], block=3),
        speculation=SpeculationConfig(verification=verification),
    )  # fmt: skip
    with torch.no_grad():
        logits = llama.target(out.sequences[:, :-1]).logits[0, 8:].float()
    close(torch.cat(out.logits), logits)
    scores = logits / 0.7
    close(torch.cat(out.scores), scores.masked_fill(scores < scores.topk(9).values[:, -1:], -torch.inf))


def test_rows_that_have_ended_have_scores_of_zero(llama):
    eos = llama.new[1][4]
    out = llama.target.generate(
        **llama.padded(), **WANTED, max_new_tokens=tiny.NEW, do_sample=False, eos_token_id=eos, pad_token_id=tiny.PAD,
        assistant_model=tiny.good(llama.texts),
    )  # fmt: skip
    for row, (prompt, new) in enumerate(zip(llama.prompts, llama.new)):
        n = new.index(eos) + 1 if eos in new else tiny.NEW
        alone = llama.target.generate(prompt[None], **WANTED, max_new_tokens=tiny.NEW, do_sample=False)
        for name in ("scores", "logits"):
            ours = torch.stack(getattr(out, name))[:, row]
            close(ours[:n], torch.cat(getattr(alone, name))[:n])
            assert not ours[n:].any()


def test_nothing_is_kept_that_was_not_asked_for(llama):
    drafter = tiny.oracle(llama.texts)
    out = llama.target.generate(llama.prompts[0][None], assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert isinstance(out, torch.Tensor)
    out = llama.target.generate(
        llama.prompts[0][None], assistant_model=drafter, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    assert out.scores is None and out.logits is None
    assert out.speculation is drafter.last_speculation


def test_hidden_states_and_attentions_are_plain_generates():
    case = tiny.load_case("llama tied eager")
    args = dict(max_new_tokens=tiny.NEW, do_sample=False, return_dict_in_generate=True, output_hidden_states=True)
    ids = case.prompts[0][None]
    plain = case.target.generate(ids, **args, output_attentions=True)
    out = case.target.generate(ids, **args, output_attentions=True, assistant_model=tiny.good(case.texts))
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(out, name), getattr(plain, name)
        assert [[x.shape for x in step] for step in ours] == [[x.shape for x in step] for step in theirs]
        for a, b in zip(ours, theirs, strict=True):
            for x, y in zip(a, b, strict=True):
                close(x, y)


@pytest.mark.parametrize("verification", ["match", "ratio", "block"])
def test_returned_sequences_are_rows_with_noise_of_their_own(llama, verification):
    ids, twin = llama.prompts[0][None], tiny.Twin(llama.target, llama.prompts[:1], block=3)
    knobs = dict(max_new_tokens=8, do_sample=True, speculation=SpeculationConfig(verification=verification, seed=1))
    several = llama.target.generate(ids, assistant_model=twin, num_return_sequences=3, **knobs)
    assert len(twin.last_speculation.acceptance_lengths) == 3
    rows = llama.target.generate(ids.expand(3, -1), assistant_model=twin, **knobs)
    assert several.equal(rows)
    assert len({tuple(row) for row in several.tolist()}) == 3


# ---------------------------------------------------------------------- statistics


def test_statistics_of_a_worked_example():
    stats = SpeculationStats.empty(2)
    stats.add(0, emitted=3, verified=5, accepted=2, stages=1)
    stats.add(0, emitted=1, verified=5, accepted=0, stages=1)
    stats.add(1, emitted=2, verified=2, accepted=2, stages=2)  # cut short by a stop token: no bonus
    assert stats.tau == 2.0
    assert stats.acceptance_rate == 4 / 12
    assert stats.conditional_acceptance[:3] == [2 / 3, 1.0, 0.0]
    assert math.isnan(stats.conditional_acceptance[3]), "nobody got so far"
    assert stats.draft_stages == [[1, 1], [2]]


def test_statistics_of_nothing_are_no_numbers():
    stats = SpeculationStats.empty(1)
    assert math.isnan(stats.tau) and math.isnan(stats.acceptance_rate) and stats.conditional_acceptance == []


def test_statistics_add_up_to_the_text(llama):
    eos = llama.new[1][4]
    drafter = tiny.good(llama.texts)
    llama.target.generate(
        **llama.padded(), max_new_tokens=tiny.NEW, do_sample=False, eos_token_id=eos, pad_token_id=tiny.PAD,
        assistant_model=drafter,
    )  # fmt: skip
    stats = drafter.last_speculation
    for row, new in enumerate(llama.new):
        n = new.index(eos) + 1 if eos in new else tiny.NEW
        assert 1 + sum(stats.acceptance_lengths[row]) == n, "the prefill's token is of no round"
        lengths = stats.acceptance_lengths[row], stats.accepted_lengths[row], stats.draft_lengths[row]
        for emitted, accepted, verified in zip(*lengths, strict=True):
            assert accepted <= verified and emitted in (accepted, accepted + 1)
        assert all(e == a + 1 for e, a in zip(*lengths[:2])) or eos in new
    assert min(stats.draft_seconds, stats.verify_seconds, stats.prefill_seconds, stats.overhead_seconds) > 0


def test_conditional_acceptance_of_an_oracle_is_one_and_of_its_opposite_zero(llama):
    for drafter, expected in ((tiny.oracle(llama.texts), 1.0), (tiny.always_wrong(llama.texts), 0.0)):
        llama.target.generate(llama.prompts[0][None], assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
        assert drafter.last_speculation.conditional_acceptance[0] == expected
        assert drafter.last_speculation.acceptance_rate == expected


def test_a_round_cut_by_a_criterion_counts_what_it_emitted(llama):
    drafter = tiny.oracle(llama.texts)
    llama.target.generate(
        llama.prompts[0][None], assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False,
        stopping_criteria=[lambda ids, scores: torch.tensor([ids.shape[1] >= 13])],
    )  # fmt: skip
    stats = drafter.last_speculation
    assert (stats.acceptance_lengths, stats.accepted_lengths, stats.draft_lengths) == ([[3]], [[3]], [[3]])


def test_statistics_print_as_a_line_whatever_the_number_of_rounds():
    stats = SpeculationStats.empty(2)
    assert (
        repr(stats)
        == "SpeculationStats(2 rows, 0 rounds, seconds: prefill 0.00, draft 0.00, verify 0.00, overhead 0.00)"
    )
    for _ in range(500):
        stats.add(0, 3, 4, 2, 1)
    stats.verify_seconds = 1.5
    assert "500 rounds, 1500 tokens, tau 3.00, 50% of the drafts accepted" in repr(stats)
    assert "verify 1.50" in repr(stats) and "\n" not in repr(stats) and len(repr(stats)) < 200
    stats.notes.append("A note.")
    assert repr(stats).endswith("\n  A note.)")


@pytest.mark.parametrize("engine", ["own", pytest.param("stock", marks=needs_stock)])
def test_more_drafts_than_a_block_has_are_said_to_be_cut_once(llama, engine):
    drafter = tiny.make_drafter(llama.target)

    def notes(wanted, drafter=drafter):
        knobs = SpeculationConfig(num_draft_tokens=wanted, engine=engine)
        llama.target.generate(
            llama.prompts[0][None], assistant_model=drafter, speculation=knobs, max_new_tokens=8, do_sample=False
        )
        return drafter.last_speculation.notes

    block = drafter.config.max_block
    assert notes(None) == notes(block) == notes(1) == []
    (note,) = notes(40)
    assert "num_draft_tokens=40" in note and f"drafted {block} per stage" in note and "loop_gate" in note
    assert notes(9, tiny.make_eagle3(llama.target)) == []  # a recursive drafter goes as far as it is asked to
