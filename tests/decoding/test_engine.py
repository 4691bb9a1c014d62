"""Every result of an engine is what `generate` gives for that prompt alone, whatever runs beside it and whatever
fails."""

import gc
import random
import resource

import pytest
import tiny
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from hf_dspark import CopyDrafter, SpeculationConfig
from hf_dspark.decoding.engine import EngineRequest, SpeculativeEngine
from hf_dspark.decoding.prefill import Prefill
from hf_dspark.modeling.draft_cache import BUCKET

DRAFTERS = {"block": tiny.make_drafter, "chain": tiny.make_eagle3, "copy": lambda target: CopyDrafter()}
SAMPLED = dict(do_sample=True, temperature=1.3, top_k=20)


@pytest.fixture(scope="module")
def target():
    return tiny.make_target(**tiny.TARGETS["llama"][2])


def prompts(count, seed=0, longest=40, shared=0):
    """Repetitive texts of many lengths, the first `shared` tokens the same."""
    rng = random.Random(seed)
    head = [rng.randrange(3, 50) for _ in range(shared)]
    out = []
    for _ in range(count):
        part = [rng.randrange(3, 50) for _ in range(rng.randint(2, 9))]
        out.append(head + (part * longest)[: rng.randint(2, longest)])
    return out


def alone(target, drafter, request, speculation):
    """The new tokens of the request's own `generate` call."""
    ids = torch.as_tensor(request.input_ids)[None]
    options = dict(request.options)
    if request.generation_config is not None:
        options["generation_config"] = request.generation_config
    knobs = SpeculationConfig(**{**speculation.to_dict(), "seed": request.seed})
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, speculation=knobs, **options
    )
    return out[0, ids.shape[1] :].tolist()


def mixed(texts, seed=0):
    """Requests of several budgets, greedy and sampled, some with a stop token."""
    rng, out = random.Random(seed), []
    for i, text in enumerate(texts):
        options = dict(max_new_tokens=rng.randint(1, 12), do_sample=False)
        options |= [{}, SAMPLED, dict(do_sample=True, repetition_penalty=1.2), dict(eos_token_id=[7, 11, 30])][i % 4]
        out.append(EngineRequest(input_ids=text, options=options, seed=i))
    return out


class Raising(LogitsProcessor):
    """Raises from the n-th call on."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("processor")
        return scores


class RaisingCriterion(StoppingCriteria, Raising):
    def __call__(self, input_ids, scores, **kwargs):
        Raising.__call__(self, input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class DyingStreamer:
    def __init__(self, puts):
        self.left, self.ended = puts, False

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise OSError("streamer")

    def end(self):
        self.ended = True


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(
    "setup",
    [
        dict(max_rows=1),
        dict(max_rows=3, prefill_chunk=5, shared_prefix=4),
        dict(max_rows=8, shared_prefix=None),
        dict(max_rows=5, prefill_chunk=16, max_tokens=250),
    ],
    ids=["one row", "small chunks", "eight rows", "bounded"],
)
def test_results_are_those_of_generate_whatever_the_company(target, kind, setup):
    drafter, speculation = (
        DRAFTERS[kind](target),
        SpeculationConfig(verification="match", copy=4 if kind == "copy" else None),
    )
    requests = mixed(prompts(9, shared=12 if setup.get("shared_prefix") else 0))
    expected = [alone(target, drafter, r, speculation) for r in requests]
    for order in (list(range(9)), [4, 8, 0, 3, 7, 2, 6, 1, 5]):
        engine = SpeculativeEngine(target, drafter, speculation, **setup)
        results = engine.generate([requests[i] for i in order])
        assert [r.error for r in results] == [None] * 9
        assert [r.tokens for r in results] == [expected[i] for i in order]


def test_other_knobs_decide_per_row_too(target):
    drafter = tiny.make_drafter(target)
    for speculation in (
        SpeculationConfig(verification="match", confidence_threshold=0.3),
        SpeculationConfig(verification="match", loop_gate=-9.0, max_draft_stages=3),
        SpeculationConfig(verification="match", copy=5),
        SpeculationConfig(verification="match", scheduler="auto", copy="auto", loop_gate="auto"),
        SpeculationConfig(verification="match", scheduler="algorithm1"),
        SpeculationConfig(verification="match", num_draft_tokens=0),
    ):
        requests = mixed(prompts(6, seed=3))
        expected = [alone(target, drafter, r, speculation) for r in requests]
        results = SpeculativeEngine(target, drafter, speculation, max_rows=4).generate(requests)
        assert [r.tokens for r in results] == expected


def test_a_result_says_why_it_ended_and_what_its_rounds_were(target):
    drafter = tiny.make_drafter(target)
    text = prompts(1)[0]
    free = alone(target, drafter, EngineRequest(input_ids=text, options=dict(max_new_tokens=9)), SpeculationConfig())
    stop = EngineRequest(input_ids=text, key="stop", options=dict(max_new_tokens=9, eos_token_id=free[4]))
    length = EngineRequest(
        input_ids=torch.tensor([text]), key="length", generation_config=GenerationConfig(max_new_tokens=9)
    )
    a, b = SpeculativeEngine(target, drafter).generate([stop, length])
    assert (a.key, a.reason, b.key, b.reason) == ("stop", "stop", "length", "length")
    assert a.tokens == free[: free.index(free[4]) + 1] and b.tokens == free
    assert sum(b.speculation.acceptance_lengths[0]) == 8  # the first token comes with the prefill


def test_an_engine_seed_gives_each_request_its_own_noise(target):
    drafter, text = tiny.make_drafter(target), prompts(1)[0]
    speculation = SpeculationConfig(verification="match", seed=40)
    requests = [EngineRequest(input_ids=text, options=dict(max_new_tokens=12, **SAMPLED)) for _ in range(4)]
    results = SpeculativeEngine(target, drafter, speculation, max_rows=2).generate(requests)
    numbered = [EngineRequest(input_ids=text, options=r.options, seed=40 + i) for i, r in enumerate(requests)]
    assert [r.tokens for r in results] == [alone(target, drafter, r, speculation) for r in numbered]
    assert len({tuple(r.tokens) for r in results}) == 4


# ---------------------------------------------------------------------- prompts


def test_a_common_prefix_is_read_once(target):
    drafter, read = tiny.make_drafter(target), []
    texts = prompts(6, shared=40, longest=6)
    engine = SpeculativeEngine(target, drafter, max_rows=3, shared_prefix=20)
    with reading(read):
        results = engine.generate([EngineRequest(input_ids=t, options=dict(max_new_tokens=6)) for t in texts])
    assert [r.error for r in results] == [None] * 6
    assert sum(read) == len(texts[0]) + sum(len(t) - 39 for t in texts[1:])


class reading:
    """Collects the tokens that prefills feed."""

    def __init__(self, read):
        self.read = read

    def __enter__(self):
        self.original = Prefill.advance

        def advance(prefill):
            out, begin, end = self.original(prefill)
            self.read.append(end - begin)
            return out, begin, end

        Prefill.advance = advance

    def __exit__(self, *exc):
        Prefill.advance = self.original


@pytest.mark.parametrize("kind", ["block", "chain"])
def test_a_shared_prefix_gives_the_drafter_the_context_of_a_fresh_start(target, kind):
    """The token behind the shared part differs, and the drafter's last entry depends on it."""
    drafter, texts = DRAFTERS[kind](target), prompts(2, shared=20, longest=9)
    seen = {}

    def observe(event):
        for i, commit in enumerate(event.commits):
            seen.setdefault(commit.key, []).append(event.draft.tokens[i, : event.verified[i]].tolist())

    drafts = []
    for shared in (8, None):
        seen.clear()
        engine = SpeculativeEngine(target, drafter, max_rows=2, shared_prefix=shared, observer=observe)
        engine.generate([EngineRequest(input_ids=t, options=dict(max_new_tokens=12)) for t in texts])
        drafts.append(dict(seen))
    assert drafts[0] == drafts[1]


def test_a_long_prompt_holds_nobody_up(target):
    drafter, order = tiny.make_drafter(target), []
    short = EngineRequest(input_ids=[3, 4, 5], key="short", options=dict(max_new_tokens=8))
    long = EngineRequest(input_ids=prompts(1, longest=40)[0] * 4, key="long", options=dict(max_new_tokens=1))
    engine = SpeculativeEngine(target, drafter, max_rows=2, prefill_chunk=4)
    order = [r.key for r in engine.stream([short, long])]
    assert order == ["short", "long"]


# ---------------------------------------------------------------------- memory


def held(engine) -> int:
    """Slots of the target's cache that the engine holds, rows times capacity, all in."""
    loop = engine._loop
    caches = [loop.batch.cache, *(p.batch.cache for p in loop.coming if p.batch)]
    caches += [engine._prefix[1]] if engine._prefix else []
    buffers = [c.layers[0].buffer.keys for c in caches]
    return sum(k.shape[0] * k.shape[2] for k in buffers if k is not None)


@pytest.mark.parametrize("shared", [None, 8])
def test_the_cache_stays_within_its_bound(target, shared):
    drafter, bound, most, rows, needed = tiny.make_drafter(target), 420, [], [], []
    rng = random.Random(2)
    requests = [
        EngineRequest(input_ids=t, options=dict(max_new_tokens=rng.choice([2, 60])))
        for t in prompts(24, longest=40, shared=30 if shared else 0)
    ]

    def observe(event):
        most.append(held(engine))
        rows.append(len(event.commits))
        sizes = [len(w.request.prompt) + w.request.budget for w in engine._rows.values()]
        needed.append(len(sizes) * max(sizes) + (len(engine._prefix[0]) if engine._prefix else 0))

    engine = SpeculativeEngine(target, drafter, max_rows=6, max_tokens=bound, shared_prefix=shared, observer=observe)
    results = engine.generate(requests)
    assert [r.error for r in results] == [None] * 24
    assert max(most) <= 2 * bound + 6 * 2 * BUCKET and max(rows) > 2 and max(needed) <= bound
    assert bool(engine._rows) is False and any(n > bound / 2 for n in needed)


def test_a_request_that_can_never_fit_is_refused(target):
    engine = SpeculativeEngine(target, tiny.make_drafter(target), max_tokens=20)
    big, small = engine.generate([EngineRequest(input_ids=[5] * 15, options=dict(max_new_tokens=n)) for n in (6, 5)])
    assert big.reason == "error" and "max_tokens=20" in str(big.error)
    assert len(small.tokens) == 5


def test_buffers_shrink_when_long_rows_have_left(target):
    drafter, sizes = tiny.make_drafter(target), []
    engine = SpeculativeEngine(target, drafter, max_rows=2, observer=lambda event: sizes.append(held(engine)))
    options = dict(max_new_tokens=4)
    long = [EngineRequest(input_ids=[3] * 230, options=options)]
    short = [EngineRequest(input_ids=[4] * 8, options=dict(max_new_tokens=7 + i)) for i in range(12)]
    engine.generate(long + short)
    assert max(sizes) >= 2 * 230 and sizes[-1] <= 2 * 128


# ---------------------------------------------------------------------- arrivals


def test_requests_may_come_while_others_run(target):
    drafter, got = tiny.make_drafter(target), []
    texts = prompts(5)

    def arriving():
        yield EngineRequest(input_ids=texts[0], key=0, options=dict(max_new_tokens=12))
        for i in range(1, 5):
            while len(got) < i - 1:
                yield None
            yield EngineRequest(input_ids=texts[i], key=i, options=dict(max_new_tokens=3 * i))

    engine = SpeculativeEngine(target, drafter, max_rows=2)
    for result in engine.stream(arriving()):
        got.append(result)
    expected = [alone(target, drafter, EngineRequest(input_ids=t, options=dict(max_new_tokens=n)), SpeculationConfig())
                for t, n in zip(texts, (12, 3, 6, 9, 12))]  # fmt: skip
    assert [r.tokens for r in sorted(got, key=lambda r: r.key)] == expected


def test_a_generator_that_raises_ends_after_the_rows_at_work(target):
    def arriving():
        yield EngineRequest(input_ids=[3, 4, 5], options=dict(max_new_tokens=6))
        raise OSError("queue")

    engine, got = SpeculativeEngine(target, tiny.make_drafter(target)), []
    with pytest.raises(OSError, match="queue"):
        for result in engine.stream(arriving()):
            got.append(result)
    assert len(got) == 1 and len(got[0].tokens) == 6


def test_one_stream_at_a_time(target):
    engine = SpeculativeEngine(target, tiny.make_drafter(target))
    request = EngineRequest(input_ids=[3, 4, 5], options=dict(max_new_tokens=6))
    first = engine.stream([request, request])
    next(first)
    with pytest.raises(RuntimeError, match="another stream"):
        next(engine.stream([request]))
    first.close()
    assert len(engine.generate([request])[0].tokens) == 6


def test_duplicates_of_keys_are_refused(target):
    engine = SpeculativeEngine(target, tiny.make_drafter(target))
    twice = [EngineRequest(input_ids=[3, n], key="a", options=dict(max_new_tokens=6)) for n in (4, 5)]
    with pytest.raises(ValueError, match="share a key"):
        engine.generate(twice)
    results = list(engine.stream(twice))
    assert sorted(r.reason for r in results) == ["error", "length"]
    assert "key='a'" in str(next(r.error for r in results if r.error))
    with pytest.raises(ValueError, match="unhashable"):
        EngineRequest(input_ids=[3], key=[1])


# ---------------------------------------------------------------------- cancels, faults


def test_cancels_of_rows_at_work_in_prefill_and_waiting(target):
    drafter, streamers = tiny.make_drafter(target), {k: DyingStreamer(99) for k in "abcd"}
    requests = [
        EngineRequest(input_ids=[3 + i] * (90 if k == "b" else 4), key=k, options=dict(max_new_tokens=30, streamer=s))
        for i, (k, s) in enumerate(streamers.items())
    ]

    def observe(event):
        if len(seen) == 0:
            for key in "abd":
                engine.cancel(key)
        seen.append(event)

    seen: list = []
    engine = SpeculativeEngine(target, drafter, max_rows=2, prefill_chunk=4, observer=observe)
    results = {r.key: r for r in engine.stream(requests)}
    assert [results[k].reason for k in "abcd"] == ["cancelled", "cancelled", "length", "cancelled"]
    assert 0 < len(results["a"].tokens) < 30 and results["b"].tokens == results["d"].tokens == []
    assert len(results["c"].tokens) == 30 and all(s.ended for s in streamers.values())
    assert not engine._cancelled
    engine.cancel("c")  # nothing runs: it isn't kept for later
    assert engine.generate(requests[2:3])[0].reason == "length"


def test_a_fault_of_a_prompt_is_its_own(target, monkeypatch):
    drafter, original = tiny.make_drafter(target), Prefill.advance

    def advance(prefill):
        if len(prefill.requests[0].prompt) == 7:
            raise MemoryError("no room")
        return original(prefill)

    monkeypatch.setattr(Prefill, "advance", advance)
    texts = [[9] * n for n in (4, 5, 6, 8, 7)]
    results = SpeculativeEngine(target, drafter).generate(
        [EngineRequest(input_ids=t, options=dict(max_new_tokens=5)) for t in texts]
    )
    assert [r.reason for r in results] == ["length"] * (len(results) - 1) + ["error"]


def test_positions_that_a_target_has_not_learned_are_refused():
    target = tiny.make_target("gpt2")
    engine = SpeculativeEngine(target, tiny.make_drafter(target))
    over, full, beyond = engine.generate(
        [EngineRequest(input_ids=[5] * n, options=dict(max_new_tokens=7)) for n in (251, 250, 300)]
    )
    assert "256 positions" in str(over.error) and "256 positions" in str(beyond.error)
    assert full.tokens == alone(
        target, engine.drafter, EngineRequest(input_ids=[5] * 250, options=dict(max_new_tokens=7)), SpeculationConfig()
    )


def test_rows_do_not_reach_over_a_length_that_changes_the_forward():
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    target = tiny.make_target(**tiny.TARGETS["llama"][2], rope_parameters=rope)
    engine = SpeculativeEngine(target, tiny.make_drafter(target))
    over, within = engine.generate(
        [EngineRequest(input_ids=[5] * n, options=dict(max_new_tokens=7)) for n in (251, 250)]
    )
    assert "dynamic NTK" in str(over.error) and len(within.tokens) == 7


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (dict(input_ids=[]), "at least one token"),
        (dict(input_ids=[[3], [4]]), "at least one token"),
        (dict(input_ids=[0.5]), "at least one token"),
        (dict(input_ids=[3, 61]), "from 0 to 60"),
        (dict(input_ids=[-1]), "from 0 to 60"),
        (dict(input_ids="hello"), ""),
        (dict(input_ids=[3], options=dict(max_new_tokens=0)), "max_new_tokens"),
        (dict(input_ids=[3], options=dict(num_beams=2)), "num_beams=2"),
        (dict(input_ids=[3], options=dict(num_return_sequences=2, do_sample=True)), "num_return_sequences"),
        (dict(input_ids=[3], options=dict(assistant_model=None)), "assistant_model"),
        (dict(input_ids=[3], options=dict(no_such_option=1)), "no_such_option"),
    ],
)
def test_what_cannot_be_answered_is_that_requests_result(target, request_, why):
    engine = SpeculativeEngine(target, tiny.make_drafter(target))
    good = EngineRequest(input_ids=[3, 4], options=dict(max_new_tokens=4))
    bad, fine = engine.generate([EngineRequest(**request_), good])
    assert bad.reason == "error" and why in str(bad.error) and bad.tokens == []
    assert len(fine.tokens) == 4


def test_an_error_says_where_it_was_raised_and_holds_no_tensors(target):
    options = dict(max_new_tokens=9, logits_processor=[Raising(1)])
    (result,) = SpeculativeEngine(target, tiny.make_drafter(target)).generate(
        [EngineRequest(input_ids=[3], options=options)]
    )
    assert result.error.__traceback__ is None and 'raise RuntimeError("processor")' in result.error.__notes__[-1]


def test_an_interrupt_leaves_nothing_behind(target):
    drafter, layers = tiny.make_drafter(target), target.model.layers

    def interrupt(event):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(event)

    seen: list = []
    requests = mixed(prompts(6))
    engine = SpeculativeEngine(target, drafter, SpeculationConfig(verification="match"), max_rows=3, observer=interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream(requests))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    assert not engine._rows and not engine._ready and engine._loop is None and engine._prefix is None
    engine.observer = None
    expected = [alone(target, drafter, r, engine.speculation) for r in requests]
    assert [r.tokens for r in engine.generate(requests)] == expected


def test_the_stock_loop_and_empty_bounds_are_refused(target):
    drafter = tiny.make_drafter(target)
    with pytest.raises(ValueError, match="engine='own'"):
        SpeculativeEngine(target, drafter, SpeculationConfig(engine="stock"))
    for name in ("max_rows", "max_tokens", "prefill_chunk", "shared_prefix"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            SpeculativeEngine(target, drafter, **{name: 0})


def faulty(i, rng, text):
    """Request i of a long run, and whether it must fail."""
    options = dict(max_new_tokens=rng.randint(1, 10), do_sample=False)
    options |= [{}, SAMPLED, dict(do_sample=True, repetition_penalty=1.2), dict(eos_token_id=[7, 11, 30])][i % 4]
    kind = rng.choice(["fine"] * 8 + ["processor", "criterion", "streamer", "empty", "zero", "beyond", "cancel"])
    if kind == "processor":
        options["logits_processor"] = [Raising(rng.randint(0, 3))]
    elif kind == "criterion":
        options["stopping_criteria"] = [RaisingCriterion(rng.randint(0, 3))]
    elif kind == "streamer":
        options["streamer"] = DyingStreamer(rng.randint(0, 3))
    elif kind == "empty":
        text = []
    elif kind == "zero":
        options["max_new_tokens"] = 0
    elif kind == "beyond":
        text = [5] * 300
    return EngineRequest(input_ids=text, key=i, options=options, seed=i), kind


def test_five_hundred_requests_with_faults_end_as_alone_in_flat_memory():
    target = tiny.make_target("gpt2")  # its learned positions end, so a prompt can be too long
    drafter, rng, kinds, requests = tiny.make_drafter(target), random.Random(5), {}, {}
    speculation = SpeculationConfig(verification="match")
    texts = prompts(500, seed=6, longest=30)
    live, peak = [], []

    def arriving():
        for i, text in enumerate(texts):
            request, kinds[i] = faulty(i, rng, text)
            requests[i] = EngineRequest(input_ids=text, options=dict(request.options), seed=i)
            if kinds[i] == "cancel":
                engine.cancel(i)
            if i in (100, 499):
                gc.collect()
                live.append(sum(o.numel() * o.element_size() for o in gc.get_objects() if type(o) is torch.Tensor))
                peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            yield request

    engine = SpeculativeEngine(target, drafter, speculation, max_rows=6, prefill_chunk=32)
    results = {r.key: r for r in engine.stream(arriving())}
    assert sorted(results) == list(range(500)) and not engine._cancelled
    assert live[1] - live[0] < 50_000, "tensors are left behind"
    assert peak[1] - peak[0] < 30_000, "kilobytes"
    reasons = {"empty": "error", "zero": "error", "beyond": "error", "cancel": "cancelled"}
    for i, result in results.items():
        if kinds[i] == "fine":
            assert result.error is None
            assert result.tokens == alone(target, drafter, requests[i], speculation), i
        elif kinds[i] in reasons:
            assert result.reason == reasons[kinds[i]]
        else:
            assert result.reason in ("error", "stop", "length")  # it may have ended before the fault
            assert result.error is None or str(result.error) in (kinds[i], "processor")
    assert sum(r.error is not None for r in results.values()) > 60
