"""The examples run with --tiny, say what they should, and stay short."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def call(name):
        monkeypatch.setattr(sys, "argv", [name, "--tiny"])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_the_quickstart_ends_with_the_text_of_plain_decoding(run):
    output = run("quickstart.py")
    assert "the same as without a drafter: True" in output and "tokens per forward of the target" in output


def test_a_chat_reads_only_what_is_new(run):
    output = run("batch_and_chat.py")
    assert output.count("tokens per forward]") == 6
    assert "[read 23 of 23 tokens" in output and "[read 16 of 50 tokens" in output


@pytest.mark.parametrize("name", ["quickstart.py", "batch_and_chat.py", "calibrate_and_schedule.py"])
def test_examples_to_read_first_are_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 80


def test_every_gate_leaves_the_text_as_it_is(run):
    output = run("dloop.py")
    assert "same text with every gate: True" in output and output.count("verifications") == 4


def test_schedules_are_compared_by_batch_size(run):
    lines = run("calibrate_and_schedule.py").splitlines()
    assert "temperatures" in lines[0] and len([line for line in lines if line.count("|") == 5]) == 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_under_80_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_say_what_to_give_them_and_take_the_demos_model(path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for given, words in (([], "or pass --tiny"), (["--help"], "smollm2")):
        monkeypatch.setattr(sys, "argv", [path.name, *given])
        with pytest.raises(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
        output = capsys.readouterr()
        assert words in output.out + output.err


def test_heads_inside_a_target_draft_for_a_batch(run):
    output = run("heads.py")
    assert output.count("the same as without a drafter: True") == 2 and "batch of 3" in output
