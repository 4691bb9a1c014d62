"""How often a round waits for the device: counted on tiny models whose drafts are verified in the dense form, as on a
device."""

import pytest
import tiny
from traffic import counted

from hf_dspark import SpeculationConfig
from hf_dspark.decoding import judge
from hf_dspark.decoding.loop import DecodeLoop

# What lives on the host in any case: lengths and slots of caches, counts of committed tokens.
HOST = (
    "draft_cache.py",
    "cache.py:self.fill.lengths",
    "cache.py:self.lengths.max()",
    "loop.py:batch.cache.lengths",
    "proposer.py:aminmax(counts)",
    "modeling_dspark.py:valid.sum(1).cpu()",
    "modeling_eagle3.py:valid.sum(1).cpu()",
)


@pytest.fixture
def rounds(monkeypatch):
    """The transfers of each round."""
    seen, original = [], DecodeLoop._round

    def counting(loop):
        with counted(HOST) as traffic:
            out = original(loop)
        seen.append(traffic)
        return out

    monkeypatch.setattr(DecodeLoop, "_round", counting)
    monkeypatch.setattr(judge, "WITHOUT_WAITING", set())
    return seen


CASES = {
    "greedy": ({}, {}),
    "sampled": (dict(do_sample=True, temperature=1.1, top_k=9), {}),
    "match": (dict(do_sample=True), dict(verification="match")),
    "block": (dict(do_sample=True), dict(verification="block")),
}


@pytest.mark.parametrize("make", [tiny.make_drafter, tiny.make_eagle3], ids=["block", "chain"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_round_waits_for_the_device_twice_for_its_drafts_and_for_its_verdict(llama, rounds, make, name, rows):
    options, knobs = CASES[name]
    inputs = tiny.padded(llama.prompts[:rows])
    drafter = make(llama.target)
    options = {"do_sample": False, **options}
    for _ in range(2):  # the first call checks packed against padded
        rounds.clear()
        llama.target.generate(
            **inputs,
            assistant_model=drafter,
            max_new_tokens=10,
            speculation=SpeculationConfig(seed=1, **knobs),
            **options,
        )
    assert rounds
    for traffic in rounds:
        assert len(traffic) <= 2, dict(traffic.places)
    assert any(traffic == ["tolist", "tolist"] for traffic in rounds)
