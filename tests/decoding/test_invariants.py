"""After every round both caches hold what a fresh pass over the committed text would put there, row by row."""

import pytest
import tiny
import torch
from tiny import generated

from hf_dspark import SpeculationConfig
from hf_dspark.decoding import loop
from hf_dspark.decoding.generate import listening
from hf_dspark.decoding.loop import DecodeLoop
from hf_dspark.drafting.proposer import Proposer
from hf_dspark.drafting.tree_drafts import propose_trees
from hf_dspark.scheduling.policy import Policy

ACCEPT = [0, 3, 7, 1]
NEW = 24
DRAFTERS = {
    "block": lambda target: tiny.make_drafter(target, block_size=7),
    "block, anchor is no slot": lambda target: tiny.make_drafter(target, block_size=8, sample_from_anchor=False),
    "sliding block": lambda target: tiny.make_drafter(
        target, block_size=7, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
    ),
    "chain": lambda target: tiny.make_eagle3(target, chain_length=7),
    "deep chain": lambda target: tiny.make_eagle3(target, chain_length=7, num_hidden_layers=2),
    "one head": lambda target: tiny.make_mtp(target, chain_length=7),
    "seven heads": lambda target: tiny.make_mtp(target, heads=7),
}  # fmt: skip


def fresh_pass(target, drafter, ids):
    """Target and drafter K/V per layer of `ids` [n], and the features, from one uncached look at everything."""
    out = target(ids[None], output_hidden_states=True)
    cache = out[tiny.CACHE]
    states = [*out.hidden_states, out.hidden_states[-1]]  # behind the final norm, the last layer's is the tap N
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], -1)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers], features


def close(stored, expected):
    for ours, theirs in zip(stored, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def check_row(loop, batch, i):
    target, drafter = loop.target.model, loop.drafter
    n = batch.rows[i].n
    committed = batch.ids[i, :n]
    assert committed.tolist() == batch.rows[i].tokens and committed[-1] == batch.anchors[i]
    keys_values, features = fresh_pass(target, drafter, committed[:-1])
    assert batch.cache.lengths[i] == n - 1
    for layer, expected in zip(batch.cache.layers, keys_values, strict=True):
        stored = (layer.buffer.keys[i, :, : n - 1], layer.buffer.values[i, :, : n - 1])
        kept = expected[0].shape[1]  # a sliding layer of the fresh cache keeps only its window
        close([x[:, n - 1 - kept :] for x in stored], expected)
    draft = batch.proposer.cache
    assert draft.lengths[i] + draft.first[i] == drafter.expected_length(torch.tensor(n))
    reference = drafter.new_cache(torch.zeros(1, dtype=torch.long))
    drafter.extend(reference, features, committed[None, 1:], torch.ones(1, n - 1, dtype=torch.bool))
    for ours, theirs in zip(draft.layers, reference.layers, strict=True):
        count = int(draft.lengths[i])
        span = slice(int(draft.first[i]), int(draft.first[i]) + count)
        close(
            (ours.keys[i, :, :count], ours.values[i, :, :count]), (theirs.keys[0, :, span], theirs.values[0, :, span])
        )


@pytest.fixture
def checks(monkeypatch):
    """Every row is checked after the prefill and after every round, ended rows included; counts the checks."""
    count, retire = [], DecodeLoop._retire

    def checked(self, batch, commits):
        with torch.no_grad():
            for i in range(len(batch.rows)):
                check_row(self, batch, i)
        count.append(len(batch.rows))
        return retire(self, batch, commits)

    monkeypatch.setattr(DecodeLoop, "_retire", checked)
    return count


@pytest.fixture(autouse=True)
def shown_to_steered_drafters(monkeypatch):
    propose = Proposer.propose

    def showing(self, context):
        if isinstance(self.drafter, tiny.Steered):
            self.drafter.show(context)
        return propose(self, context)

    monkeypatch.setattr(Proposer, "propose", showing)


@pytest.fixture(scope="module")
def texts():
    return {}


def case_of(name, texts):
    case = tiny.load_case(name)
    if name not in texts:
        texts[name] = [tiny.plain(case.target, p, max_new_tokens=NEW) for p in case.prompts]
    return case, texts[name]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_caches_after_scripted_acceptance(drafter, texts, checks):
    case, known = case_of("llama", texts)
    steered = tiny.Steered(DRAFTERS[drafter](case.target), known, ACCEPT)
    out = case.target.generate(**case.padded(), assistant_model=steered, max_new_tokens=NEW, do_sample=False)
    assert generated(out, 9, [NEW] * 4) == [text[-NEW:] for text in known]
    assert steered.last_speculation.accepted_lengths == [[0, 3, 7, 1, 0, 3, 2]] * 4
    assert checks == [4] * 8  # the prefill and seven rounds


@pytest.mark.parametrize("name", ["gemma3", "mistral window", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_caches_in_other_targets_and_sides(name, side, texts, checks):
    case, known = case_of(name, texts)
    steered = tiny.Steered(DRAFTERS["block"](case.target), known, ACCEPT)
    case.target.generate(**case.padded(side), assistant_model=steered, max_new_tokens=NEW, do_sample=False)
    assert steered.last_speculation.accepted_lengths == [[0, 3, 7, 1, 0, 3, 2]] * 4


@pytest.mark.parametrize("drafter", ["block", "block, anchor is no slot", "chain", "one head", "seven heads"])
def test_nothing_of_looped_drafting_stays_behind(drafter, texts, checks):
    case, known = case_of("llama", texts)
    steered = tiny.Steered(DRAFTERS[drafter](case.target), known, [9, 2, 14, 0])
    case.target.generate(
        **case.padded(), assistant_model=steered, max_new_tokens=NEW, do_sample=False,
        speculation=SpeculationConfig(loop_gate=-1e9, max_draft_stages=2),
    )  # fmt: skip
    assert [lengths[:2] for lengths in steered.last_speculation.accepted_lengths] == [[9, 2]] * 4
    assert set(steered.last_speculation.draft_stages[0][:-1]) == {2}


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_prompt_fed_in_chunks_leaves_the_same_caches(chunk, texts, checks):
    for drafter in ("block", "deep chain"):
        case, known = case_of("llama", texts)
        steered = tiny.Steered(DRAFTERS[drafter](case.target), known, ACCEPT)
        case.target.generate(
            **case.padded(), assistant_model=steered, max_new_tokens=12, do_sample=False, prefill_chunk_size=chunk
        )
        assert steered.last_speculation.accepted_lengths == [[0, 3, 5]] * 4


def test_rows_of_different_speed(texts, checks):
    case, known = case_of("llama", texts)
    scripts = [ACCEPT[i:] + ACCEPT[:i] for i in range(4)]
    steered = tiny.Steered(DRAFTERS["block"](case.target), known, scripts)
    out = case.target.generate(**case.padded(), assistant_model=steered, max_new_tokens=NEW, do_sample=False)
    assert generated(out, 9, [NEW] * 4) == [text[-NEW:] for text in known]
    assert [a[0] for a in steered.last_speculation.accepted_lengths] == ACCEPT


def test_an_oracle_wins_every_round_of_a_long_text(llama):
    text = tiny.plain(llama.target, llama.prompts[0], max_new_tokens=121)
    drafter = tiny.oracle([text], block=5)
    llama.target.generate(llama.prompts[0][None], assistant_model=drafter, max_new_tokens=121, do_sample=False)
    assert drafter.last_speculation.acceptance_lengths == [[6] * 20]


class Scripted(Policy):
    """Plain steps and drafts in a set order; every draft is verified."""

    def __init__(self, script):
        super().__init__(5, 1)
        self.script = iter(script)

    def plan(self):
        return next(self.script)

    def prune(self, draft):
        return draft.lengths


@pytest.mark.parametrize("patience, widths", [(64, [8, 5, 3]), (3, [8, 3, 2, 3])])
@pytest.mark.parametrize("drafter", ["block", "chain", "seven heads"])
def test_a_drafter_reads_plain_steps_together_before_it_drafts(drafter, patience, widths, texts, monkeypatch):
    case, known = case_of("llama", texts)
    drafter, read = DRAFTERS[drafter](case.target), []
    extend = type(drafter).extend
    monkeypatch.setattr(type(drafter), "extend", lambda self, *a: read.append(a[1].shape[1]) or extend(self, *a))
    monkeypatch.setattr(Proposer, "PATIENCE", patience)
    call = dict(
        **case.padded(), assistant_model=drafter, do_sample=False, speculation=SpeculationConfig(scheduler="auto")
    )
    with listening(policy=Scripted([0, 0, 0, 0, 5, 0, 0, 5, *[0] * 20])):
        out = case.target.generate(**call, max_new_tokens=NEW)
    assert generated(out, 9, [NEW] * 4) == [text[-NEW:] for text in known]
    assert read[: len(widths)] == widths


@pytest.mark.parametrize("drafter", ["block", "chain", "seven heads"])
def test_rows_that_end_within_plain_steps_leave_what_waits_to_the_others(drafter, texts, monkeypatch):
    case, known = case_of("llama", texts)
    drafter, seen = DRAFTERS[drafter](case.target), {}
    new = [text[-NEW:] for text in known]
    end = new[0][6]  # the first row ends there at the latest, others elsewhere or not at all
    for patience in (1, 64):
        monkeypatch.setattr(Proposer, "PATIENCE", patience)
        policy, drafts = Scripted([0, 5, *[0] * 9, 5, 5, *[0] * 30]), []

        def observer(e, drafts=drafts):
            drafts.append((len(e.commits), e.draft.log_q, e.draft.tokens))

        call = dict(**case.padded(), assistant_model=drafter, do_sample=False, eos_token_id=end, pad_token_id=0)
        with listening(observer, policy):
            case.target.generate(**call, max_new_tokens=NEW, speculation=SpeculationConfig(scheduler="auto"))
        seen[patience] = drafts
    counts = [count for count, *_ in seen[1]]
    assert counts == [count for count, *_ in seen[64]] and counts[1] > counts[11] > 0
    for (_, log_q, tokens), (_, others, same) in zip(seen[1], seen[64], strict=True):
        assert torch.equal(tokens, same)
        torch.testing.assert_close(log_q, others, atol=1e-10, rtol=1e-10)


class Branching(tiny.Steered):
    """Whose true tokens are the first guess of a position or the second, so that accepted paths leave the first
    children."""

    def start(self, cache, anchor, seed=None, pseudo=None, length=None):
        state = super().start(cache, anchor, seed, pseudo, length)
        for row, plan in enumerate(self.plans):
            for k, token in enumerate(plan[: state.base.shape[1]]):
                state.base[row, k, token] += 1e4
                state.base[row, k, tiny.wrong(token)] += 1e4 + (9.0 if (token + k) % 2 else -9.0)
        return state


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_caches_after_accepted_branches(name, texts, checks, monkeypatch):
    def showing(proposer, context, *args):
        proposer.drafter.show(context)
        return propose_trees(proposer, context, *args)

    monkeypatch.setattr(loop, "propose_trees", showing)
    case, known = case_of(name, texts)
    steered = Branching(DRAFTERS["block"](case.target), known, ACCEPT)
    knobs = SpeculationConfig(tree="ddtree", tree_budget=40)
    out = case.target.generate(
        **case.padded(), assistant_model=steered, max_new_tokens=NEW, do_sample=False, speculation=knobs
    )
    assert generated(out, 9, [NEW] * 4) == [text[-NEW:] for text in known]
    assert steered.last_speculation.side_branch_rate > 0.1 and steered.last_speculation.tau > 1.5


@pytest.mark.parametrize("kind, tree, gate", [("deep chain", "eagle2", None), ("block", "dartree", -1e9)])
def test_caches_after_recursive_and_looped_branches(kind, tree, gate, texts, checks):
    case, known = case_of("llama", texts)
    drafter = DRAFTERS[kind](case.target)
    knobs = SpeculationConfig(tree=tree, tree_budget=50, loop_gate=gate, max_draft_stages=2)
    out = case.target.generate(
        **case.padded(), assistant_model=drafter, max_new_tokens=NEW, do_sample=False, speculation=knobs
    )
    assert generated(out, 9, [NEW] * 4) == [text[-NEW:] for text in known]
    assert drafter.last_speculation.side_branch_rate > 0.1
