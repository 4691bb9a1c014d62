"""Load on tiny models: every user is answered, in the engine's own time, and the figures are those of the answers."""

import math

import pytest
import tiny

from hf_dspark.evaluation import load
from hf_dspark.evaluation.load import Load, Running, run_loads, ways

PROMPTS = [[3 + i] * (2 + i) for i in range(6)]


@pytest.fixture(scope="module")
def target():
    return tiny.make_target(**tiny.TARGETS["llama"][2]).float()


def test_a_running_clock_stands_while_others_run():
    times = iter([10.0, 12.0, 13.0, 100.0, 101.0])
    clock = Running(lambda: next(times))
    with clock:
        assert clock() == 2.0
    assert clock() == 3.0
    clock.skip(5.0)
    with clock:
        pass
    assert clock() == 9.0


def test_every_method_answers_everything_under_every_load(target):
    drafter, seen = tiny.make_drafter(target).float(), []
    methods = ways(drafter)
    assert list(methods) == ["plain", "fixed", "auto", "looped"]
    rows = run_loads(target, methods, PROMPTS, [Load(1), Load(4)], max_new_tokens=7, progress=lambda *x: seen.append(x))
    assert [(r["load"], r["method"]) for r in rows] == [(n, m) for n in ("1", "4") for m in methods]
    assert seen[-1] == (48, 48)
    for r in rows:
        assert (r["answers"], r["failed"]) == (6, 0) and r["tokens_per_second"] > 0 and r["user_tokens_per_second"] > 0
        assert 1 <= r["tau"] <= 6 and 0 <= r["verified"] <= 40
        assert r["verified"] == 0 and r["tau"] == 1 if r["method"] == "plain" else True
    assert next(r for r in rows if r["method"] == "fixed")["verified"] > 2
    assert "looped" not in ways(tiny.make_eagle3(target).float())


def test_requests_come_at_their_times_and_idle_time_is_skipped(target):
    """Far apart, requests meet an idle engine, and nobody waits for the clock on the wall."""
    methods = {"plain": ways(tiny.make_drafter(target).float(), {})["plain"]}
    (row,) = run_loads(target, methods, PROMPTS, [Load(2, arrival=0.001)], max_new_tokens=4)
    assert row["load"] == "0.001/s" and row["answers"] == 6
    assert row["tokens_per_second"] < 1 and row["wait_seconds"]["p95"] < 60


def test_a_failed_answer_is_counted_and_left_out(target):
    methods = {"plain": ways(tiny.make_drafter(target).float(), {})["plain"]}
    engine = load.SpeculativeEngine(target, *methods["plain"], max_rows=2)
    server = load.Server(engine, [[3, 4], [99]], Load(2), dict(max_new_tokens=4))
    while server.next():
        pass
    row = load.summary("plain", server)
    assert (row["answers"], row["failed"]) == (1, 1) and not math.isnan(row["user_tokens_per_second"])


def test_both_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from hf_dspark.evaluation.plots import save_loads

    rows = [
        dict(load=n, method=m, tokens_per_second=9.0, user_tokens_per_second=3.0, tau=2.0, verified=4.0)
        for n in ("1", "2") for m in ("plain", "auto")
    ]  # fmt: skip
    assert [p.name for p in save_loads(rows, tmp_path)] == ["load_frontier.png", "load_drafts.png"]
