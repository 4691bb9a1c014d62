"""`hf-dspark convert` and `hf-dspark card`, called as a user calls them."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import tiny
from golden import ROOT, drafter_folder, edited_drafter, load_drafter
from typer.testing import CliRunner

from hf_dspark.auto import AutoDrafter
from hf_dspark.cli.main import app


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def target_of(name):
    return ROOT / name / "target"


def test_convert_writes_a_servers_format(tmp_path):
    name = "zlab-dflash-b8"
    options = ("--to", "speculators", "--target", target_of(name), "--dtype", "bfloat16")
    result = call("convert", drafter_folder(name), tmp_path, *options)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash" and config["dtype"] == "bfloat16"
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target_of(name))


def test_convert_to_our_own_format_can_borrow_and_ship_code(tmp_path):
    name = "deepspec-dspark-vanilla"
    options = ("--to", "own", "--target", target_of(name), "--borrow", "--ship-code")
    result = call("convert", drafter_folder(name), tmp_path, *options)
    assert result.exit_code == 0 and "embed_tokens, lm_head" in result.output
    drafter = AutoDrafter.from_pretrained(tmp_path)
    assert not drafter.config.own_embedding and not drafter.config.own_head and (tmp_path / "drafter.py").exists()
    assert not {"embed_tokens.weight", "lm_head.weight"} & drafter.state_dict().keys()
    assert drafter.config.target_name == str(target_of(name))


def test_borrowing_keeps_what_differs_from_the_target(tmp_path):
    name = "deepspec-dspark-vanilla"
    folder = edited_drafter(tmp_path / "in", name, tensors=lambda t: t | {"lm_head.weight": t["lm_head.weight"] + 1})
    result = call("convert", folder, tmp_path / "out", "--to", "own", "--target", target_of(name), "--borrow")
    assert "embed_tokens" in result.output and "lm_head" not in result.output
    assert AutoDrafter.from_pretrained(tmp_path / "out").config.own_head


def test_convert_takes_facts_that_a_file_leaves_open(tmp_path):
    folder = edited_drafter(tmp_path / "in", "deepspec-dspark-vanilla", {"architectures": ["DFlashDraftModel"]})
    refused = call("convert", folder, tmp_path / "out", "--to", "deepspec")
    assert "doesn't say whether slot k" in refused.output
    result = call("convert", folder, tmp_path / "out", "--to", "deepspec", "--set", "sample_from_anchor=true")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]


def test_refusals_are_one_line_and_an_exit_code(tmp_path):
    result = call("convert", drafter_folder("deepspec-dflash"), tmp_path / "out", "--to", "zlab")
    assert (
        result.exit_code == 1
        and "can't be exported to 'zlab'" in result.output
        and "Instead, export to" in result.output
    )
    assert "--to own" in call("convert", drafter_folder("deepspec-dflash"), tmp_path, "--to", "zlab", "--borrow").output
    assert (
        "no fact=value"
        in call("convert", drafter_folder("deepspec-dflash"), tmp_path, "--to", "own", "--set", "x").output
    )


def test_card_is_written_from_the_shell(tmp_path):
    load_drafter("zlab-dflash-b8").save_pretrained(tmp_path)
    result = call("card", tmp_path, "--license", "apache-2.0")
    assert result.exit_code == 0 and "license: apache-2.0" in (tmp_path / "README.md").read_text()


def test_the_example_converts_and_drafts(monkeypatch, capsys, tmp_path):
    example = ROOT.parents[1] / "examples" / "convert_and_serve.py"
    monkeypatch.syspath_prepend(str(example.parent))
    monkeypatch.setattr("sys.argv", [str(example), "--tiny", "--out", str(tmp_path)])
    runpy.run_path(str(example), run_name="__main__")
    text = capsys.readouterr().out
    assert "Drafting works" in text and text.count("vllm serve") == 2 and "--speculative-algorithm DSPARK" in text


def test_a_process_of_its_own_writes_the_card_of_our_own_format(tmp_path, llama):
    """The command imports as little as it can, so nobody has registered our model types there."""
    tiny.make_drafter(llama.target).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "hf_dspark.cli.main", "card", str(tmp_path)]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "A DSpark drafter" in (tmp_path / "README.md").read_text(encoding="utf-8")
