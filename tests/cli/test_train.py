"""`hf-dspark data` and `train` in-process on tiny models, one after the other as a user would."""

import json
import os
import signal
from dataclasses import fields

import pytest
import tiny_chat
import torch
from typer.testing import CliRunner

from hf_dspark.auto import AutoDrafter
from hf_dspark.cli import main
from hf_dspark.cli.train_options import make_parser, parse
from hf_dspark.training import DrafterTrainingArguments
from hf_dspark.training.data import template_hash


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    target, drafter = tiny_chat.save_world(folder)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"turns": [p, "w9 w8"]}) + "\n" for p in tiny_chat.PROMPTS)
    )
    return folder, target, drafter


def call(*arguments):
    result = CliRunner().invoke(main.app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments, code=1):
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], terminal_width=1000)
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


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
    assert "(max_new_tokens: 12 there, 13 here): give the same settings" in refused(*arguments, 13)
    (folder / "foreign.jsonl").write_text("{}\n")
    foreign = ["data", "generate", target, "--prompts", folder / "prompts.jsonl", "--out", folder / "foreign.jsonl"]
    assert "no foreign.settings.json beside it says how it was made" in refused(*foreign)
    assert "is a folder" in refused(*foreign[:-1], folder)


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
    common = [
        "train",
        target,
        "--data",
        data,
        "--eval-data",
        data,
        "--mask-token-id",
        60,
        "--block-size",
        3,
        "--max-steps",
        3,
    ]
    common += [
        "--markov-rank",
        4,
        "--draft-vocab-size",
        40,
        "--layer-ids",
        "0,1",
        "--loop-exposure",
        2,
        "--device",
        "cpu",
    ]
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
    assert (
        type(chain).__name__ == "Eagle3Drafter"
        and chain.config.chain_length == 3
        and chain.config.draft_vocab_size == 40
    )
    assert "invalid choice: 'other'" in refused(*common, "--output", folder / "no", "--method", "other", code=2)
    before = AutoDrafter.from_pretrained(str(out / "final" / "dspark")).fc.weight
    call(*common, "--output", folder / "fifth", "--init-from", out / "final" / "dspark", "--learning-rate", 0)
    assert torch.equal(AutoDrafter.from_pretrained(str(folder / "fifth" / "final")).fc.weight, before)
    start = AutoDrafter.from_pretrained(str(folder / "fourth" / "final")).fc.weight
    eagle = [*common, "--method", "eagle3", "--init-from"]
    call(*eagle, folder / "fourth" / "final", "--output", folder / "sixth", "--learning-rate", 0)
    assert torch.equal(AutoDrafter.from_pretrained(str(folder / "sixth" / "final")).fc.weight, start)
    assert "--init-from target was given with --method eagle3" in refused(*eagle, "target", "--output", folder / "no")
    starts = {"head": [], "head2": ["--init-from", "target"], "head3": ["--init-from", folder / "head" / "final"]}
    for name, start in starts.items():
        call(*common, "--output", folder / name, "--method", "mtp", *start)
        heads = AutoDrafter.from_pretrained(str(folder / name / "final"))
        assert (
            type(heads).__name__ == "MTPDrafter"
            and heads.config.chain_length == 3
            and heads.config.target_name == target
        )


@pytest.fixture
def short(world, data):
    """The command of a run of three steps, with a checkpoint at each, but for its --output."""
    common = ["train", world[1], "--data", data, "--mask-token-id", 60, "--block-size", 3, "--markov-rank", 4]
    common += ["--layer-ids", "0,1", "--max-steps", 3, "--device", "cpu", "--num-anchors", 4]
    return [*common, "--save-steps", 1, "--output"]


def test_a_run_is_never_destroyed_unasked(tmp_path, short):
    out = tmp_path / "run"
    call(*short, out)
    assert (out / "final" / "config.json").exists()
    call("card", out / "final")
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "holds a run (checkpoint-2, checkpoint-3, final): continue it with --resume" in refused(*short, out)
    assert "give one of them" in refused(*short, out, "--resume", "--overwrite")
    assert "finished, so there is nothing to train" in call(*short, out, "--resume")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    assert "Out of date" not in (out / "final" / "README.md").read_text()

    at = short.index("--mask-token-id")
    refused(*short[: at + 1], 61, *short[at + 2 :], out, "--overwrite")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    (out / "final" / "evaluation.json").write_text("{}")
    shown = call(*short, out, "--overwrite", "--seed", 1)
    assert "was written for other weights" in shown and "Out of date" in (out / "final" / "README.md").read_text()
    assert not (out / "final" / "evaluation.json").exists()
    call("card", out / "final")
    assert "Out of date" not in (out / "final" / "README.md").read_text()
    (tmp_path / "file").write_text("")
    assert "is a file: name a folder" in refused(*short, tmp_path / "file")


def test_ctrl_c_ends_a_run_after_a_step_and_resume_goes_on(tmp_path, short, monkeypatch):
    from hf_dspark.training import DrafterTrainer

    step = DrafterTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(DrafterTrainer, "training_step", interrupted)
        assert "Stopped at step 2. Go on with --resume" in refused(*short, tmp_path, code=130)
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "final").exists() and (tmp_path / "checkpoint-2").exists()
    call(*short, tmp_path, "--resume")
    assert json.loads((tmp_path / "final" / "run.json").read_text())["steps"] == 3


def test_ctrl_c_ends_answering_with_what_is_there(tmp_path, world, monkeypatch):
    from hf_dspark.training.generation import GenerateAnswers

    answer = GenerateAnswers._answer

    def interrupted(self, batch):
        yield from answer(self, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(GenerateAnswers, "_answer", interrupted)
    command = ["data", "generate", world[1], "--prompts", world[0] / "prompts.jsonl", "--out", tmp_path / "a.jsonl"]
    shown = refused(*command, "--max-new-tokens", 4, code=130)
    count = len((tmp_path / "a.jsonl").read_text().splitlines())
    assert count and f"Stopped after {count} answers. The same command continues from there." in shown


def test_a_mask_token_is_checked_against_the_data_and_unused_ids_are_named(tmp_path, short, data):
    used = json.loads(data.read_text().splitlines()[0])["input_ids"][0]
    at = short.index("--mask-token-id")
    message = refused(*short[: at + 1], used, *short[at + 2 :], tmp_path / "a")
    assert f"mask_token_id={used} (w{used}) occurs" in message
    assert "was named: pass --mask-token-id" in refused(*short[:at], *short[at + 2 :], tmp_path / "b")
    assert "is outside the vocabulary of 61" in refused(*short[: at + 1], 61, *short[at + 2 :], tmp_path / "c")
    assert "is the ordinary token 'w60'" in call(*short, tmp_path / "d")


BROKEN = {
    '{"input_ids": [3, 4]': "line 3 is no JSON",
    "[3, 4]": "line 3 is a list: give one JSON object a line",
    '{"turns": ["w3"]}': "line 3 is a prompt without an answer, and a drafter learns from answers",
    '{"input_ids": [3, 4]}': "line 3: A data row has input_ids but neither prompt_len nor labels",
    '{"input_ids": "w3", "prompt_len": 1}': "line 3: A data row's input_ids must be a list of token ids",
    '{"text": "w3"}': "line 3: A data row has the fields ['text'], which give no tokens",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, short, line):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"input_ids": [3, 4, 5], "prompt_len": 1}\n\n' + line + "\n")
    at = short.index("--data")
    shown = refused(*short[: at + 1], path, *short[at + 2 :], tmp_path / "run")
    assert f"{path}, {BROKEN[line]}" in shown


def test_every_training_argument_is_an_option_and_none_is_declared_twice():
    options = make_parser()._option_string_actions
    for field in fields(DrafterTrainingArguments):
        if field.init:
            assert options["--" + field.name.replace("_", "-")].dest == field.name
    own = {a.dest for a in make_parser()._action_groups[-1]._group_actions}
    assert not own & {f.name for f in fields(DrafterTrainingArguments)}


def test_a_yaml_file_gives_options_and_the_command_line_wins(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"target: tiny\ndata: {path}\noutput: {tmp_path}\nmax_steps: 5\nbatch-size: 2\nmethod: [dspark, dflash]\nbf16: "
        "false\n"
        "pack: true\nthinking: false\nlr_scheduler_kwargs: {num_cycles: 2}\nlr_scheduler_type: cosine_with_restarts\n"
        "layer-ids: 0,1\nsave_steps: 7\ndevice: cpu\n"
    )
    given, arguments = parse(["--config", str(path), "--max-steps", "9", "--report-to", "none"])
    assert given.target == "tiny" and given.method == ["dspark", "dflash"] and given.thinking is False
    assert (
        arguments.max_steps == 9
        and arguments.per_device_train_batch_size == 2
        and arguments.pack
        and not arguments.bf16
    )
    assert arguments.lr_scheduler_kwargs == {"num_cycles": 2} and arguments.learning_rate == 6e-4
    given, _ = parse(["other", "--config", str(path), "--method", "eagle3", "--thinking"])
    assert given.target == "other" and given.method == ["eagle3"] and given.thinking is True
    path.write_text("max_stepz: 3\n")
    assert "--max-stepz=3" in refused("train", "tiny", "--config", path, code=2)
    path.write_text("- a\n")
    assert "holds a list" in refused("train", "tiny", "--config", path, code=2)
    assert "--data, --output must be given" in refused("train", "tiny", code=2)
    missing = refused("train", "tiny", "--data", path, "--output", tmp_path / "x", "--device", "cuda:7", code=2)
    assert "accelerate found cpu" in missing


def test_publishing_uploads_the_drafter_with_its_card(tmp_path, short, monkeypatch):
    import huggingface_hub

    seen = {}

    class Api:
        def __init__(self, token=None):
            seen["token"] = token

        def create_repo(self, name, private, exist_ok):
            seen.update(name=name, private=private)
            return type("Repo", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, repo_id, folder_path, revision):
            seen.update(repo=repo_id, files=sorted(p.name for p in folder_path.iterdir()))
            return "https://hub/me/mine"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    publish = ["--push-to-hub", "--hub-model-id", "mine", "--hub-token", "secret"]
    assert "Published: https://hub/me/mine" in call(*short, tmp_path / "run", *publish)
    assert seen["repo"] == "me/mine" and {"README.md", "config.json", "model.safetensors"} <= set(seen["files"])
    assert "publishes one drafter" in refused(
        *short, tmp_path / "two", *publish, "--method", "dspark", "--method", "dflash"
    )
