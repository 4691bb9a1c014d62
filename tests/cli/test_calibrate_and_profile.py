"""`hf-dspark calibrate` and `profile` in-process on tiny models."""

import json

import pytest
import tiny_chat
from typer.testing import CliRunner

from hf_dspark.auto import AutoDrafter
from hf_dspark.cli import main
from hf_dspark.cli.profile import numbers
from hf_dspark.scheduling import CostTable


def call(*arguments):
    return CliRunner().invoke(main.app, [str(a) for a in arguments])


@pytest.fixture
def world(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in tiny_chat.PROMPTS))
    return *tiny_chat.save_world(tmp_path), tmp_path / "prompts.jsonl"


def test_temperatures_go_into_the_drafters_own_config_and_its_weights_stay(world, tmp_path):
    target, drafter, prompts = world
    weights = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    before = json.loads((tmp_path / "drafter" / "config.json").read_text())
    result = call(
        "calibrate", drafter, "--target", target, "--prompts", prompts, "--max-new-tokens", 12, "--min-labels", 1,
        "--temperature", 0, "--report", tmp_path / "report.json", "--plot", tmp_path / "plot.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "ECE % before" in result.output and "Temperatures:" in result.output
    after = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert len(after.pop("confidence_temperatures")) == 5
    assert after == {k: v for k, v in before.items() if k != "confidence_temperatures"}
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == weights
    assert AutoDrafter.from_pretrained(drafter).config.confidence_temperatures is not None
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run"]["environment"]["drafter_weights"] and len(report["after"]["ece"]) == 5
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_another_folder_gets_the_whole_drafter(world, tmp_path):
    target, drafter, prompts = world
    out, options = tmp_path / "calibrated", ["--max-new-tokens", 12, "--temperature", 0]
    result = call(
        "calibrate", drafter, "--target", target, "--prompts", prompts, "--min-labels", 25, "--out", out, *options
    )
    assert result.exit_code == 0 and "positions [5] had fewer than 25 labels" in result.output, result.output
    assert len(AutoDrafter.from_pretrained(out).config.confidence_temperatures) == 5


def test_without_labels_nothing_is_called_calibrated(world, tmp_path):
    target, drafter, prompts = world
    before = (tmp_path / "drafter" / "config.json").read_bytes()
    result = call("calibrate", drafter, "--target", target, "--prompts", prompts, "--max-new-tokens", 6)
    assert result.exit_code == 1 and "Nothing was calibrated and nothing stored" in result.output
    assert (tmp_path / "drafter" / "config.json").read_bytes() == before


def test_a_foreign_or_remote_drafter_is_not_changed_in_place(world, tmp_path):
    target, drafter, prompts = world
    (tmp_path / "drafter" / "config.json").write_text('{"architectures": ["Qwen3DSparkModel"]}')
    result = call("calibrate", drafter, "--target", target, "--prompts", prompts)
    assert result.exit_code == 1 and "--out FOLDER" in result.output


def test_a_profile_is_printed_and_stored(world, tmp_path):
    target, drafter, _ = world
    out = tmp_path / "costs.json"
    result = call("profile", drafter, "--target", target, "--rows", "1,2", "--widths", "1,4", "--contexts", "8",
                  "--repeats", 2, "--out", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "pays from tau" in result.output and CostTable.load(out).widths == (1, 4)
    assert numbers("3,1") == (3, 1)
    again = call("profile", drafter, "--target", target, "--out", out)
    assert again.exit_code == 0 and "read from" in again.output and "--again" in again.output
    assert "write them with commas" in call("profile", drafter, "--target", target, "--rows", "many").output
