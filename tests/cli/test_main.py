"""The command line as a whole: every command is listed without importing it, and errors are sentences."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import hf_dspark
from hf_dspark.cli import main

ROOT = Path(__file__).parents[2]


def call(*arguments):
    return CliRunner().invoke(main.app, list(arguments))


def test_help_lists_every_command_and_imports_none(monkeypatch):
    monkeypatch.setattr(main, "import_module", lambda name: pytest.fail(f"imported {name}"))
    result = call("--help")
    assert result.exit_code == 0 and all(name in result.output for name in main.COMMANDS)
    assert "from ." not in Path(main.__file__).read_text()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["eval", "owner/t", "--no-such"]]
)
def test_help_and_usage_errors_need_no_torch(arguments):
    code = "import sys; from hf_dspark.cli.main import main; sys.modules['torch'] = sys.modules['transformers'] = None; main()"
    code = f"import sys; sys.argv[0] = 'bin/hf-dspark'; {code}"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == (2 if "--no-such" in arguments else 0), result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_names_what_a_report_of_a_fault_needs():
    output = call("--version").output
    assert f"hf-dspark {hf_dspark.__version__}" in output and f"torch {torch.__version__}" in output
    assert f"transformers {transformers.__version__}" in output


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_explains_itself(name):
    result = call(name, "--help")
    assert result.exit_code == 0 and f"hf-dspark {name}" in result.output
    assert "--install" not in result.output
    assert re.search(r"Usage:.*?\n\s*\n\s*[A-Z][a-z]+ .*[a-z]", result.output, re.S), "a sentence says what it does"


def test_an_error_is_a_sentence_and_a_traceback_only_on_request():
    short = call("generate", "owner/nowhere", "")
    assert short.exit_code == 1 and "PROMPT is empty" in short.output
    assert isinstance(short.exception, SystemExit)
    assert isinstance(call("--debug", "generate", "owner/nowhere", "").exception, ValueError)


WITH_A_DRAFTER = [
    ["generate", "owner/no-target", "text", "--drafter"],
    ["eval", "owner/no-target", "--prompts", __file__, "--drafter"],
    ["data", "generate", "owner/no-target", "--prompts", __file__, "--out", "y", "--drafter"],
    ["train", "owner/no-target", "--data", __file__, "--output", "y", "--init-from"],
    ["calibrate", "--target", "owner/no-target", "--prompts", __file__],
    ["profile", "--target", "owner/no-target"],
    ["inspect", "--target", "owner/no-target"],
    ["convert", "--target", "owner/no-target", "--to", "own"],
    ["demo", "--drafter"],
]


@pytest.mark.parametrize("arguments", WITH_A_DRAFTER, ids=lambda a: a[0])
def test_a_drafter_that_is_not_there_is_refused_before_a_target_is_loaded(arguments):
    result = call(*arguments, "./nowhere", *(["folder"] if arguments[0] == "convert" else []))
    assert result.exit_code == 1 and "./nowhere was given as a drafter, and there is no such folder" in result.output


NO_FILE = [
    ["generate", "owner/no-target", "--out", "y", "--batch-file"],
    ["eval", "owner/no-target", "--prompts"],
    ["data", "generate", "owner/no-target", "--out", "y", "--prompts"],
    ["train", "owner/no-target", "--output", "y", "--data"],
    ["train", "owner/no-target", "--output", "y", "--data", __file__, "--eval-data"],
    ["calibrate", "owner/drafter", "--target", "owner/no-target", "--prompts"],
    ["inspect", "owner/drafter", "--target", "owner/no-target", "--prompts"],
    ["data", "stats"],
]


@pytest.mark.parametrize("arguments", NO_FILE, ids=lambda a: "-".join((a[0], a[-1].strip("-"))))
def test_a_file_that_is_not_there_is_refused_before_anything_is_loaded(arguments):
    result = call(*arguments, "no.jsonl")
    assert result.exit_code == 2 and "'no.jsonl'" in result.output and "exist" in result.output


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--loop-gate", "often"], "loop_gate='often' is no number: set a log-probability"),
        (["--verification", "guess"], "verification='guess' is unknown"),
        (["--loop-gate", "nan"], "loop_gate=nan is no number"),
        (["--engine", "fast"], "engine='fast' is unknown"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_a_knob_that_cannot_be_is_refused_before_anything_is_loaded(option, words):
    assert words in call("generate", "owner/no-target", "text", *option).output


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'datasets'", name="datasets")

    monkeypatch.setattr(main, "import_module", broken)
    result = call("train")
    assert result.exit_code == 1 and 'pip install "hf-dspark[train]"' in result.output
    assert "pip install datasets" in call("card").output


def test_a_wrong_option_is_a_usage_error():
    result = call("generate", "--no-such-option")
    assert result.exit_code == 2
