"""The card says what was recorded, keeps what a human wrote, and makes nothing up."""

import json
import re

import pytest
import yaml
from golden import drafter_folder, load_drafter

from hf_dspark.hub import write_card
from hf_dspark.hub.card import BEGIN, END, merge

RECORD = {
    "target": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "license": "apache-2.0",
    "language": ["en"],
    "datasets": ["someone/prompts"],
    "data": "answers of the target to 14 000 prompts",
    "examples": 14000,
    "tokens": 5_100_000,
    "steps": 3500,
    "hours": 6.25,
    "machine": "2 cores of a Xeon",
    "command": "hf-dspark train smollm2 --data data.jsonl",
    "versions": {"torch": "2.13.0"},
    "limits": ["English only."],
}


def entry(source, method, temperature, tau, speed=None):
    speedup = {"ratio": speed, "low": speed - 0.1, "high": speed + 0.1} if speed else None
    row = {"set": source, "method": method, "temperature": temperature, "tau": tau}
    return row | ({"speedup_over_plain": speedup} if speedup else {})


RESULTS = {
    "date": "2026-11-30",
    "run": {
        "environment": {
            "cpu": "Xeon",
            "threads": 1,
            "dtype": "float32",
            "device": "cpu",
            "versions": {"torch": "2.13.0"},
        },
        "plan": {
            "temperatures": [0.0, 1.0],
            "prompts": {"sets": {"gsm8k": 20, "mt-bench": 10}},
            "max_new_tokens": 128,
            "thinking": False,
        },
    },
    "results": [
        entry("gsm8k", "plain", 0.0, 1.0),
        entry("gsm8k", "own", 0.0, 1.91, 1.35),
        entry("gsm8k", "own", 1.0, 1.72, 1.21),
        entry("mt-bench", "own", 0.0, 1.44, 1.02),
        entry("mt-bench", "lookup", 0.0, 1.2, 1.1),
    ],
}


@pytest.fixture
def folder(tmp_path):
    drafter = load_drafter("speculators-dspark-vanilla-anchor")
    drafter.config.trained_length, drafter.config.enable_thinking, drafter.config.template_hash = 2048, False, "abc123"
    drafter.config.target_name = None
    drafter.save_pretrained(tmp_path / "dspark-tiny")
    return tmp_path / "dspark-tiny"


def card(folder, results=None, record=RECORD, **kwargs):
    if record is not None:
        (folder / "run.json").write_text(json.dumps(record))
    paths = []
    if results is not None:
        (folder.parent / "eval.json").write_text(json.dumps(results))
        paths = [folder.parent / "eval.json"]
    return write_card(folder, paths, **kwargs).read_text()


def front(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_the_header_holds_what_the_hub_reads(folder):
    assert front(card(folder)) == {
        "license": "apache-2.0",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "library_name": "hf-dspark",
        "pipeline_tag": "text-generation",
        "language": ["en"],
        "datasets": ["someone/prompts"],
        "tags": ["speculative-decoding", "drafter", "dspark"],
    }


def test_the_first_lines_say_target_thinking_mode_and_length(folder):
    start = card(folder).split("## Use")[0]
    assert "SmolLM2-135M-Instruct](https://huggingface.co/" in start
    assert "Thinking in the training data: off" in start and "2048 tokens" in start


def test_every_recorded_fact_appears(folder):
    text = card(folder)
    for fact in ("14,000, 5,100,000", "3,500, 6.25", "2 cores of a Xeon", "72 of 97 tokens", "markov", "abc123"):
        assert fact in text
    for fact in (
        "hf-dspark train smollm2",
        "torch 2.13.0",
        "English only.",
        "not calibrated",
        "0.1 M parameters",
        "embedding",
    ):
        assert fact in text


def test_measurements_become_one_row_per_set_and_method_with_machine_and_thinking_mode(folder):
    text = card(folder, RESULTS)
    assert "| prompts | method | tau, T=0 | x plain, T=0 | tau, T=1 | x plain, T=1 |" in text
    assert "| gsm8k | own | 1.91 | 1.35 (1.25-1.45) | 1.72 | 1.21 (1.11-1.31) |" in text
    assert "| mt-bench | own | 1.44 | 1.02 (0.92-1.12) | - | - |" in text
    assert "| mt-bench | lookup | 1.20 |" in text and "own: this drafter" in text and "| gsm8k | plain" not in text
    assert "on Xeon, 1 threads, float32; prompts: 20 of gsm8k, 10 of mt-bench" in text and "thinking off" in text


def test_nothing_is_made_up(folder):
    text = card(folder, record=None)
    assert "license" not in front(text) and "base_model" not in front(text)
    assert text.count("not recorded") >= 4 and "Nothing yet" in text


def test_the_trainers_own_state_fills_in_steps_and_hours(folder):
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": 77, "log_history": [{"train_runtime": 1800.0}]})
    )
    assert "77, 0.50" in card(folder, record=None)


def test_what_a_human_wrote_outside_the_marks_survives(folder):
    card(folder)
    path = folder / "README.md"
    text = path.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    edited = text.replace("license: apache-2.0", "license: mit\nthumbnail: mine.png").replace(
        "- dspark", "- dspark\n- mine"
    )
    path.write_text(edited.replace(BEGIN, "My own foreword.\n\n" + BEGIN) + "\n## Thanks\n\nTo all.\n")
    again = card(folder, RESULTS)
    assert "My own foreword." in again.split(BEGIN)[0] and again.endswith("\n## Thanks\n\nTo all.\n")
    assert front(again)["license"] == "mit" and front(again)["thumbnail"] == "mine.png"
    assert front(again)["tags"] == ["speculative-decoding", "drafter", "dspark", "mine"]
    assert "| own |" in again and "Nothing yet" not in again
    assert card(folder, RESULTS) == again  # a second run changes nothing


def test_numbers_of_an_earlier_card_stay_while_the_weights_do(folder):
    text = card(folder, RESULTS)
    assert card(folder) == text and card(folder, license="mit").count("| gsm8k | own |") == 1
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    stale = card(folder)
    assert "| gsm8k" not in stale and "Nothing since the weights were changed" in stale
    assert "| gsm8k | own |" in card(folder, RESULTS)


def test_numbers_of_a_card_without_a_mark_of_its_weights_stay(folder):
    text = card(folder, RESULTS)
    unmarked = re.sub(r"\n*<!-- weights: .*-->", "", text)
    assert unmarked != text
    (folder / "README.md").write_text(unmarked)
    assert card(folder) == text


def test_an_older_readme_without_marks_is_kept_below():
    merged = merge("# Hand made\n\nText.\n", {"tags": ["a"]}, "BODY")
    assert merged == f"---\ntags:\n- a\n---\n\n{BEGIN}\nBODY\n{END}\n\n# Hand made\n\nText.\n"


def test_arguments_win_over_the_record_and_over_an_earlier_card(folder):
    assert front(card(folder, license="mit"))["license"] == "mit"
    assert front(card(folder))["license"] == "mit"
    again = front(card(folder, license="bsd-3-clause", base_model="someone/target"))
    assert again["license"] == "bsd-3-clause" and again["base_model"] == "someone/target"


def test_a_local_path_is_no_base_model(folder):
    text = card(folder, record=RECORD | {"target": "/home/me/SmolLM2"})
    assert "base_model" not in front(text) and "/home/me" not in text and "Drafts for its target only" in text
    (folder / "README.md").write_text(text.replace("---\n", "---\nbase_model: /home/me/SmolLM2\n", 1))
    assert "base_model" not in front(card(folder, record=RECORD | {"target": "/home/me/SmolLM2"}))
    text = card(
        folder, base_model="HuggingFaceTB/SmolLM2-135M-Instruct", record=RECORD | {"target": "/home/me/SmolLM2"}
    )
    assert front(text)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and "/home/me" not in text
    assert card(folder, record=None) == card(folder, record=None) and front(card(folder, record=None))["base_model"]


def test_the_lines_that_load_it_name_its_repository(folder):
    assert 'from_pretrained("OWNER/dspark-tiny"' in card(folder)
    text = card(folder, repo_id="someone/dspark-smollm2")
    assert 'from_pretrained("someone/dspark-smollm2"' in text and "# dspark-smollm2\n" in text
    assert card(folder) == text  # known from then on


@pytest.mark.parametrize(
    ("temperatures", "words"),
    [(None, "not calibrated"), ([1.0] * 5, "not calibrated"), ([1.0, 1.2], "yes, calibrated")],
)
def test_calibrated_means_that_a_temperature_was_changed(folder, temperatures, words):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"confidence_temperatures": temperatures}))
    assert words in card(folder)


def test_a_file_that_holds_no_results_is_refused(folder):
    for content in ("{", "[]", "{}"):
        (folder.parent / "eval.json").write_text(content)
        with pytest.raises(ValueError, match="holds no results"):
            write_card(folder, [folder.parent / "eval.json"])


def test_other_formats_are_sent_to_convert():
    with pytest.raises(ValueError, match="another format.*hf-dspark convert"):
        write_card(drafter_folder("zlab-dflash-b8"))


def test_eagle3_gets_its_own_name_and_length(tmp_path):
    load_drafter("deepspec-eagle3").save_pretrained(tmp_path / "x")
    text = write_card(tmp_path / "x").read_text()
    assert "An EAGLE-3 drafter" in text and "up to 5 tokens" in text and front(text)["tags"][-1] == "eagle-3"
