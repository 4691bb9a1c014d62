"""`hf-dspark inspect` in-process on tiny models."""

import pytest
import tiny
import tiny_chat
from typer.testing import CliRunner

from hf_dspark.cli import inspect, main


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    target, drafter, _ = tiny_chat.trained()
    target.save_pretrained(folder / "target")
    tiny_chat.make_tokenizer().save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    return folder / "target", folder / "drafter"


@pytest.fixture(autouse=True)
def prompts(monkeypatch):
    words = [" ".join(f"w{i}" for i in p) for p in tiny_chat.trained().prompts]
    monkeypatch.setattr(inspect, "PROMPTS", tuple(words))


def call(*arguments):
    return CliRunner().invoke(main.app, ["inspect", *map(str, arguments)])


def test_a_drafter_is_described_without_a_target(world):
    result = call(world[1])
    assert result.exit_code == 0
    for words in ("DSparkDrafter", "sample from anchor: True", "fc.weight", "layers.0.mlp.up_proj.weight", "borrowed"):
        assert words in result.output
    assert "doesn't say: trained_length" in result.output


def test_a_fitting_drafter_is_checked_and_found_exact(world, monkeypatch):
    seen, whole = [], inspect.progress
    monkeypatch.setattr(inspect, "progress", lambda: seen.append(whole()) or seen[-1])
    result = call(
        world[1], "--target", world[0], "--no-chat", "--check", "--max-new-tokens", 30, "--limit", 2, "--no-tensors"
    )
    assert result.exit_code == 0, result.output
    assert "As loaded, the drafter fits" in result.output and "Exact: all 60 tokens" in result.output
    assert seen[0].tasks[0].completed == seen[0].tasks[0].total == 2
    assert "fc.weight" not in result.output


def test_a_drafter_read_wrongly_ends_with_an_error_code_and_the_remedy(world):
    options = ["--target", world[0], "--no-chat", "--max-new-tokens", 30, "--limit", 2]
    result = call(world[1], *options, "--override", "target_layer_ids=[1, 2]")
    assert result.exit_code == 1 and "pass target_layer_ids=[0, 1]" in result.output


def test_what_makes_no_sense_is_refused(world):
    assert "add --target" in call(world[1], "--check").output
    assert "FIELD=VALUE" in call(world[1], "--override", "fast").output
    unknown = call(world[1], "--override", "blok_size=3")
    assert isinstance(unknown.exception, SystemExit) and "did you mean 'block_size'" in unknown.output


def test_heads_inside_a_target_are_described_and_checked(tmp_path):
    from tiny_heads import save_carrier

    save_carrier("glm, one head", tmp_path, vocab=tiny.V)
    tiny_chat.make_tokenizer().save_pretrained(tmp_path)
    options = ["--target", tmp_path, "--no-chat", "--check", "--max-new-tokens", 12, "--dtype", "float32"]
    result = call("heads", *options)
    assert "MTPDrafter" in result.output and "Exact: all" in result.output, result.output
    assert "layers.0.block.mlp.experts.gate_up_proj" in result.output
    assert "pass --target" in call("heads").output
