"""Several drafting stages per verification (DLoop): exact whatever the gate, and undone after every round."""

import copy
import functools
import itertools
import math

import golden
import pytest
import tiny
import torch
import transformers
from packaging.version import Version
from tiny import generated, padded

from hf_dspark import AutoDrafter, SpeculationConfig, keyed_processors
from hf_dspark.drafting.proposer import Proposer

PAIRS = {
    "none": "deepspec-dflash",
    "markov": "deepspec-dspark-vanilla",
    "gated": "speculators-dspark-gated-bonus",
    "rnn": "deepspec-dspark-rnn",
    "domino": "specforge-domino-shift",
    "eagle3": "deepspec-eagle3",
}
NEW = 18
ALWAYS, NEVER = -math.inf, 0.5
needs_stock = pytest.mark.skipif(Version(transformers.__version__) < Version("5.18"), reason="refused before 5.18")


class Pair:
    """A trained target and drafter in float64, ragged prompts, and what plain decoding writes."""

    def __init__(self, name):
        self.target = copy.deepcopy(golden.load_target(name)).double()
        self.target.generation_config.eos_token_id = None
        self.drafter = AutoDrafter.from_pretrained(golden.drafter_folder(name), target=self.target, dtype=torch.float64)
        cases = golden.expected_of(name)["cases"]
        tokens = [c.get("tokens") or c["output_ids"] for c in cases]
        self.prompts = [torch.tensor(tokens[i % len(tokens)][:n]) for i, n in enumerate((9, 4, 12, 6))]

    @functools.cached_property
    def batch(self):
        return padded(self.prompts)

    def processors(self, seed):
        """None for greedy decoding, keyed noise at temperature 0.7 for sampling."""
        if seed is None:
            return None
        config = copy.deepcopy(self.target.generation_config)
        config.temperature, config.top_k, config.top_p = 0.7, 0, 0.95
        return keyed_processors(config, seed, self.batch["input_ids"].shape[1])

    def plain(self, seed=None, rows=slice(None), **call):
        """New tokens of some rows."""
        batch = {k: v[rows] for k, v in self.batch.items()}
        call |= dict(do_sample=False, max_new_tokens=NEW, pad_token_id=0, logits_processor=self.processors(seed))
        return self.target.generate(**batch, **call)[:, batch["input_ids"].shape[1] :].tolist()

    def looped(self, seed=None, rows=slice(None), **knobs):
        """New tokens and statistics."""
        texts = self.plain(seed, rows, assistant_model=self.drafter, speculation=SpeculationConfig(**knobs))
        return texts, self.drafter.last_speculation


@functools.cache
def load_pair(name):
    return Pair(PAIRS[name])


@pytest.fixture(params=PAIRS)
def pair(request):
    return load_pair(request.param)


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("seed", "drafts", "gate", "stages"),
    [(None, None, ALWAYS, {2, 3, 4}), (5, 2, ALWAYS, {8}), (5, 2, -3.0, {2, 3}), (None, 2, NEVER, {1})],
)
def test_a_ragged_batch_of_looped_rows_writes_the_plain_text(pair, seed, drafts, gate, stages):
    texts, stats = pair.looped(seed, num_draft_tokens=drafts, loop_gate=gate, max_draft_stages=3 if gate == -3.0 else 8)
    assert texts == pair.plain(seed)
    assert max(s for row in stats.draft_stages for s in row) in stages


def test_whole_blocks_and_the_next_ones_first_drafts_are_accepted_in_one_round(pair):
    """Or else the tests of this file would see nothing."""
    _, stats = pair.looped(num_draft_tokens=2, loop_gate=ALWAYS)
    assert max(n for row in stats.accepted_lengths for n in row) > 2


@needs_stock
def test_both_engines_loop_alike(pair, seed=5):
    knobs = dict(rows=slice(2, 3), num_draft_tokens=3, loop_gate=-2.0, max_draft_stages=4)
    rounds = []
    for engine in ("own", "stock"):
        texts, stats = pair.looped(seed, **knobs, engine=engine)
        assert texts == pair.plain(seed, slice(2, 3))
        rounds.append((stats.acceptance_lengths, stats.draft_stages))
    assert rounds[0] == rounds[1]
    assert len(set(rounds[0][1][0])) > 1


# ---------------------------------------------------------------------- the drafter's cache


@pytest.mark.parametrize(("drafts", "gate"), [(None, -8.0), (2, -2.0)])
def test_after_each_round_the_draft_cache_is_that_of_a_fresh_context(pair, monkeypatch, drafts, gate):
    rounds, keep = [], Proposer.keep

    def observe(self, features, tokens, valid, original=Proposer.observe):
        original(self, features, tokens, valid)
        rounds.append((self.cache.select(torch.arange(len(valid))), self.seed))

    monkeypatch.setattr(Proposer, "observe", observe)
    monkeypatch.setattr(Proposer, "keep", lambda self, rows: (rounds.append(rows), keep(self, rows)))
    texts, stats = pair.looped(num_draft_tokens=drafts, loop_gate=gate)
    assert max(s for row in stats.draft_stages for s in row) > 1
    fresh = [Fresh(pair, torch.cat([p, torch.tensor(t)])) for p, t in zip(pair.prompts, texts)]
    committed = [len(p) + 1 for p in pair.prompts]
    active, turn, checked = list(range(len(texts))), -2, 0
    for event in rounds:
        if isinstance(event, list):
            active = [active[i] for i in event]
            continue
        cache, seed = event
        turn += 1  # the prefill observes the prompt but its end, then its end
        if turn < 0:
            continue
        if turn > 0:
            for row in active:
                committed[row] += stats.acceptance_lengths[row][turn - 1]
        for i, row in enumerate(active):
            fresh[row].check(cache, seed, i, committed[row])
            checked += 1
    assert checked > 20


class Fresh:
    """What a drafter's cache holds after `n` tokens of a text that it never drafted itself."""

    def __init__(self, pair, ids):
        self.drafter, self.ids = pair.drafter, ids
        self.features = golden.target_features(pair.target, ids, pair.drafter.config.target_layer_ids)

    @torch.no_grad()
    def check(self, cache, seed, i, n):
        mine = self.drafter.new_cache(torch.zeros(1, dtype=torch.long))
        valid = torch.ones(1, n - 1, dtype=torch.bool)
        my_seed = self.drafter.extend(mine, self.features[:, : n - 1], self.ids[None, 1:n], valid)
        length = int(mine.lengths[0])
        assert int(cache.lengths[i]) == length == int(self.drafter.expected_length(torch.tensor(n)))
        for a, b in zip(cache.layers, mine.layers, strict=True):
            for x, y in ((a.keys, b.keys), (a.values, b.values)):
                torch.testing.assert_close(x[i, :, :length], y[0, :, :length], atol=1e-9, rtol=1e-9)
        if my_seed is not None:
            torch.testing.assert_close(seed[i], my_seed[0], atol=1e-9, rtol=1e-9)


# ---------------------------------------------------------------------- when no further stage is drafted


def oracle_run(case, new=tiny.NEW, eos=None, rows=slice(0, 1), drafter=None, **knobs):
    drafter = drafter or tiny.oracle(case.texts, block=3)
    batch = {k: v[rows] for k, v in case.padded().items()}
    knobs = {"loop_gate": ALWAYS, **knobs}
    out = case.target.generate(
        **batch, assistant_model=drafter, max_new_tokens=new, do_sample=False, eos_token_id=eos, pad_token_id=tiny.PAD,
        speculation=SpeculationConfig(**knobs),
    )  # fmt: skip
    return out[:, batch["input_ids"].shape[1] :].tolist(), drafter.last_speculation


def test_stages_go_on_until_the_budget_holds_the_drafts_and_a_bonus(llama):
    assert tiny.NEW == 14
    texts, stats = oracle_run(llama)
    assert texts == llama.new[:1]
    # 1 token by the prefill, then four stages of 3 drafts and a bonus.
    assert (stats.draft_stages, stats.acceptance_lengths) == ([[4]], [[13]])
    texts, stats = oracle_run(llama, new=13)
    assert texts == [llama.new[0][:13]]
    assert (stats.draft_stages, stats.draft_lengths, stats.acceptance_lengths) == ([[4]], [[11]], [[12]])


def test_stages_stop_at_the_maximum(llama):
    _, stats = oracle_run(llama, max_draft_stages=2)
    assert (stats.draft_stages, stats.acceptance_lengths) == ([[2, 2]], [[7, 6]])


@pytest.mark.parametrize("place", range(1, 9))
def test_no_stage_follows_a_drafted_stop_token(llama, place):
    new = llama.new[0]
    eos = new[place]
    first = new.index(eos)
    if first == 0:
        pytest.skip("the prefill ends it")
    texts, stats = oracle_run(llama, eos=eos)
    assert texts == [new[: first + 1]]
    # Draft d is token d of the text: the stage that holds the stop token is the last.
    assert stats.draft_stages == [[-(-first // 3)]] and stats.draft_lengths == [[first]]


def test_no_stage_follows_a_block_cut_by_its_confidence(llama):
    for cut in (0, 1, 2):
        drafter = tiny.oracle(llama.texts, block=3, confidence=lambda k, cut=cut: 4.0 if k < cut else -4.0)
        drafter.config.confidence_head = True
        texts, stats = oracle_run(llama, drafter=drafter, confidence_threshold=0.5)
        assert texts == llama.new[:1]
        assert set(stats.draft_stages[0]) == {1} and max(stats.draft_lengths[0]) == cut


def test_no_stage_is_drafted_beyond_the_targets_last_position():
    target = tiny.make_target("gpt2", max_position_embeddings=20)
    prompts = [torch.randint(3, tiny.V, (n,)) for n in (9, 4)]
    texts = [tiny.plain(target, p, max_new_tokens=11) for p in prompts]
    case = tiny.Case(target, prompts, texts)
    new, stats = oracle_run(case, new=11, rows=slice(0, 2))
    assert generated(torch.tensor(new), 0, [11, 11]) == case.new
    assert stats.draft_stages[0] == [3] and stats.draft_lengths[0] == [
        9
    ]  # 20 positions: 10 committed, 9 drafts and a bonus


def test_rows_pass_and_stop_on_their_own_as_they_would_alone(pair):
    knobs = dict(num_draft_tokens=2, loop_gate=-0.9)
    texts, together = pair.looped(**knobs)
    for row in (1, 2):
        alone, stats = pair.looped(rows=slice(row, row + 1), **knobs)
        assert alone == texts[row : row + 1]
        for name in ("draft_stages", "draft_lengths", "acceptance_lengths"):
            assert getattr(stats, name)[0] == getattr(together, name)[row]
    mixed = [set(stages) for stages in itertools.zip_longest(*together.draft_stages)]
    assert any(len(stages - {None}) > 1 for stages in mixed)
