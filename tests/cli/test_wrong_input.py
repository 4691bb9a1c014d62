"""All commands against wrong paths, wrong devices, broken files, existing outputs and interrupts: one line says what to
do."""

import inspect
import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import tiny_chat
from huggingface_hub.errors import RepositoryNotFoundError
from typer.testing import CliRunner

from hf_dspark.auto import AutoDrafter
from hf_dspark.cli import loading, main, shared
from hf_dspark.evaluation.prompts import JsonLines, read_prompts, render

COMMANDS = ("demo", "generate", "inspect", "eval", "calibrate", "profile", "convert", "card")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_chat.save_world(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in tiny_chat.PROMPTS))
    return folder


@pytest.fixture
def world(saved, tmp_path, monkeypatch):
    """A folder with a target, a drafter and prompts, which a test may break, and which is the current one."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(command, target="target", drafter="drafter", prompts="prompts.jsonl"):
    """A short call of each command that works in `world`."""
    return {
        "demo": ["demo", "--drafter", drafter],
        "generate": ["generate", target, "--drafter", drafter, "--batch-file", prompts, "--out", "out.jsonl"],
        "inspect": ["inspect", drafter, "--target", target, "--prompts", prompts],
        "eval": ["eval", target, "--drafter", drafter, "--prompts", prompts, "--methods", "plain,own"],
        "calibrate": ["calibrate", drafter, "--target", target, "--prompts", prompts, "--out", "calibrated"],
        "profile": ["profile", drafter, "--target", target, "--out", "costs.json", "--rows", "1", "--widths", "1,2"],
        "convert": ["convert", drafter, "converted", "--to", "own", "--target", target],
        "card": ["card", drafter],
    }[command]


def call(*given):
    return CliRunner().invoke(main.app, [str(a) for a in given])


def refused(result, *words, code=1):
    """The command ended with an exit code and one line that has all `words`."""
    assert result.exit_code == code and isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1, result.output
    assert all(word in result.output for word in words), result.output


@pytest.fixture
def nothing_loads(monkeypatch):
    """Loading a model fails the test: what is wrong must be found before."""
    for name in COMMANDS:
        module = import_module(f"hf_dspark.cli.{name}")
        for function in ("load_target", "load_drafter"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda *a, **k: pytest.fail("a model was loaded"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("demo", "card")])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./missing", "no such folder"),
        ("run/final", "no such folder"),
        ("missing", "no such folder"),
        ("smolm2", "Did you mean smollm2?"),
        ("targt", "Did you mean target?"),
        ("prompts.jsonl", "is a file, and a target is a folder"),
        ("run", "no config.json in it"),
    ],
)
def test_a_wrong_target_is_refused_at_once(world, nothing_loads, command, name, words):
    (world / "run").mkdir()
    refused(
        call(*arguments(command, target=name)), f"{name} was given as a target" if "file" not in words else name, words
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("name", "words"), [("./missing", "no such folder"), ("draftr", "Did you mean drafter?")])
def test_a_wrong_drafter_is_refused_at_once(world, nothing_loads, command, name, words):
    refused(call(*arguments(command, drafter=name)), f"{name.removeprefix('./')} was given as a drafter", words)


@pytest.mark.parametrize("command", ["generate", "inspect", "eval", "calibrate", "profile"])
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(world, monkeypatch, command, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(call(*arguments(command), "--device", device), f"--device {device} can't be used here", "cpu")


@pytest.mark.parametrize("command", ["generate", "inspect", "eval", "calibrate"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "w3"}\n{"prompt": "w4"\n', "line 2 can't be read as a prompt"),
        (b'{"text": "w3"}\n', "line 1 can't be read as a prompt"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
        (b"\n", "holds no prompt"),
    ],
)
def test_a_broken_file_of_prompts_is_refused_by_name_and_line(world, nothing_loads, command, content, words):
    (world / "prompts.jsonl").write_bytes(content)
    refused(call(*arguments(command)), "prompts.jsonl", words)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "demo"])
@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_a_broken_drafter_is_named(world, command, broken):
    (world / "drafter" / broken).write_bytes((world / "drafter" / broken).read_bytes()[:50])
    refused(call(*arguments(command)), f"drafter/{broken}")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("demo", "card")])
@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_a_broken_target_is_named(world, command, broken):
    (world / "target" / broken).write_bytes((world / "target" / broken).read_bytes()[:50])
    refused(call(*arguments(command)), "target")


def test_a_drafter_given_as_the_target_is_recognised(world):
    refused(call("generate", "drafter", "w3"), "drafter is a drafter, and a target was expected")


OUTPUTS = [  # command, option, whether a folder is written
    ("eval", "--out", False),
    ("eval", "--plots", True),
    ("calibrate", "--out", True),
    ("calibrate", "--report", False),
    ("calibrate", "--plot", False),
    ("convert", None, True),
]


def to(command, option, place):
    given = arguments(command)
    if option is None:
        given[given.index("converted")] = place
        return given
    return [*given, option, place]


@pytest.mark.parametrize(("command", "option", "folder"), OUTPUTS)
def test_results_that_exist_are_not_replaced_unasked(world, nothing_loads, command, option, folder):
    (world / "there").mkdir()
    (world / "there" / "old").write_text("precious")
    place = "there" if folder else "there/old"
    refused(call(*to(command, option, place)), f"{place} exists already", "--overwrite")
    assert (world / "there" / "old").read_text() == "precious"


@pytest.mark.parametrize(
    ("command", "option", "folder"), [*OUTPUTS, ("generate", "--out", False), ("profile", "--out", False)]
)
def test_a_place_of_the_wrong_kind_is_refused(world, nothing_loads, command, option, folder):
    refused(call(*to(command, option, "prompts.jsonl" if folder else "target"), *_overwrite(command)), "choose another")
    refused(
        call(*to(command, option, "prompts.jsonl/x"), *_overwrite(command)), "prompts.jsonl is a file and no folder"
    )


def _overwrite(command):
    return [] if command in ("generate", "profile") else ["--overwrite"]


def test_overwriting_a_converted_drafter_leaves_no_old_weights(world):
    (world / "converted").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (world / "converted" / name).write_text("old")
    result = call(*arguments("convert"), "--overwrite")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (world / "converted").iterdir()}
    assert {"config.json", "model.safetensors", "notes.txt"} <= names and not [
        n for n in names if "index" in n or "-of-" in n
    ]
    assert AutoDrafter.from_pretrained("converted") and not list(world.glob(".converted*"))


def test_a_drafter_is_not_converted_into_itself(world, nothing_loads):
    given = to("convert", None, "drafter")
    refused(call(*given, "--overwrite"), "is the drafter itself")


def test_a_failed_conversion_leaves_nothing_behind(world):
    given = to("convert", None, "new")
    given[given.index("own")] = "zlab"
    refused(call(*given), "can't be exported to 'zlab'")
    assert not (world / "new").exists()


@pytest.mark.parametrize(
    ("command", "content"),
    [("generate", b"my notes\nno end"), ("generate", b"notes"), ("generate", b"[1, 2]"), ("profile", b"{}")],
)
def test_a_file_of_something_else_is_neither_gone_on_with_nor_touched(world, command, content):
    name = arguments(command)[-1 if command == "generate" else 5]
    (world / name).write_bytes(content)
    refused(call(*arguments(command)), name)
    assert (world / name).read_bytes() in (content, content + b"\n")


def test_answers_do_not_go_into_the_file_of_prompts(world, nothing_loads):
    refused(
        call("generate", "target", "--batch-file", "prompts.jsonl", "--out", "./prompts.jsonl"),
        "the --batch-file itself",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_ends_with_a_line(world, monkeypatch, command):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    module = import_module(f"hf_dspark.cli.{command}")
    monkeypatch.setattr(module, "check_place" if command == "card" else "load_target", interrupted)
    result = call(*arguments(command))
    assert result.exit_code == 130 and "Stopped: nothing was written." in result.output and "Abort" not in result.output


@pytest.mark.parametrize(("command", "file"), [("generate", "out.jsonl"), ("eval", "eval.json.partial.jsonl")])
def test_an_interrupted_run_says_how_to_go_on(world, monkeypatch, command, file):
    append = JsonLines.append

    def first_then_interrupt(self, record):
        if len(self.path.read_text().splitlines() if self.path.exists() else ()) >= 2:
            raise KeyboardInterrupt
        return append(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", first_then_interrupt)
        result = call(*arguments(command), "--max-new-tokens", 6)
        assert result.exit_code == 130 and f"{file}; the same command continues" in result.output, result.output
    assert call(*arguments(command), "--max-new-tokens", 6).exit_code == 0


def numbers_of(command):
    """(command, option, type, least value) of the command's numeric options."""
    (registered,) = import_module(f"hf_dspark.cli.{command}").app.registered_commands
    for name, parameter in inspect.signature(registered.callback).parameters.items():
        annotated = hasattr(parameter.annotation, "__metadata__")
        kind, *extras = get_args(parameter.annotation) if annotated else [parameter.annotation]
        number = next((n for n in (int, float) if n in (kind, *get_args(kind))), None)
        if number is not None:
            info = extras[0] if extras else parameter.default
            yield command, f"--{name.replace('_', '-')}", number, info.min


@pytest.mark.parametrize(("command", "option", "kind", "least"), [x for c in COMMANDS for x in numbers_of(c)])
def test_every_number_has_a_least_value_and_no_nan(nothing_loads, command, option, kind, least):
    assert least is not None
    for wrong in (least - 1, "nan", "many", *([2.5] if kind is int else ["inf"])):
        result = call(*arguments(command, "owner/t", "owner/d", __file__), option, wrong)
        assert result.exit_code == 2 and f"'{option}'" in result.output, (wrong, result.output)


def test_there_are_numbers_to_check():
    assert len([x for c in COMMANDS for x in numbers_of(c)]) > 25


def test_a_prompt_without_text_is_refused(world, nothing_loads):
    refused(call("generate", "target", " "), "PROMPT is empty")
    refused(call("demo", "--prompt", ""), "--prompt '' is empty")
    with pytest.raises(ValueError, match="The prompt is empty"):
        render(tiny_chat.make_tokenizer(), "", chat=False)


def test_an_answer_goes_to_a_file_only_from_a_file(nothing_loads):
    refused(call("generate", "owner/t", "text", "--out", "x"), "--out is for the answers of --batch-file")


def test_no_drafts_is_what_an_answer_without_drafts_says(world):
    result = call("generate", "target", "w3", "--drafter", "drafter", "--num-draft-tokens", 0, "--max-new-tokens", 4)
    assert result.exit_code == 0 and "no drafts" in result.output and "nan" not in result.output
    assert shared.percent(float("nan")) == "-"


def test_options_of_the_target_reach_transformers(world, monkeypatch):
    seen = []
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: seen.append(k) or whole(*a, **k))
    given = ["--revision", "main", "--trust-remote-code", "--attn-implementation", "eager", "--max-new-tokens", 3]
    assert call("generate", "target", "w3", *given).exit_code == 0
    assert seen[0] | {"revision": "main", "trust_remote_code": True, "attn_implementation": "eager"} == seen[0]
    refused(call("generate", "smollm2", "w3", "--revision", "main"), "--revision was given for smollm2")


def test_the_hub_is_asked_once_for_a_name_it_may_not_have(world, monkeypatch):
    class ConnectError(Exception):
        pass

    asked = []

    def answer(error):
        def model_info(self, name, **options):
            asked.append(name)
            raise error

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)

    answer(RepositoryNotFoundError.__new__(RepositoryNotFoundError))
    refused(call("generate", "owner/misspelt", "w3"), "owner/misspelt is no folder here and no repository on the Hub")
    refused(call("generate", "target", "w3", "--drafter", "owner/misspelt"), "no repository on the Hub")
    answer(ConnectError("no network"))
    refused(call("generate", "owner/misspelt", "w3"), "the Hub can't be reached (no network)")
    assert asked == ["owner/misspelt"] * 3
    answer(ValueError("another fault"))
    loading.check_hub("owner/name")  # the download will say it better
    loading.check_hub("target")


def test_quantisation_names_what_is_missing(monkeypatch):
    assert loading.quantization_config(None) is None
    with pytest.raises(ValueError, match="--quantize 3bit is unknown: use one of bnb-4bit"):
        loading.quantization_config("3bit")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    for name, library in loading.QUANTIZATIONS.items():
        with pytest.raises(ImportError, match=f"pip install {library}"):
            loading.quantization_config(name)


def test_errors_of_the_library_name_options(world):
    refused(call("convert", "drafter", "new", "--to", "deepspec"), "add --target")
    assert main.as_options("pass target=..., or target_layer_ids=[...]") == "add --target, or target_layer_ids=[...]"


def test_a_fault_of_any_other_kind_is_one_line_too(monkeypatch):
    monkeypatch.setattr(main, "_run", lambda name, given: {}["x"])
    refused(call("card", "drafter"), "KeyError: 'x'", "--debug")
    assert isinstance(call("--debug", "card", "drafter").exception, KeyError)


def test_lines_of_a_file_survive_what_is_wrong_with_its_end(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}')  # whole but for its line end
    assert JsonLines(path).done == [{"a": 1}, {"a": 2}] and path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert JsonLines(path).done == [{"a": 1}] and path.read_bytes() == b'{"a": 1}\n'
    path.write_bytes(b"x\n{")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        JsonLines(path)
    assert path.read_bytes() == b"x\n{"


def test_prompts_are_read_as_documented(tmp_path):
    path = Path(tmp_path / "p.jsonl")
    path.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n{"messages": [{"role": "user", "content": "d"}]}\n')
    assert [p.turns for p in read_prompts(path)] == [("a",), ("b", "c"), ("d",)]
