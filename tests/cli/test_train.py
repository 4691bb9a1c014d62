"""`hf-dspark data` and `train` in-process on tiny models, one after the other as a user would."""

import json

import pytest
import tiny_chat
from typer.testing import CliRunner

from hf_dspark.auto import AutoDrafter
from hf_dspark.cli import main
from hf_dspark.training.data import template_hash


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    target, drafter = tiny_chat.save_world(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [p, "w9 w8"]}) + "\n" for p in tiny_chat.PROMPTS))
    return folder, target, drafter


def call(*arguments):
    result = CliRunner().invoke(main.app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def data(world):
    folder, target, drafter = world
    out = folder / "data.jsonl"
    call("data", "generate", target, "--prompts", folder / "prompts.jsonl", "--out", out, "--max-new-tokens", 12)
    return out


def test_generating_resumes_and_keeps_to_its_settings(world, data):
    folder, target, _ = world
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert [(r["prompt_id"], r["turn"]) for r in rows][:4] != [] and len(rows) == 8
    second = next(r for r in rows if r["turn"] == 1 and r["prompt_id"] == 0)
    first = next(r for r in rows if r["turn"] == 0 and r["prompt_id"] == 0)
    assert second["messages"][:2] == first["messages"] and second["messages"][2]["content"] == "w9 w8"
    settings = json.loads(data.with_suffix(".settings.json").read_text())
    assert settings["max_new_tokens"] == 12 and settings["template_hash"] == template_hash(tiny_chat.make_tokenizer())

    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join(lines[:5]) + lines[5][:20])  # as if killed while writing
    arguments = ["data", "generate", target, "--prompts", folder / "prompts.jsonl", "--out", data, "--max-new-tokens"]
    call(*arguments, 12)
    again = [json.loads(line) for line in data.read_text().splitlines()]
    assert sorted(map(json.dumps, again)) == sorted(map(json.dumps, rows))
    refused = CliRunner().invoke(main.app, [str(a) for a in [*arguments, 13]])
    assert refused.exit_code == 1 and "same settings" in refused.output


def test_preview_colours_what_is_supervised_and_stats_count_it(world, data):
    _, target, _ = world
    row = json.loads(data.read_text().splitlines()[0])
    shown = call("data", "preview", data, target, "--count", 1)
    total, prompt = len(row["input_ids"]), row["prompt_len"]
    assert f"{total - prompt} of {total} tokens supervised" in shown
    assert tiny_chat.make_tokenizer().decode(row["input_ids"][:prompt]) in shown.replace("\n", " ")
    counted = call("data", "stats", data)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert str(sum(len(r["input_ids"]) - r["prompt_len"] for r in rows)) in counted and "1.0000" in counted


def test_training_writes_drafters_that_load_and_draft(world, data):
    folder, target, drafter = world
    common = ["train", target, "--data", data, "--eval-data", data, "--mask-token-id", 60, "--block-size", 3, "--max-steps", 3]
    common += ["--markov-rank", 4, "--draft-vocab-size", 40, "--layer-ids", "0,1", "--loop-exposure", 2, "--device", "cpu"]
    common += ["--decode-prompts", 2, "--decode-tokens", 6]
    out = folder / "run"
    call(*common, "--output", out, "--method", "dspark", "--method", "dflash", "--eval-steps", 2, "--no-thinking")
    history = json.loads((out / "final" / "trainer_state.json").read_text())["log_history"]
    assert any("eval_dflash_decode_tau" in entry and "eval_dspark_tau" in entry for entry in history)
    assert (out / "final" / "training.png").stat().st_size > 1000
    for name in ("dspark", "dflash"):
        loaded = AutoDrafter.from_pretrained(str(out / "final" / name))
        assert loaded.config.template_hash == template_hash(tiny_chat.make_tokenizer())
        assert loaded.config.enable_thinking is False and loaded.config.loop_exposure == 2
        assert loaded.config.target_name == target and loaded.config.draft_vocab_size == 40
        record = json.loads((out / "final" / name / "run.json").read_text())
        assert record["steps"] == 3 and record["examples"] == 8 and record["tokens"] > 50 and record["hours"] >= 0
    generate = ["generate", target, "w3 w4", "--drafter", out / "final" / "dspark", "--max-new-tokens", 6]
    assert "trained with thinking off" in call(*generate, "--thinking")
    assert "Warning" not in call(*generate, "--no-thinking")

    call(*common, "--output", folder / "second", "--init-from", out / "final" / "dspark")
    call(*common, "--output", folder / "third", "--init-from", "target", "--method", "domino")
    call(*common, "--output", folder / "fourth", "--method", "eagle3")
    chain = AutoDrafter.from_pretrained(str(folder / "fourth" / "final"))
    assert type(chain).__name__ == "Eagle3Drafter" and chain.config.chain_length == 3 and chain.config.draft_vocab_size == 40
    starts = {"fifth": [], "sixth": ["--init-from", "target"], "seventh": ["--init-from", folder / "fifth" / "final"]}
    for name, start in starts.items():
        call(*common, "--output", folder / name, "--method", "mtp", *start)
        heads = AutoDrafter.from_pretrained(str(folder / name / "final"))
        assert type(heads).__name__ == "MTPDrafter" and heads.config.chain_length == 3 and heads.config.target_name == target
    refused = CliRunner().invoke(main.app, [str(a) for a in [*common, "--output", folder / "no", "--method", "other"]])
    assert refused.exit_code == 1 and "unknown" in refused.output
