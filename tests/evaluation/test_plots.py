"""Every plot draws what its results say, and a missing matplotlib is named."""

import builtins

import pytest

from hf_dspark.evaluation import plots

SPLIT = {"draft_seconds": 0.001, "verify_seconds": 0.01, "overhead_seconds": 0.002}
RESULTS = [
    {"set": "math", "method": "plain", "temperature": 0.0, "tau": 1.0},
    {"set": "all", "method": "plain", "temperature": 0.0, "tau": 1.0},
    {"set": "math", "method": "own", "temperature": 0.0, "tau": 2.5, "conditional_acceptance": [0.9, 0.8], "split": SPLIT},
    {
        "set": "all", "method": "own", "temperature": 0.0, "tau": 2.0, "conditional_acceptance": [0.7, 0.5], "split": SPLIT,
        "by_stages": {1: {"token_share": 0.25}, 2: {"token_share": 0.75}},
        "gate": {1: {"scores": [-0.1, -2.0, -0.2], "full": [True, False, True]}},
    },
]  # fmt: skip


def test_conditional_acceptance_is_drawn_for_all_sets_together():
    (line,) = plots.conditional_acceptance(RESULTS).axes[0].lines
    assert list(line.get_xdata()) == [1, 2] and list(line.get_ydata()) == [0.7, 0.5]


def test_tau_has_a_bar_per_set_and_method():
    bars = [round(p.get_height(), 3) for p in plots.tau_by_set(RESULTS).axes[0].patches]
    assert bars == [1.0, 1.0, 2.5, 2.0]


def test_time_is_stacked_in_milliseconds():
    axes = plots.time_split(RESULTS).axes[0]
    assert [(p.get_y(), p.get_height()) for p in axes.patches] == [(0.0, 1.0), (1.0, 10.0), (11.0, 2.0)]


def test_stages_and_gate_scores_are_drawn():
    (line,) = plots.stages(RESULTS).axes[0].lines
    assert list(line.get_ydata()) == [0.25, 0.75]
    assert [t.get_text() for t in plots.gate_scores(RESULTS).legends[0].get_texts()] == [
        "own, T = 0, whole",
        "own, T = 0, not whole",
    ]


def test_reliability_leaves_empty_bins_out():
    bins = {"prediction": [0.1, float("nan"), 0.9], "label": [0.2, float("nan"), 0.8], "count": [5, 0, 7]}
    _, before = plots.reliability(bins).axes[0].lines
    assert list(before.get_xdata()) == [0.1, 0.9] and list(before.get_ydata()) == [0.2, 0.8]


def test_all_plots_are_saved_and_looping_ones_only_with_looping(tmp_path):
    drawn = {"conditional_acceptance", "tau", "time_split"}
    assert {p.stem for p in plots.save_all(RESULTS, tmp_path)} == drawn | {"stages", "gate"}
    assert {p.stem for p in plots.save_all(RESULTS[2:3], tmp_path / "b")} == drawn
    assert {p.stem for p in plots.save_all(RESULTS[:2], tmp_path / "c")} == {"tau"}
    assert all(p.stat().st_size > 1000 for p in tmp_path.glob("*.png"))


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("no", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"hf-dspark\[plots\]"):
        plots.tau_by_set(RESULTS)
