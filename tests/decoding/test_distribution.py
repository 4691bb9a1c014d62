"""The law of whole generate calls, sampled thousands of times: rows of one prompt, each with its own noise."""

import functools
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import tiny
import torch
from oracles import chi_square

from hf_dspark import CopyDrafter, CopyMemory, SpeculationConfig
from hf_dspark.decoding import loop
from hf_dspark.decoding.generate import listening
from hf_dspark.drafting import copies
from hf_dspark.scheduling.policy import Policy
from hf_dspark.verification import chain

V, PROMPT, NEW, LIMIT = 5, [1, 3, 2, 4], 4, 3.72  # a normal score beyond LIMIT has probability 1e-4


@functools.cache
def target():
    return tiny.make_target(vocab_size=V, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, seed=5, **tiny.GQA)


@functools.cache
def drafter(kind="markov"):
    if kind == "chain":
        return tiny.make_eagle3(target(), target_layer_ids=[0, -1], chain_length=3)
    if kind == "heads":
        return tiny.make_mtp(target(), heads=2)
    reduced = dict(draft_vocab_size=3) if kind == "reduced" else {}
    return tiny.make_drafter(target(), target_layer_ids=[0, -1], num_hidden_layers=1, block_size=3, seed=3, **reduced)


@functools.cache
def law(temperature=1.0, top_k=0):
    """Exact law of the next NEW tokens."""
    prefixes = [p for n in range(NEW) for p in itertools.product(range(V), repeat=n)]
    nexts = {}
    for n in range(NEW):
        some = [p for p in prefixes if len(p) == n]
        with torch.no_grad():
            logits = target()(torch.tensor([[*PROMPT, *p] for p in some])).logits[:, -1] / temperature
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        nexts |= dict(zip(some, logits.softmax(-1).tolist()))
    whole = {(): 1.0}
    for _ in range(NEW):
        whole = {(*t, x): w * p for t, w in whole.items() for x, p in enumerate(nexts[t]) if p > 0}
    return whole


def score(rows, verification, kind="markov", temperature=1.0, top_k=0, **knobs):
    out = target().generate(
        torch.tensor([PROMPT] * rows), assistant_model=drafter(kind), do_sample=True, max_new_tokens=NEW,
        temperature=temperature, top_k=top_k, eos_token_id=None,
        speculation=SpeculationConfig(verification=verification, seed=3, **knobs),
    )  # fmt: skip
    assert 0.1 < drafter(kind).last_speculation.acceptance_rate < 0.95
    return chi_square(Counter(map(tuple, out[:, len(PROMPT) :].tolist())), law(temperature, top_k))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 2)])
@pytest.mark.parametrize(("verification", "rows"), [("ratio", 3000), ("block", 1000)])
def test_samples_follow_the_targets_law(verification, rows, temperature, top_k):
    assert abs(score(rows, verification, temperature=temperature, top_k=top_k)) < LIMIT


@pytest.mark.parametrize("kind", ["reduced", "chain", "heads"])
def test_with_other_drafters_thresholds_and_stages(kind):
    knobs = dict(confidence_threshold=0.4) if kind == "reduced" else {}
    assert score(2000, "ratio", kind, loop_gate=-2.0, max_draft_stages=2, **knobs) < LIMIT


def test_match_does_too():
    assert score(2000, "match", temperature=2.0) < LIMIT


@functools.cache
def common_text() -> list[int]:
    """A likely text: copies of it are accepted as often as not."""
    best = max(law(), key=law().get)
    return [*PROMPT, *best]


def with_memory(kind):
    """The drafter with a memory to copy from, or one that only copies."""
    texts = CopyMemory(min_match=2, learns=False)
    texts.add(common_text())
    ours = CopyDrafter() if kind == "copies alone" else drafter("markov")
    ours.copy_memory = texts
    return ours


class Chance(Policy):
    """Every row copies, drafts or does neither by chance."""

    def choose(self, copies, scheduled):
        lengths = [random.randint(0, len(copy.tokens)) for copy, _ in copies]
        return lengths, 0 if all(lengths) else random.choice([0, self.block])


@pytest.mark.parametrize("kind", ["copies alone", "beside a drafter"])
@pytest.mark.parametrize("verification", ["ratio", "block", "match"])
@pytest.mark.parametrize("knobs", [dict(copy=2), dict(copy="auto"), dict(copy="auto", scheduler="auto")], ids=str)
def test_copies_follow_the_targets_law(verification, kind, knobs):
    ours = with_memory(kind)
    random.seed(5)
    try:
        with listening(policy=Chance(ours.config.max_block, 1)):
            out = target().generate(
                torch.tensor([PROMPT] * 2000), assistant_model=ours, do_sample=True, max_new_tokens=NEW, top_k=0,
                eos_token_id=None, speculation=SpeculationConfig(verification=verification, seed=7, **knobs),
            )  # fmt: skip
    finally:
        ours.copy_memory = None
    sources = ours.last_speculation.by_source
    copied = [sources[s] for s in ("memory", "copy") if s in sources]
    assert 0.05 < sum(s["accepted"] for s in copied) / sum(s["verified"] for s in copied) < 0.95
    assert abs(chi_square(Counter(map(tuple, out[:, len(PROMPT) :].tolist())), law())) < LIMIT


def test_the_test_sees_a_copy_that_is_taken_for_a_draw_of_the_drafter(monkeypatch):
    """A copy's law is one-hot; under the drafter's own it would be accepted too often."""
    right = copies.with_copies

    def wrong(draft, offered, lengths, room):
        out = right(draft, offered, lengths, room)
        return replace(out, q=None if out.q is None else torch.full_like(out.q, 1 / V))

    monkeypatch.setattr(loop, "with_copies", wrong)
    with pytest.raises(AssertionError):
        test_copies_follow_the_targets_law("ratio", "beside a drafter", dict(copy="auto"))


def test_the_test_sees_a_wrong_residual(monkeypatch):
    monkeypatch.setattr(chain, "residual", lambda p, q, tokens: p)
    assert score(3000, "ratio") > LIMIT


def test_the_test_sees_a_wrong_block(monkeypatch):
    right = chain.block_survival

    def wrong(*args):
        survival, thresholds = right(*args)
        return survival, thresholds.sqrt()

    monkeypatch.setattr(chain, "block_survival", wrong)
    assert score(1000, "block") > LIMIT
