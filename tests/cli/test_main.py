"""The command line as a whole: every command is listed without importing it, and errors are sentences."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dspark.cli import main

ROOT = Path(__file__).parents[2]


def call(*arguments):
    return CliRunner().invoke(main.app, list(arguments))


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys; from typer.testing import CliRunner; from hf_dspark.cli import main; "
        "print(CliRunner().invoke(main.app, ['--help']).output); "
        "print([m for m in sys.modules if m.startswith('hf_dspark.cli.')])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert all(name in result.stdout for name in main.COMMANDS), result.stderr
    assert result.stdout.splitlines()[-1] == "['hf_dspark.cli.main']"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_explains_itself(name):
    result = call(name, "--help")
    assert result.exit_code == 0 and f"hf-dspark {name}" in result.output


def test_an_error_is_a_sentence_and_a_traceback_only_on_request():
    short = call("generate", "nowhere")
    assert short.exit_code == 1 and "Give either PROMPT or --batch-file" in short.output
    assert isinstance(short.exception, SystemExit)
    assert isinstance(call("--debug", "generate", "nowhere").exception, ValueError)


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
