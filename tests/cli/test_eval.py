"""`hf-dspark eval` in-process on tiny models."""

import io
import json

import pytest
import tiny_chat
from rich.console import Console
from typer.testing import CliRunner

from hf_dspark.cli import main
from hf_dspark.cli.eval import LEGEND, METHODS, hints, parse_loads, parse_setting, results_table


def call(*arguments):
    return CliRunner().invoke(main.app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    (folder / "words.jsonl").write_text("".join(json.dumps({"turns": [p, "w9"]}) + "\n" for p in tiny_chat.PROMPTS))
    return *tiny_chat.save_world(folder), folder / "words.jsonl"


def test_a_table_a_file_and_plots(world, tmp_path):
    target, drafter, prompts = world
    out = tmp_path / "eval.json"
    result = call(
        "eval", target, "--drafter", drafter, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 8, "--out", out,
        "--setting", "num_draft_tokens=2", "--setting", "verification=block", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    methods = ["plain", "lookup[tokens=5]", "own[num_draft_tokens=2]", "own[verification=block]"]
    assert [r["method"] for r in found["results"]] == methods
    assert [r["same_text"] for r in found["results"][1:]] == [1.0, 1.0, 1.0]
    run = found["run"]
    assert run["plan"]["max_new_tokens"] == 8 and run["plan"]["prompts"]["sets"] == {"words": 2}
    assert run["environment"]["threads"] >= 1 and run["files"]["words.jsonl"] and found["date"]
    assert max(len(r["conditional_acceptance"]) for r in found["results"] if "rounds" in r) == 5
    assert not list(tmp_path.glob("*.partial*"))
    drawn = {path.stem for path in (tmp_path / "plots").glob("*.png")}
    assert drawn == {"tau", "time_split", "conditional_acceptance", "threshold_sweep"}
    assert "words, temperature 0" in result.output and "Hint: 2 answers" in result.output


def test_a_table_of_everything_fits_100_columns_and_breaks_no_word():
    speed = {"ratio": 12.34, "low": 10.11, "high": 13.22}
    row = {
        "tau": 12.34,
        "accepted_per_round": 11.34,
        "acceptance_rate": 1.0,
        "tokens_per_second": 1234.5,
        "same_text": 1.0,
    }
    row |= {"split": {"draft": 0.1234, "verify": 0.2678, "rest": 0.00123}}
    row |= {"speedup_over_plain": speed, "speedup_over_lookup": {**speed, "low": 9.87}}
    names = ["plain", "own[max_draft_stages=16, loop_gate=-0.5]", "stock[num_draft_tokens=12]"]
    out = io.StringIO()
    Console(file=out, width=100).print(results_table([{**row, "method": name} for name in names], "set", 0.0))
    text = out.getvalue()
    numbers = ("(10.1-13.2)", "(9.87-13.2)", "123/268/1.23", "1234.5")
    for word in ("max_draft_stages=16", "loop_gate=-0.5]", "[num_draft_tokens=12]", *numbers):
        assert word in text
    columns = [line for line in text.splitlines() if "tok/s" in line][0].split()
    assert all(column.split()[-1] in LEGEND + METHODS or column == "method" for column in columns)


def test_results_that_exist_are_replaced_on_request_alone(world, tmp_path):
    target, _, prompts = world
    given = ["eval", target, "--prompts", prompts, "--methods", "plain", "--limit", 1, "--max-new-tokens", 3]
    given += ["--out", tmp_path / "new" / "eval.json"]
    assert call(*given).exit_code == 0
    assert "exists already" in call(*given).output and call(*given, "--overwrite").exit_code == 0


def test_copies_are_measured_alone_and_beside_the_drafter(world, tmp_path):
    target, drafter, prompts = world
    result = call(
        "eval", target, "--drafter", drafter, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 24, "--out",
        tmp_path / "eval.json", "--methods", "plain,lookup,copy,stock,own,own+copy",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = {r["method"]: r for r in json.loads((tmp_path / "eval.json").read_text())["results"]}
    assert list(found) == ["plain", "lookup[tokens=5]", "copy", "stock", "own", "own+copy"]
    assert all(r.get("same_text", 1.0) == 1.0 for r in found.values())
    assert found["own"]["sources"].keys() <= {"drafter", "none"}
    assert "drafter" not in found["copy"]["sources"] and not found["copy"]["conditional_acceptance"]
    for method in ("copy", "own+copy"):
        sources = found[method]["sources"]
        assert sum(s["rounds"] for s in sources.values()) == found[method]["rounds"]
        assert (f"words, 0, {method}: " in result.output.replace("\n", " ")) == ("copy" in sources)


def test_what_cannot_be_run_is_said(world):
    target, drafter, prompts = world
    assert "needs a drafter" in call("eval", target, "--prompts", prompts).output
    assert "--turns" in call("eval", target, "--prompts", prompts, "--drafter", drafter, "--turns", "last").output


def test_a_slow_drafter_and_few_answers_get_a_hint_each():
    def result(method, ratio=None, answers=12):
        return {"method": method, "answers": answers} | ({"speedup_over_plain": {"ratio": ratio}} if ratio else {})

    assert hints([result("plain"), result("lookup[tokens=5]", 0.9), result("own", 1.1)]) == []
    (slow,) = hints([result("plain"), result("own", 1.1), result("own[engine=own]", 0.9)])
    assert slow.startswith("own[engine=own] was slower") and "scheduler=auto" in slow
    (few,) = hints([result("plain", answers=3), result("own", 1.1, answers=3)])
    assert few.startswith("3 answers") and "10 prompts or more" in few


def test_settings_are_knobs_with_json_values():
    knobs = parse_setting("num_draft_tokens=3, loop_gate=-0.5 verification=block")
    assert knobs == {"num_draft_tokens": 3, "loop_gate": -0.5, "verification": "block"}
    with pytest.raises(ValueError, match="knob=value"):
        parse_setting("fast")
    for text, words in (
        ("draft_tokens=3", "did you mean 'num_draft_tokens'"),
        ("verification=guess", "'guess' is unknown"),
    ):
        with pytest.raises(ValueError, match=f"--setting {text!r}: .*{words}"):
            parse_setting(text)


def test_speed_under_load_is_a_table_a_file_and_two_plots(world, tmp_path):
    out = tmp_path / "load.json"
    target, drafter, prompts = world
    result = call(
        "eval", target, "--drafter", drafter, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 6, "--out", out,
        "--concurrency", "1,2", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["loads"]
    assert {(r["load"], r["method"]) for r in rows} >= {("1", "plain"), ("2", "auto")}
    assert len(list((tmp_path / "plots").iterdir())) == 2


@pytest.mark.parametrize("loads", [("0", None), ("a", None), ("1,2", "3"), (None, "-1")])
def test_loads_that_make_no_sense_are_refused(loads):
    with pytest.raises(ValueError, match="--concurrency"):
        parse_loads(*loads)
