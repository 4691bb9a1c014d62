"""Trees of drafts leave the text as it is without them: greedy in every target and batch, sampled with the noise of
`match`."""

import functools
import random

import pytest
import tiny
import torch
from tiny import generated
from transformers import GenerationConfig

from hf_dspark import CopyDrafter, SpeculationConfig, SpeculativeEngine, keyed_processors
from hf_dspark.decoding.engine import EngineRequest
from hf_dspark.decoding.generate import listening
from hf_dspark.evaluation import metrics

KINDS = ("ddtree", "dartree", "jetspec")


class Guessing(tiny.Scripted):
    """Knows the text, and has each position's true token as its first, second or third guess, or not at all."""

    correction = None

    def start(self, cache, anchor, seed=None, pseudo=None, length=None):
        state = super().start(cache, anchor, seed, pseudo, length)
        state.base = torch.zeros(len(anchor), self.config.max_block, self.config.vocab_size)
        for row, plan in enumerate(state.plans):
            for k, token in enumerate(plan):
                rank = (token * 7 + k * 5 + len(cache.tokens[row]) * 3) % 4
                for guess in range(3):
                    other = (token + guess + 1) % self.config.vocab_size
                    state.base[row, k, token if guess == rank else other] = 9.0 - guess
        state.select = lambda rows: None
        return state


def guessing(texts, **kwargs):
    return Guessing(lambda prefix, ahead: tiny.continuation(texts, prefix), **kwargs)


def make(case, kind):
    if kind == "eagle2":
        return tiny.make_eagle3(case.target)
    return tiny.make_drafter(case.target) if kind == "dartree" else guessing(case.texts)


@pytest.mark.parametrize("kind", [*KINDS, "eagle2"])
def test_greedy_rows_equal_plain_generate_in_every_target(case, kind):
    drafter = make(case, kind)
    for budget, rows in ((40, [1]), (6, [0, 1, 2, 3])):
        batch = tiny.padded([case.prompts[r] for r in rows])
        knobs = SpeculationConfig(tree=kind, tree_budget=budget)
        call = dict(assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False, speculation=knobs)
        out = case.target.generate(**batch, **call)
        assert generated(out, batch["input_ids"].shape[1], [tiny.NEW] * len(rows)) == [case.new[r] for r in rows]
        assert drafter.last_speculation.by_source["tree"]["rounds"]
        if kind == "ddtree":
            assert drafter.last_speculation.tau > 1.2, "the cases have accepted branches"


@pytest.mark.parametrize("gate", [-1e9, -3.0, "auto"])
@pytest.mark.parametrize("kind", ["ddtree", "dartree"])
def test_further_stages_hang_on_the_best_path_and_change_no_text(llama, gate, kind):
    drafter = guessing(llama.texts, block=3) if kind == "ddtree" else tiny.make_drafter(llama.target, block_size=3)
    knobs = SpeculationConfig(tree=kind, tree_budget=12, loop_gate=gate, max_draft_stages=3)
    call = dict(assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False, speculation=knobs)
    out = llama.target.generate(**llama.padded(), **call)
    assert generated(out, 9, [tiny.NEW] * 4) == llama.new
    stages = {s for row in drafter.last_speculation.draft_stages for s in row}
    assert gate != -1e9 or 3 in stages


def draw(seed: int):
    """One random configuration: prompts, drafter, sampling options, knobs."""
    r = random.Random(seed)
    prompts = [torch.tensor(r.choices(range(3, 60), k=r.randint(1, 8))) for _ in range(r.choice([1, 1, 2, 3]))]
    kind = r.choice([*KINDS, "dartree", "eagle2"])
    options = dict(
        temperature=r.choice([0.4, 1.0, 1.7]), top_k=r.choice([0, 2, 12]), top_p=r.choice([1.0, 0.9]),
        repetition_penalty=r.choice([1.0, 1.0, 1.4]), no_repeat_ngram_size=r.choice([0, 0, 1]),
        min_new_tokens=r.choice([None, 3]), eos_token_id=r.choice([None, r.sample(range(3, 60), 6)]),
        suppress_tokens=[tiny.PAD], pad_token_id=tiny.PAD, prefill_chunk_size=r.choice([None, None, 2]),
    )  # fmt: skip
    knobs = SpeculationConfig(
        verification="match", seed=seed, tree=kind, tree_budget=r.choice([None, 1, 2, 5, 16, 64]),
        copy=r.choice([None, None, 4, "auto"]), num_draft_tokens=r.choice([None, None, 1, 3]),
        loop_gate=r.choice([None, -1.0, -1e9, "auto"]), max_draft_stages=r.choice([1, 3]),
    )  # fmt: skip
    return prompts, kind, options, knobs, r.random() < 0.3


@functools.cache
def keyed_target():
    return tiny.make_target(num_hidden_layers=2, **tiny.GQA)


def keyed(prompts, options, seed):
    """New tokens [B, 7] of plain generate on keyed noise."""
    batch = tiny.padded(prompts)
    width = batch["input_ids"].shape[1]
    processors = keyed_processors(GenerationConfig(**options), seed, width)
    out = keyed_target().generate(**batch, **options, do_sample=False, max_new_tokens=7, logits_processor=processors)
    return out[:, width:].tolist()


def check(seed: int) -> int:
    """Compares one configuration with keyed sampling without a drafter; the drafts accepted."""
    prompts, kind, options, knobs, reduced = draw(seed)
    expected, vocabulary = keyed(prompts, options, knobs.seed), dict(draft_vocab_size=40) if reduced else {}
    if kind == "eagle2":
        drafter = tiny.make_eagle3(keyed_target(), target_layer_ids=[-1, 0], **vocabulary)
    elif kind == "dartree" or reduced:
        drafter = tiny.make_drafter(keyed_target(), target_layer_ids=[-1, 0], num_hidden_layers=1, **vocabulary)
    else:
        drafter = guessing([p.tolist() + new for p, new in zip(prompts, expected)], block=4, taps=[0])
    batch = tiny.padded(prompts)
    out = keyed_target().generate(
        **batch, **options, assistant_model=drafter, do_sample=True, max_new_tokens=len(expected[0]), speculation=knobs
    )
    ours = out[:, batch["input_ids"].shape[1] :].tolist()
    for row, new in enumerate(expected):
        assert ours[row] == new[: len(ours[row])] and set(new[len(ours[row]) :]) <= {tiny.PAD}, (
            f"seed {seed}, row {row}"
        )
    return sum(map(sum, drafter.last_speculation.accepted_lengths))


@pytest.mark.parametrize("part", range(8))
def test_sampled_rows_equal_keyed_sampling(part):
    """200 configurations in all."""
    assert sum(check(1000 + 25 * part + i) for i in range(25)) > 25


@pytest.mark.long
def test_sampled_rows_equal_keyed_sampling_two_thousand_times():
    assert sum(check(100_000 + i) for i in range(2000)) > 2000


def test_a_stop_token_inside_a_branch_ends_the_text(llama):
    stop = llama.new[0][3]
    expected = [new[: new.index(stop) + 1] if stop in new else new for new in llama.new]
    for kind in KINDS:
        seen = []
        with listening(observer=seen.append):
            out = llama.target.generate(
                **llama.padded(), assistant_model=guessing(llama.texts), max_new_tokens=tiny.NEW, do_sample=False,
                eos_token_id=stop, pad_token_id=tiny.PAD, speculation=SpeculationConfig(tree=kind, tree_budget=60),
            )  # fmt: skip
        assert generated(out, 9, [len(e) for e in expected]) == expected
        drafted = [event.draft for event in seen if event.draft.parents is not None]
        assert any(stop in draft.tokens for draft in drafted)
        for draft in drafted:
            for tokens, parents, n in zip(draft.tokens.tolist(), draft.parents.tolist(), draft.lengths):
                assert stop not in {tokens[p] for p in parents[:n] if p >= 0}, "nothing is drafted behind a stop token"


class Counting:
    """A processor that looks at the prefix, and notes what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, ids, scores):
        self.asked += [tuple(row) for row in ids.tolist()]
        return scores - 0.01 * ids.sum(-1, keepdim=True) * torch.arange(scores.shape[-1]) % 3


@pytest.mark.parametrize("sampled", [False, True])
def test_processors_see_the_true_path_alone_and_once_per_position(llama, sampled):
    plain, ours, options = Counting(), Counting(), dict(max_new_tokens=tiny.NEW, do_sample=sampled)
    prompt = llama.prompts[0][None]
    text = llama.target.generate(prompt, logits_processor=[plain], max_new_tokens=tiny.NEW, do_sample=False)
    knobs = SpeculationConfig(tree="ddtree", tree_budget=30, verification="match", seed=1)
    out = llama.target.generate(
        prompt, logits_processor=[ours], assistant_model=guessing([text[0].tolist()]), speculation=knobs, **options
    )
    assert ours.asked == [tuple(out[0, :n].tolist()) for n in range(9, 9 + tiny.NEW)]
    assert sampled or (out.equal(text) and ours.asked == plain.asked)


def test_streamers_scores_and_logits_are_those_of_plain_generate(llama):
    class Streamer:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append(-1)

    streamers = Streamer(), Streamer()
    options = dict(do_sample=False, max_new_tokens=tiny.NEW, repetition_penalty=1.2)
    options |= dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    prompt = llama.prompts[0][None]
    plain = llama.target.generate(prompt, streamer=streamers[0], **options)
    drafter = guessing([plain.sequences[0].tolist()])
    knobs = SpeculationConfig(tree="ddtree", tree_budget=30)
    ours = llama.target.generate(prompt, streamer=streamers[1], assistant_model=drafter, speculation=knobs, **options)
    assert drafter.last_speculation.tau > 1.5 and ours.sequences.equal(plain.sequences)
    assert streamers[0].tokens == streamers[1].tokens
    for name in ("scores", "logits"):
        for a, b in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(a.double(), b.double(), atol=1e-4, rtol=1e-5)


def test_own_criteria_end_the_text_where_they_do_without_a_drafter(llama):
    stop = lambda ids, scores, **_: ids[:, -1] == llama.new[0][5]  # noqa: E731
    options = dict(do_sample=False, max_new_tokens=tiny.NEW, stopping_criteria=[stop])
    prompt = llama.prompts[0][None]
    knobs = SpeculationConfig(tree="ddtree", tree_budget=30)
    out = llama.target.generate(prompt, assistant_model=guessing(llama.texts), speculation=knobs, **options)
    assert out.tolist() == llama.target.generate(prompt, **options).tolist()


def test_the_caches_go_on_in_a_further_call(llama):
    knobs = SpeculationConfig(tree="dartree", tree_budget=30)
    drafter, prompt = tiny.make_drafter(llama.target), llama.prompts[0][None]
    options = dict(do_sample=False, return_dict_in_generate=True, assistant_model=drafter, speculation=knobs)
    first = llama.target.generate(prompt, max_new_tokens=6, **options)
    rest = llama.target.generate(
        first.sequences, max_new_tokens=tiny.NEW - 6, **{tiny.CACHE: first[tiny.CACHE]}, **options
    )
    assert rest.sequences[0].tolist() == llama.texts[0]


def test_an_engine_verifies_trees(llama):
    drafter = tiny.make_drafter(llama.target)
    knobs = SpeculationConfig(tree="dartree", tree_budget=20)
    engine = SpeculativeEngine(llama.target, drafter, speculation=knobs, max_rows=3)
    options = dict(max_new_tokens=tiny.NEW, do_sample=False)
    results = engine.generate([EngineRequest(input_ids=p, options=options) for p in llama.prompts])
    assert [r.tokens for r in results] == llama.new
    assert all(r.speculation.by_source["tree"]["rounds"] for r in results)


# ---------------------------------------------------------------------- drafters that give no numbers


class Broken(Guessing):
    """Gives nan, inf or nothing possible from the second position on."""

    def __init__(self, *args, value=torch.nan, **kwargs):
        super().__init__(*args, **kwargs)
        self.value = value

    def start(self, *args, **kwargs):
        state = super().start(*args, **kwargs)
        state.base[:, 1:] = self.value
        return state

    def step(self, cache, state, prev):
        k = state.k
        logits, confidence, state = super().step(cache, state, prev)
        return (logits if k == 0 else torch.full_like(logits, self.value)), confidence, state


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tree", [None, *KINDS])
@pytest.mark.parametrize("verification", ["greedy", "match", "ratio", "block"])
def test_drafts_without_a_finite_law_are_left_out(llama, value, tree, verification):
    if tree and verification == "block":
        pytest.skip("judges chains only")
    greedy = verification == "greedy"
    knobs = SpeculationConfig(
        tree=tree, tree_budget=tree and 9, seed=3, verification="match" if greedy else verification
    )
    drafter = Broken(lambda prefix, ahead: tiny.continuation(llama.texts, prefix), value=value, sharpness=2.0)
    out = llama.target.generate(
        **llama.padded(),
        assistant_model=drafter,
        max_new_tokens=tiny.NEW,
        do_sample=not greedy,
        top_k=0,
        speculation=knobs,
    )
    if greedy:
        assert generated(out, 9, [tiny.NEW] * 4) == llama.new
    assert max(max(row) for row in drafter.last_speculation.accepted_lengths) <= 1
    assert any("aren't finite" in note for note in drafter.last_speculation.notes)


# ---------------------------------------------------------------------- what can't be


def test_knobs_that_contradict_a_tree_are_refused():
    for knobs, words in (
        (dict(tree_budget=4), "without a tree"),
        (dict(tree="auto", engine="stock"), "engine='own' or tree=None"),
        (dict(tree="auto", verification="block"), "'ratio' or 'match'"),
        (dict(tree="auto", tree_budget=0), "the least is 1"),
        (dict(tree="oak"), "set one of"),
    ):
        with pytest.raises(ValueError, match=words):
            SpeculationConfig(**knobs)


def test_trees_that_a_drafter_or_a_kernel_cannot_have_are_refused(llama, fresh_target):
    eagle = tiny.make_eagle3(llama.target)
    for drafter, tree, words in (
        (tiny.make_drafter(llama.target), "eagle2", "drafts a block at once.*'ddtree'"),
        (eagle, "ddtree", "drafts token by token.*'eagle2'"),
        (CopyDrafter(), "auto", "only copies.*tree=None"),
    ):
        with pytest.raises(ValueError, match=words):
            knobs = SpeculationConfig(tree=tree, copy=4)
            llama.target.generate(llama.prompts[0][None], assistant_model=drafter, speculation=knobs)
    for kernel in ("flash_attention_2", "flex_attention"):
        fresh_target.config._attn_implementation = kernel
        with pytest.raises(ValueError, match=f"{kernel}.*attn_implementation='sdpa', or set tree=None"):
            knobs = SpeculationConfig(tree="auto")
            fresh_target.generate(
                llama.prompts[0][None], assistant_model=tiny.make_drafter(fresh_target), speculation=knobs
            )


def test_knobs_that_trees_do_not_heed_are_noted(llama):
    eagle = tiny.make_eagle3(llama.target)
    knobs = SpeculationConfig(tree="auto", loop_gate=-1.0, tree_budget=8, scheduler="auto")
    llama.target.generate(
        llama.prompts[0][None], assistant_model=eagle, max_new_tokens=4, do_sample=False, speculation=knobs
    )
    notes = " ".join(eagle.last_speculation.notes)
    assert "never looped" in notes and "scheduler='auto'" in notes


# ---------------------------------------------------------------------- statistics


def test_statistics_count_depths_and_side_branches_not_nodes(llama):
    drafter, seen = guessing(llama.texts), []
    knobs = SpeculationConfig(tree="ddtree", tree_budget=30)
    with listening(observer=seen.append):
        llama.target.generate(
            **llama.padded(), assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False, speculation=knobs
        )
    stats = drafter.last_speculation
    assert max(map(max, stats.draft_lengths)) == 30 and max(map(max, stats.reach)) <= 7
    assert sum(stats.accepted_histogram) == sum(map(len, stats.reach))
    assert sum(k * n for k, n in enumerate(stats.accepted_histogram)) == sum(map(sum, stats.accepted_lengths))
    assert len(stats.conditional_acceptance) == max(map(max, stats.reach))
    assert 0.1 < stats.side_branch_rate < 0.9
    assert metrics.conditional_acceptance(metrics.pooled(metrics.responses_of(stats))) == pytest.approx(
        stats.conditional_acceptance, nan_ok=True
    )


@pytest.mark.parametrize("kind", ["ddtree", "dartree", "jetspec"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_temperature_alone_needs_no_look_at_the_whole_vocabulary(kind, temperature, llama, monkeypatch):
    """The trees are those that the whole vocabulary gives, node for node."""
    from hf_dspark.drafting import tree_drafts

    drafter, seen = tiny.make_drafter(llama.target, correction_head="markov", markov_rank=4), {}
    for cheap in (True, False):
        if not cheap:
            monkeypatch.setattr(tree_drafts, "temperature_of", lambda scorer: None)
        drafts = seen[cheap] = []
        with listening(lambda event, drafts=drafts: drafts.append(event.draft)):
            llama.target.generate(
                **llama.padded(), max_new_tokens=12, do_sample=True, temperature=temperature, top_k=0, eos_token_id=None,
                pad_token_id=0, assistant_model=drafter,
                speculation=SpeculationConfig(tree=kind, tree_budget=6, seed=3, verification="match"),
            )  # fmt: skip
    for one, other in zip(seen[True], seen[False], strict=True):
        assert one.tokens.equal(other.tokens)
        assert one.parents is other.parents is None or one.parents.equal(other.parents)
