"""Caches the user brings or takes along: continued, handed back, converted, and the drafter's context with them."""

import copy
import functools
import pickle

import pytest
import tiny
import torch
from tiny import generated
from transformers import DynamicCache

from hf_dspark import SpeculationConfig
from hf_dspark.drafting.proposer import Proposer

TURN, SECOND = 6, 8


@pytest.fixture
def drafts(monkeypatch):
    """Every round's verified drafts, by row."""
    seen: dict[int, list] = {}
    propose = Proposer.propose

    def recording(self, context):
        draft = propose(self, context)
        for i, row in enumerate(context.rows):
            seen.setdefault(row, []).append((context.lengths[i], draft.tokens[i, : draft.lengths[i]].tolist()))
        return draft

    monkeypatch.setattr(Proposer, "propose", recording)
    return seen


def follow_up(rows, seed=5):
    return torch.randint(3, tiny.V - 1, (rows, 4), generator=torch.Generator().manual_seed(seed))


def talk(target, batch, drafter=None, new=TURN, cache=None, **kwargs):
    if cache is not None:
        kwargs[tiny.CACHE] = cache
    return target.generate(**batch, assistant_model=drafter, max_new_tokens=new, do_sample=False, **kwargs)


def cache_of(output):
    return getattr(output, tiny.CACHE)


def second_turn(batch, sequences, lengths=None):
    """The batch of the next turn: everything so far, pads of ended rows masked, and new user tokens."""
    width, rows = batch["input_ids"].shape[1], len(sequences)
    answer = torch.ones(rows, sequences.shape[1] - width, dtype=torch.long)
    for row, n in enumerate(lengths or []):
        answer[row, n:] = 0
    more = follow_up(rows)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return dict(
        input_ids=torch.cat([sequences, more], 1), attention_mask=torch.cat([mask, answer, torch.ones_like(more)], 1)
    )


MAKERS = [tiny.make_drafter, tiny.make_eagle3, functools.partial(tiny.make_mtp, heads=3)]


def alone(target, batch, new=SECOND):
    """New tokens of each row, from a plain run on its unmasked tokens."""
    out = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool()):
        out.append(tiny.plain(target, ids[mask], max_new_tokens=new)[int(mask.sum()) :])
    return out


# ---------------------------------------------------------------------- a chat on our own cache


@pytest.mark.parametrize("make", MAKERS, ids=["block", "chain", "heads"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", ["returned", "copied", "pickled", "given", "given and copied"])
def test_a_second_turn_goes_on_with_target_and_draft_context(llama, make, rows, kind, drafts):
    batch = llama.padded() if rows == 4 else dict(input_ids=llama.prompts[0][None])
    drafter, given = make(llama.target), DynamicCache() if "given" in kind else None
    first = talk(llama.target, batch, drafter, cache=given, return_dict_in_generate=True)
    cache = cache_of(first)
    assert (cache is given) == ("given" in kind)
    if "copied" in kind:
        cache = copy.deepcopy(cache)
    if kind == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    turn = second_turn(batch, first.sequences)
    drafts.clear()
    out = talk(llama.target, turn, drafter, new=SECOND, cache=cache)
    with_cache = copy.deepcopy(drafts)
    width = turn["input_ids"].shape[1]
    assert generated(out, width, [SECOND] * rows) == alone(llama.target, turn)
    drafts.clear()
    talk(llama.target, turn, drafter, new=SECOND)
    assert drafts == with_cache, "drafts are those of a run from scratch, so acceptance is too"


def test_an_oracle_keeps_winning_in_the_second_turn(llama):
    prompt = llama.prompts[0]
    first = talk(llama.target, dict(input_ids=prompt[None]), tiny.oracle(llama.texts), return_dict_in_generate=True)
    turn = second_turn(dict(input_ids=prompt[None]), first.sequences)
    text = tiny.plain(llama.target, turn["input_ids"][0], max_new_tokens=9)
    drafter = tiny.oracle([text], block=3)
    first = talk(llama.target, dict(input_ids=prompt[None]), drafter, return_dict_in_generate=True)
    talk(llama.target, turn, drafter, new=9, cache=cache_of(first))
    assert drafter.last_speculation.acceptance_lengths == [[4, 4]]


@pytest.mark.parametrize("given", [False, True])
def test_rows_that_ended_early_go_on_behind_their_own_last_token(llama, given):
    batch, eos = llama.padded(), llama.new[1][4]
    lengths = [new[:TURN].index(eos) + 1 if eos in new[:TURN] else TURN for new in llama.new]
    assert len(set(lengths)) > 1
    drafter = tiny.make_drafter(llama.target)
    first = talk(
        llama.target, batch, drafter, cache=DynamicCache() if given else None, eos_token_id=eos, pad_token_id=tiny.PAD,
        return_dict_in_generate=True,
    )  # fmt: skip
    turn = second_turn(batch, first.sequences, lengths)
    out = talk(llama.target, turn, drafter, new=SECOND, cache=cache_of(first))
    assert generated(out, turn["input_ids"].shape[1], [SECOND] * 4) == alone(llama.target, turn)


def test_a_cache_serves_another_drafter_and_other_knobs(llama):
    batch = llama.padded()
    first = talk(llama.target, batch, tiny.make_drafter(llama.target), return_dict_in_generate=True)
    turn = second_turn(batch, first.sequences)
    for other in (tiny.make_drafter(llama.target, seed=8, block_size=3), tiny.make_eagle3(llama.target)):
        out = talk(llama.target, turn, other, new=SECOND, cache=copy.deepcopy(cache_of(first)),
                   speculation=SpeculationConfig(loop_gate=-1e9, max_draft_stages=2), prefill_chunk_size=2)  # fmt: skip
        assert generated(out, turn["input_ids"].shape[1], [SECOND] * 4) == alone(llama.target, turn)


def test_three_turns_on_one_cache(llama):
    drafter, batch, cache = tiny.make_drafter(llama.target), llama.padded(), DynamicCache()
    for _ in range(3):
        out = talk(llama.target, batch, drafter, cache=cache)
        assert generated(out, batch["input_ids"].shape[1], [TURN] * 4) == alone(llama.target, batch, TURN)
        batch = second_turn(batch, out)


def test_a_chat_may_leave_inference_mode_and_enter_it_again(llama):
    drafter, batch, cache = tiny.make_drafter(llama.target), llama.padded(), DynamicCache()
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with context():
            out = talk(llama.target, batch, drafter, cache=cache)
        assert generated(out, batch["input_ids"].shape[1], [TURN] * 4) == alone(llama.target, batch, TURN)
        batch = second_turn(batch, out)


def test_a_cache_carries_no_model(llama):
    out = talk(llama.target, llama.padded(), tiny.make_drafter(llama.target), return_dict_in_generate=True)
    given = DynamicCache()
    talk(llama.target, llama.padded(), tiny.make_drafter(llama.target), cache=given)
    for cache in (cache_of(out), given):
        data = pickle.dumps(cache)
        assert b"LlamaForCausalLM" not in data and b"DSparkDrafter" not in data


# ---------------------------------------------------------------------- between our cache and DynamicCache


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral window", "gpt2"])
@pytest.mark.parametrize("configured", [False, True], ids=["plain layers", "layers of the config"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_cache_filled_by_plain_generate_is_continued(name, configured, rows):
    case = tiny.load_case(name)
    batch = case.padded() if rows == 4 else dict(input_ids=case.prompts[0][None])
    cache = DynamicCache(config=case.target.config) if configured else DynamicCache()
    turn = second_turn(batch, talk(case.target, batch, cache=cache))
    for drafter in (tiny.make_drafter(case.target), tiny.make_eagle3(case.target)):
        out = talk(case.target, turn, drafter, new=SECOND, cache=copy.deepcopy(cache))
        assert generated(out, turn["input_ids"].shape[1], [SECOND] * rows) == alone(case.target, turn)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral window", "gpt2"])
@pytest.mark.parametrize("kind", ["given", "converted"])
@pytest.mark.parametrize("rows", [1, 4])
def test_plain_generate_continues_a_cache_of_ours(name, kind, rows):
    case = tiny.load_case(name)
    batch = case.padded() if rows == 4 else dict(input_ids=case.prompts[0][None])
    if kind == "given":
        cache = DynamicCache()
        sequences = talk(case.target, batch, tiny.good(case.texts), cache=cache)
    else:
        first = talk(case.target, batch, tiny.good(case.texts), return_dict_in_generate=True)
        cache, sequences = cache_of(first).to_dynamic(), first.sequences
    assert cache.get_seq_length() == sequences.shape[1] - 1
    turn = second_turn(batch, sequences)
    out = talk(case.target, turn, new=SECOND, cache=cache)
    assert generated(out, turn["input_ids"].shape[1], [SECOND] * rows) == alone(case.target, turn)


def test_a_cache_given_empty_holds_what_plain_generate_would_have_left(llama):
    ours, theirs, batch = DynamicCache(), DynamicCache(), llama.padded()
    talk(llama.target, batch, tiny.make_drafter(llama.target), cache=ours)
    talk(llama.target, batch, cache=theirs)
    real = torch.cat([batch["attention_mask"].bool(), torch.ones(4, TURN - 1) > 0], 1)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert a.keys.shape == b.keys.shape
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            torch.testing.assert_close(x.transpose(1, 2)[real], y.transpose(1, 2)[real], atol=1e-10, rtol=1e-10)


def test_plain_generate_refuses_our_own_cache_in_words(llama):
    first = talk(llama.target, llama.padded(), tiny.oracle(llama.texts), return_dict_in_generate=True)
    with pytest.raises(ValueError, match="to_dynamic"):
        talk(llama.target, second_turn(llama.padded(), first.sequences), cache=cache_of(first))


# ---------------------------------------------------------------------- odd ways to fill a cache


@pytest.mark.parametrize("make", MAKERS, ids=["block", "chain", "heads"])
def test_a_cache_of_the_first_part_of_the_prompt(llama, make):
    """As with a shared system prompt: its features are gone, and the drafter's positions start behind it."""
    prompt, cache = llama.prompts[0], DynamicCache()
    with torch.no_grad():
        llama.target(prompt[None, :5], **{tiny.CACHE: cache})
    drafter = make(llama.target)
    out = talk(llama.target, dict(input_ids=prompt[None]), drafter, new=tiny.NEW, cache=cache)
    assert out[0].tolist() == llama.texts[0]
    assert cache.draft.first.tolist() == [5]
    assert cache.draft.first + cache.draft.lengths == drafter.expected_length(torch.tensor(len(llama.texts[0])))


def test_a_mask_that_hides_cached_tokens_hides_them(llama):
    prompt = torch.cat([llama.prompts[0], llama.prompts[2]])[None]
    batch, cache, theirs = dict(input_ids=prompt), DynamicCache(), DynamicCache()
    first = talk(llama.target, batch, tiny.make_drafter(llama.target), cache=cache, return_dict_in_generate=True)
    talk(llama.target, batch, cache=theirs)
    turn = second_turn(batch, first.sequences)
    turn["attention_mask"][0, 3:6] = 0
    expected = talk(llama.target, turn, new=SECOND, cache=theirs)
    assert talk(llama.target, turn, tiny.make_drafter(llama.target), new=SECOND, cache=copy.deepcopy(cache)).equal(
        expected
    )
    ours = cache_of(talk(llama.target, batch, tiny.make_drafter(llama.target), return_dict_in_generate=True))
    assert talk(llama.target, turn, tiny.make_drafter(llama.target), new=SECOND, cache=ours).equal(expected)


def test_a_cache_that_holds_the_whole_text_leaves_nothing_to_feed(llama):
    first = talk(llama.target, llama.padded(), tiny.oracle(llama.texts), return_dict_in_generate=True)
    batch = dict(input_ids=first.sequences[:, :-1], attention_mask=torch.ones_like(first.sequences[:, :-1]))
    batch["attention_mask"][:, :9] = llama.padded()["attention_mask"]
    with pytest.raises(ValueError, match="at least one token beyond the cache"):
        talk(llama.target, batch, tiny.oracle(llama.texts), cache=cache_of(first))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_older_name_of_the_argument_works_too(llama):
    cache, batch = DynamicCache(), dict(input_ids=llama.prompts[0][None])
    out = talk(llama.target, batch, tiny.good(llama.texts), past_key_values=cache)
    turn = second_turn(batch, out)
    again = talk(llama.target, turn, tiny.good(llama.texts), new=SECOND, past_key_values=cache)
    assert generated(again, turn["input_ids"].shape[1], [SECOND]) == alone(llama.target, turn)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_chunked_prefill_changes_nothing(llama, chunk, drafts):
    for make in MAKERS:
        drafter = make(llama.target)
        drafts.clear()
        whole = talk(llama.target, llama.padded(), drafter)
        expected = copy.deepcopy(drafts)
        drafts.clear()
        assert talk(llama.target, llama.padded(), drafter, prefill_chunk_size=chunk).equal(whole)
        assert drafts == expected
