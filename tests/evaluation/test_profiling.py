"""Profiles of real (tiny) models: the grid that was asked for, measured through decoding's own code, and cached."""

import pytest
import tiny
import torch

from hf_dspark.decoding.costs import profile_path
from hf_dspark.evaluation import profiling
from hf_dspark.evaluation.profiling import _Bench, cached_profile, profile_pair
from hf_dspark.scheduling import CostTable

GRID = dict(rows=(1, 2), widths=(1, 3), contexts=(8,), repeats=2, warmup=1)


@pytest.fixture(scope="module")
def pair():
    target = tiny.make_target(**tiny.TARGETS["llama"][2])
    return target, tiny.make_drafter(target)


def test_a_table_holds_a_time_for_every_point(pair):
    done = []
    table = profile_pair(*pair, **GRID, progress=lambda i, n: done.append((i, n)))
    assert (table.rows, table.contexts, table.widths) == ((1, 2), (8,), (1, 3))
    assert all(t > 0 for row in table.verify for c in row for t in c) and all(t > 0 for row in table.draft for t in row)
    assert done == [(i, 6) for i in range(6)] and table.key["dtype"] == "float64"
    assert not any(m._forward_hooks for m in pair[0].modules())


def test_recursive_drafters_and_none_are_profiled_as_well(pair):
    target = pair[0]
    assert all(t > 0 for (t,) in profile_pair(target, tiny.make_eagle3(target), **GRID).draft)
    assert profile_pair(target, **GRID).draft == ((0.0,), (0.0,))


def test_measuring_does_what_decoding_does_and_changes_nothing(pair):
    """A verification equals a plain forward over context and tokens, again and again, as the caches stay as they
    were."""
    target, drafter = pair
    with profiling.FeatureTap(target, drafter.config.target_layer_ids) as tap, torch.no_grad():
        bench = _Bench(profiling.Target(target, tap), drafter, rows=2, context=8)
        before = bench.cache.lengths.clone(), bench.proposer.cache.lengths.clone()
        for _ in range(2):
            bench.draft()
            bench.verify(3)
            seen = tap.captured[1]
            for i, n in enumerate((8, 7)):  # as after a round, rows differ in length
                text = torch.cat([bench.ids[i : i + 1, :n], bench.ids[i : i + 1, -1:].expand(-1, 3)], 1)
                assert torch.allclose(seen[i], target(text, output_hidden_states=True).hidden_states[2][0, n:])
        assert torch.equal(bench.cache.lengths, before[0]) and torch.equal(bench.proposer.cache.lengths, before[1])


def test_a_profile_is_measured_once_and_lies_where_the_scheduler_looks(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path))
    table, path = cached_profile(*pair, **GRID)
    assert path == profile_path(pair[1], pair[0]) and CostTable.load(path) == table
    monkeypatch.setattr(profiling, "profile_pair", lambda *args, **kwargs: pytest.fail("measured again"))
    assert cached_profile(*pair, **GRID)[0] == table


def test_a_profile_of_another_machine_is_refused(pair, tmp_path, monkeypatch):
    _, path = cached_profile(*pair, tmp_path / "a" / "table.json", **GRID)
    monkeypatch.setattr(profiling.torch, "get_num_threads", lambda: 99)
    monkeypatch.setattr("hf_dspark.scheduling.cost.torch.get_num_threads", lambda: 99)
    with pytest.raises(ValueError, match="profile"):
        cached_profile(*pair, path, **GRID)
