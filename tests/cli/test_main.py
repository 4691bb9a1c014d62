"""The command line as a whole: every command is listed without importing it, and errors are sentences."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dspark.cli import main


def call(*arguments):
    return CliRunner().invoke(main.app, list(arguments))


def test_help_lists_every_command_and_imports_none(monkeypatch):
    monkeypatch.setattr(main, "import_module", lambda name: pytest.fail(f"imported {name}"))
    result = call("--help")
    assert result.exit_code == 0 and all(name in result.output for name in main.COMMANDS)
    assert "from ." not in Path(main.__file__).read_text()


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_explains_itself(name):
    result = call(name, "--help")
    assert result.exit_code == 0 and f"hf-dspark {name}" in result.output
    assert "--install" not in result.output
    assert re.search(r"Usage:.*?\n\s*\n\s*[A-Z][a-z]+ .*[a-z]", result.output, re.S), "a sentence says what it does"


def test_an_error_is_a_sentence_and_a_traceback_only_on_request():
    short = call("generate", "nowhere")
    assert short.exit_code == 1 and "Give either PROMPT or --batch-file" in short.output
    assert isinstance(short.exception, SystemExit)
    assert isinstance(call("--debug", "generate", "nowhere").exception, ValueError)


WITH_A_DRAFTER = [
    ["generate", "no-target", "text", "--drafter"],
    ["eval", "no-target", "--prompts", __file__, "--drafter"],
    ["data", "generate", "no-target", "--prompts", __file__, "--out", "y", "--drafter"],
    ["train", "no-target", "--data", __file__, "--output", "y", "--init-from"],
    ["calibrate", "--target", "no-target", "--prompts", __file__],
    ["profile", "--target", "no-target"],
    ["inspect", "--target", "no-target"],
    ["convert", "--target", "no-target", "--to", "own"],
    ["demo", "--drafter"],
]


@pytest.mark.parametrize("arguments", WITH_A_DRAFTER, ids=lambda a: a[0])
def test_a_drafter_that_is_not_there_is_refused_before_a_target_is_loaded(arguments):
    result = call(*arguments, "./nowhere", *(["folder"] if arguments[0] == "convert" else []))
    assert result.exit_code == 1 and "./nowhere was given as a drafter, and there is no such folder" in result.output


NO_FILE = [
    ["generate", "no-target", "--out", "y", "--batch-file"],
    ["eval", "no-target", "--prompts"],
    ["data", "generate", "no-target", "--out", "y", "--prompts"],
    ["train", "no-target", "--output", "y", "--data"],
    ["train", "no-target", "--output", "y", "--data", __file__, "--eval-data"],
    ["calibrate", "owner/drafter", "--target", "no-target", "--prompts"],
    ["inspect", "owner/drafter", "--target", "no-target", "--prompts"],
    ["data", "stats"],
]


@pytest.mark.parametrize("arguments", NO_FILE, ids=lambda a: "-".join((a[0], a[-1].strip("-"))))
def test_a_file_that_is_not_there_is_refused_before_anything_is_loaded(arguments):
    result = call(*arguments, "no.jsonl")
    assert result.exit_code == 2 and "'no.jsonl'" in result.output and "exist" in result.output


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--loop-gate", "often"], "loop_gate='often' is unknown: set a log-probability"),
        (["--verification", "guess"], "verification='guess' is unknown"),
        (["--num-draft-tokens", "-2"], "num_draft_tokens=-2 is negative"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_a_knob_that_cannot_be_is_refused_before_anything_is_loaded(option, words):
    assert words in call("generate", "no-target", "text", *option).output


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
