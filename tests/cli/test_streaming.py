"""What is printed while a text comes: whole characters only, and drafts that were accepted in colour."""

import io

import torch
from rich.console import Console
from transformers import GenerationConfig

from hf_dspark.cli.generate import cut, pad_left, stop_ids
from hf_dspark.cli.streaming import DraftPrinter


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", errors="replace")


def printed(*rounds):
    """The output of a printer that gets these rounds of bytes, with styles as escape codes."""
    out = io.StringIO()
    printer = DraftPrinter(Bytes(), Console(file=out, force_terminal=True, color_system="standard", highlight=False))
    printer.put(torch.tensor([list(b"a prompt")]))
    for tokens in rounds:
        printer.put(torch.tensor([list(tokens)]))
    printer.end()
    return out.getvalue()


def test_all_tokens_of_a_round_but_the_last_are_coloured():
    assert printed(b"x", b"abc") == "x\x1b[32ma\x1b[0m\x1b[32mb\x1b[0mc\n"


def test_half_a_character_waits_for_the_rest():
    assert printed("é".encode()[:1], "é".encode()[1:], b"!") == "é!\n"


def test_markup_in_the_text_is_text():
    assert printed(b"[", b"b", b"]") == "[b]\n"


def test_answers_end_with_their_first_stop_token():
    assert cut([5, 6, 2, 0, 0], frozenset([2, 9])) == [5, 6, 2] and cut([5, 6], frozenset()) == [5, 6]

    class Model:
        generation_config = GenerationConfig(eos_token_id=[2, 9])

    assert stop_ids(Model) == {2, 9}
    Model.generation_config = GenerationConfig(eos_token_id=2)
    assert stop_ids(Model) == {2}
    Model.generation_config = GenerationConfig()
    assert stop_ids(Model) == frozenset()


def test_prompts_are_padded_on_the_left():
    batch = pad_left([[5], [6, 7, 8]], 0, "cpu")
    assert batch["input_ids"].tolist() == [[0, 0, 5], [6, 7, 8]] and batch["attention_mask"].tolist() == [
        [0, 0, 1],
        [1, 1, 1],
    ]
