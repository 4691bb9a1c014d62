"""The benchmark on tiny models: what it records, that it goes on where it stopped, and how it sums up."""

import json
import math

import pytest
import tiny
import tiny_chat
import torch
import transformers
from packaging.version import Version

from hf_dspark.evaluation import benchmark
from hf_dspark.evaluation.benchmark import Method, Plan, make_methods, run, write_json
from hf_dspark.evaluation.environment import environment, weights_hash
from hf_dspark.evaluation.metrics import Round
from hf_dspark.evaluation.prompts import Prompt, render

NEW = 16
STOCK = ["stock"] if Version(transformers.__version__) >= Version("5.18") else []  # refused before


@pytest.fixture(scope="module")
def models():
    target = tiny.make_target(**tiny.TARGETS["llama"][2]).float()
    return target, tiny_chat.make_tokenizer(), tiny.make_drafter(target).float()


def plan(**changes):
    prompts = [Prompt((text,), "ab"[i % 2], i) for i, text in enumerate(tiny_chat.PROMPTS)]
    default = dict(prompts=prompts, methods=make_methods(["plain", "lookup", *STOCK, "own"]), max_new_tokens=NEW)
    return Plan(**{**default, **changes})


@pytest.fixture(scope="module")
def result(models, tmp_path_factory):
    return run(*models, plan(), {"environment": "here"}, tmp_path_factory.mktemp("run") / "partial.jsonl")


def entry(result, method, group="all"):
    return next(r for r in result["results"] if r["method"].startswith(method) and r["set"] == group)


def test_every_prompt_is_answered_by_every_method_and_greedy_answers_are_equal(result):
    assert not result["refused"]
    assert len(result["records"]) == 4 * (3 + len(STOCK))
    assert {entry(result, m)["same_text"] for m in ("lookup", *STOCK, "own")} == {1.0}
    assert all(r["tokens"] == NEW and r["decode_tokens"] + 1 <= NEW for r in result["records"])


def test_rounds_add_up_to_the_tokens(result):
    for r in result["records"]:
        assert sum(map(sum, r["emitted"])) == r["decode_tokens"]
        if "rounds" in r:
            assert sum(Round(*x).emitted for x in r["rounds"][0]) == r["decode_tokens"]
            assert r["draft_seconds"] + r["verify_seconds"] + r["overhead_seconds"] <= r["seconds"]


def test_sets_are_reported_apart_and_together(result):
    assert [r["set"] for r in result["results"] if r["method"] == "plain"] == ["a", "b", "all"]
    assert [entry(result, "own", s)["answers"] for s in "ab"] == [2, 2]
    assert entry(result, "plain")["tau"] == 1.0
    speedup = entry(result, "own")["speedup_over_plain"]
    assert speedup["low"] <= speedup["ratio"] <= speedup["high"]
    assert "speedup_over_lookup" in entry(result, "own") and "speedup_over_plain" not in entry(result, "plain")


def test_methods_take_turns_in_an_order_of_their_own_for_every_prompt():
    orders = {}
    for _, prompt, _, method in plan(repeats=4).runs():
        orders.setdefault(prompt.index, []).append(method.kind)
    assert len({tuple(o[:4]) for o in orders.values()}) > 1
    assert [r[3] for r in plan(repeats=4).runs()] == [r[3] for r in plan(repeats=4).runs()]


def test_an_interrupted_run_goes_on_and_ends_with_the_same_answers(models, tmp_path, monkeypatch):
    two = [Prompt((text,), "a", i) for i, text in enumerate(tiny_chat.PROMPTS[:2])]
    small = plan(prompts=two, temperatures=[0.0, 1.0], methods=make_methods(["plain", "own"]))
    partial = tmp_path / "partial.jsonl"
    answer, calls = benchmark.answer, []

    def counted(*args):
        if args[3].max_new_tokens == NEW:  # not the warm-up
            calls.append(args)
            if len(calls) == 4:
                raise KeyboardInterrupt
        return answer(*args)

    monkeypatch.setattr(benchmark, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        run(*models, small, {}, partial)
    partial.write_text(partial.read_text() + '{"half a li')
    done = run(*models, small, {}, partial)
    assert len(calls) == 4 + 8 - 3 and len(done["records"]) == 8
    fresh = run(*models, small, {}, tmp_path / "other.jsonl")
    assert [r["text"] for r in done["records"]] == [r["text"] for r in fresh["records"]]


def test_results_of_other_settings_are_not_continued(models, tmp_path):
    small = plan(methods=make_methods(["plain"]))
    run(*models, small, {}, tmp_path / "partial.jsonl")
    with pytest.raises(ValueError, match="other settings"):
        run(*models, plan(methods=make_methods(["plain"]), seed=1), {}, tmp_path / "partial.jsonl")


def test_a_method_that_refuses_is_left_out_with_its_reason(models, tmp_path):
    methods = [Method("plain"), Method("own", {"verification": "nonsense"})]
    done = run(*models, plan(methods=methods), {}, tmp_path / "partial.jsonl")
    assert "verification='nonsense' is unknown" in done["refused"]["own[verification=nonsense]"]
    assert {r["method"] for r in done["results"]} == {"plain"}
    with pytest.raises(ValueError, match="Every method refused"):
        run(*models, plan(methods=methods[1:]), {}, tmp_path / "none.jsonl")


def test_settings_multiply_the_drafters_methods_only():
    labels = [m.label for m in make_methods(["plain", "own"], [{}, {"num_draft_tokens": 3}])]
    assert labels == ["plain", "own", "own[num_draft_tokens=3]"]
    with pytest.raises(ValueError, match="unknown"):
        Method("ours")


def test_looped_drafting_comes_with_its_diagnostics(models, tmp_path):
    target, tokenizer, _ = models
    texts = [tiny.plain(target, torch.tensor(render(tokenizer, p)), max_new_tokens=NEW) for p in tiny_chat.PROMPTS]
    drafter = tiny.oracle(texts, block=3)
    methods = make_methods(["plain", "own"], [{}, {"loop_gate": -1e9, "max_draft_stages": 2}])
    done = run(target, tokenizer, drafter, plan(methods=methods), {}, tmp_path / "partial.jsonl")
    looped = next(r for r in done["results"] if r["method"].startswith("own[loop") and r["set"] == "all")
    assert list(looped["by_stages"]) == [1, 2] and looped["by_stages"][2]["tau"] > 4
    assert looped["full_acceptance"][0] == 1.0 and looped["looped_token_share"] > 0.5
    assert looped["gate"][1]["precision"] == 1.0 and looped["verifications_saved"] > 0.2
    write_json(done, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["results"]


def test_all_turns_build_on_the_methods_own_answers(models, tmp_path):
    talk = Prompt(("w3 w4", "w5"), "talk", 0)
    both = plan(prompts=[talk], methods=make_methods(["plain", "own"]), turns="all")
    done = run(*models, both, {}, tmp_path / "partial.jsonl")
    plain, own = sorted(done["records"], key=lambda r: r["method"] == "own")
    assert plain["text"] == own["text"] and len(own["text"]) == 2 and own["tokens"] == 2 * NEW
    assert own["prompt_tokens"] > 2 * len("w3 w4".split()) + NEW  # the second prompt holds the first answer
    assert len(own["rounds"]) == 2


def test_nothing_but_numbers_stands_in_the_json(tmp_path):
    write_json({"a": math.nan, "b": [math.inf, 1.5], "c": (1, "x", None)}, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5], "c": [1, "x", None]}


def test_the_run_record_tells_drafters_apart_by_their_weights(models):
    target, _, drafter = models
    record = environment(target, drafter)
    assert record["versions"]["hf_dspark"] and record["dtype"] == "float32" and record["drafter_knobs"]
    other = tiny.make_drafter(target, seed=9).float()
    assert weights_hash(drafter) == record["drafter_weights"] != weights_hash(other)
    assert weights_hash(tiny.make_drafter(target).float()) == record["drafter_weights"]
