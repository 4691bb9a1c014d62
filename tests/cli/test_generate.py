"""`hf-dspark generate` and `demo` in-process on tiny models."""

import json

import pytest
import tiny
import tiny_chat
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_dspark
from hf_dspark.auto import AutoDrafter
from hf_dspark.cli import demo, main, shared
from hf_dspark.evaluation.prompts import render


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_chat.save_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def call():
    def call(*arguments):
        result = CliRunner().invoke(main.app, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    return call


def expected(folder, prompts, **options):
    """What plain greedy generation answers."""
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), tiny_chat.make_tokenizer()
    texts = []
    for p in prompts:
        ids = render(tokenizer, p, **options)
        new = tiny.plain(target, torch.tensor(ids), max_new_tokens=12, pad_token_id=0)[len(ids) :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in tiny_chat.PROMPTS))
    return path


def test_a_prompt_is_answered_as_by_plain_decoding(world, call):
    target, drafter = world
    (text,) = expected(target, tiny_chat.PROMPTS[:1])
    output = call("generate", target, tiny_chat.PROMPTS[0], "--drafter", drafter, "--max-new-tokens", 12)
    assert text in output and "of the drafts accepted" in output
    assert text in call("generate", target, tiny_chat.PROMPTS[0], "--max-new-tokens", 12)


def test_without_chat_the_text_is_read_as_it_stands(world, call):
    target, drafter = world
    (text,) = expected(target, ["w3 w4"], chat=False)
    assert text in call("generate", target, "w3 w4", "--drafter", drafter, "--no-chat", "--max-new-tokens", 12)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_file_of_prompts_becomes_a_file_of_answers(world, call, prompt_file, tmp_path, batch_size):
    target, drafter = world
    out = tmp_path / "answers.jsonl"
    call("generate", target, "--batch-file", prompt_file, "--out", out, "--drafter", drafter, "--batch-size", batch_size,
         "--max-new-tokens", 12)  # fmt: skip
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["text"] for r in records] == expected(target, tiny_chat.PROMPTS)
    assert [r["prompt"] for r in records] == tiny_chat.PROMPTS and all(r["tau"] >= 1 for r in records)


def test_answers_that_end_early_in_a_batch_are_cut_at_their_stop_token(tmp_path, call, prompt_file):
    target, drafter = tiny_chat.save_world(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(target)
    ids = render(tiny_chat.make_tokenizer(), tiny_chat.PROMPTS[1])
    stop = tiny.plain(model, torch.tensor(ids), max_new_tokens=12)[len(ids) + 3]
    model.generation_config.eos_token_id = stop
    model.save_pretrained(target)
    out = tmp_path / "answers.jsonl"
    call("generate", target, "--batch-file", prompt_file, "--out", out, "--drafter", drafter, "--batch-size", 4,
         "--max-new-tokens", 12)  # fmt: skip
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["text"] for r in records] == expected(target, tiny_chat.PROMPTS)
    assert records[1]["tokens"] < 12 and all(r["tokens"] == len(r["text"].split()) for r in records)


@pytest.mark.parametrize("drafted", [True, False])
def test_an_interrupted_file_is_finished_not_repeated(world, call, prompt_file, tmp_path, drafted):
    target, drafter = world
    out = tmp_path / "answers.jsonl"
    prompt_file.write_text(prompt_file.read_text() + json.dumps({"prompt": tiny_chat.PROMPTS[0]}) + "\n")
    arguments = ["generate", target, "--batch-file", prompt_file, "--out", out, "--max-new-tokens", 12, "--temperature", 0.8,
                 "--seed", 7, *(["--drafter", drafter] if drafted else [])]  # fmt: skip
    call(*arguments)
    whole = out.read_text()
    records = [json.loads(line) for line in whole.splitlines()]
    assert records[0]["text"] != records[4]["text"]  # the same prompt, other noise
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:10])  # killed while writing the third
    assert "2 were there" in call(*arguments)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    if not drafted:  # how much of a copy is verified goes by measured times; the text doesn't
        for record in (*records, *again):
            del record["tau"]
    assert again == records
    result = CliRunner().invoke(main.app, [str(a) for a in [*arguments, "--top-k", 5]])
    assert result.exit_code == 1 and "other settings" in result.output


def test_prompts_unlike_the_training_chats_are_warned_about(world):
    target, folder = world
    drafter, tokenizer = AutoDrafter.from_pretrained(folder), tiny_chat.make_tokenizer()
    assert shared.prompt_warnings(drafter, tokenizer, chat=True, thinking=None) == []
    drafter.config.enable_thinking = False
    assert shared.prompt_warnings(drafter, tokenizer, chat=True, thinking=None) == []
    assert "--no-thinking" in shared.prompt_warnings(drafter, tokenizer, chat=True, thinking=True)[0]
    drafter.config.enable_thinking = True
    assert shared.prompt_warnings(drafter, tokenizer, chat=True, thinking=None) == []  # the template decides
    assert "--thinking" in shared.prompt_warnings(drafter, tokenizer, chat=True, thinking=False)[0]
    drafter.config.enable_thinking, drafter.config.template_hash = None, "abc"
    assert "another chat template" in shared.prompt_warnings(drafter, tokenizer, chat=True, thinking=None)[0]
    assert "--chat" in shared.prompt_warnings(drafter, tokenizer, chat=False, thinking=None)[0]
    from hf_dspark.training.data import template_hash

    drafter.config.template_hash = template_hash(tokenizer)
    assert shared.prompt_warnings(drafter, tokenizer, chat=True, thinking=None) == []


def test_the_thinking_flag_reaches_the_template():
    tokenizer = tiny_chat.make_tokenizer()
    assert render(tokenizer, "w3", thinking=True) == [60, *render(tokenizer, "w3")]
    assert render(tokenizer, "w3", thinking=False) == render(tokenizer, "w3")


def test_the_demo_compares_plain_decoding_with_the_drafter(world, call, monkeypatch):
    target, drafter = world

    def load(name, dtype):
        return AutoModelForCausalLM.from_pretrained(target).eval(), tiny_chat.make_tokenizer()

    monkeypatch.setattr(demo, "load_target", load)
    output = call("demo", "--drafter", drafter, "--prompt", "w3 w4", "--prompt", "w9", "--max-new-tokens", 12)
    assert all(text in output for text in expected(target, ["w3 w4", "w9"]))
    assert output.count("all 12") == 2 and "tokens as in plain" in output and "speed-up" in output


def test_the_demo_says_how_much_of_two_answers_is_equal():
    assert demo.same_tokens([5, 6, 7], [5, 6, 7]) == "all 3"
    assert demo.same_tokens([5, 6, 7], [5, 8, 7]) == "only the first 1 of 3"
    assert demo.same_tokens([5, 6, 7], [5, 6]) == "only the first 2 of 3"


def test_the_demo_copies_from_the_text_where_no_drafter_is_shipped(monkeypatch):
    monkeypatch.setattr(demo, "shipped_drafter", lambda: None)
    monkeypatch.setattr(hf_dspark, "CopyDrafter", lambda: "copies", raising=False)
    assert demo.choose_drafter(None, None) == (
        "copies",
        "the text itself: what it repeats is drafted (no drafter was given)",
    )
    monkeypatch.delattr(hf_dspark, "CopyDrafter")
    if not hasattr(hf_dspark, "CopyDrafter"):
        with pytest.raises(ValueError, match="pass --drafter"):
            demo.choose_drafter(None, None)


def test_the_demo_says_what_to_install_for_its_model(monkeypatch):
    def load(name, dtype):
        raise ImportError('run `pip install "hf-dspark[demo]"`')

    monkeypatch.setattr(demo, "load_target", load)
    result = CliRunner().invoke(main.app, ["demo"])
    assert result.exit_code == 1 and 'Error: run `pip install "hf-dspark[demo]"`' in result.output


def test_the_demo_takes_the_dspark_drafter_of_a_checkout(tmp_path):
    assert shared.shipped_drafter(tmp_path) is None
    for name in (
        "dflash-smollm2-135m-instruct",
        "dspark-smollm2-135m-instruct",
        "dspark-other",
        "dspark-smollm2-without",
    ):
        (tmp_path / name).mkdir()
        if name != "dspark-smollm2-without":
            (tmp_path / name / "config.json").write_text("{}")
    assert shared.shipped_drafter(tmp_path).name == "dspark-smollm2-135m-instruct"
