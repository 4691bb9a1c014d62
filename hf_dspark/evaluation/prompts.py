"""Prompts from jsonl files, rendered as the target expects them, and results written line by line so that a run can go
on."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """User messages of one conversation, in order; most have one. `source` names the set, `index` its place in the
    file."""

    turns: tuple[str, ...]
    source: str
    index: int


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a jsonl file with `turns` (a list of user messages), `messages` (chat format) or `prompt` (a string) a
    line.

    Args:
        limit: keep the first so many.

    Raises:
        ValueError: a line that is not of these forms, by number; no text in UTF-8; or no prompt at all.
    """
    path, prompts = Path(path), []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}): give a jsonl file of prompts.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) >= limit:
            break
        try:
            record = json.loads(line)
            turns = record.get("turns") or [m["content"] for m in record.get("messages", ()) if m["role"] == "user"]
            turns = turns or [record["prompt"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} can't be read as a prompt ({error!r}): give one JSON object a line, with "
                "`turns` (a list of strings), `messages` (role and content) or `prompt` (a string)."
            ) from None
        prompts.append(Prompt(tuple(map(str, turns)), str(record.get("source", path.stem)), len(prompts)))
    if not prompts:
        raise ValueError(
            f"{path} holds no prompt: give one JSON object a line, such as {json.dumps({'prompt': 'Who am I?'})}."
        )
    return prompts


def render(tokenizer, messages: list[dict] | str, chat: bool = True, thinking: bool | None = None) -> list[int]:
    """Token ids of `messages`, ready to be answered; a string is one user message, or with `chat=False` the text
    itself.

    `thinking` is passed to the template as `enable_thinking`; None leaves the template's default.

    Raises:
        ValueError: the tokenizer has no chat template, or nothing is left to answer.
    """
    if not chat:
        ids = tokenizer(messages if isinstance(messages, str) else messages[-1]["content"])["input_ids"]
        if not ids:
            raise ValueError("The prompt is empty, so there is no token to go on from: give a text.")
        return ids
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path or 'this target'} has no chat template, so messages can't be "
            "rendered: turn chat off (--no-chat) and give the text as the model should read it."
        )
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    options = {} if thinking is None else {"enable_thinking": thinking}
    out = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )
    return list(out["input_ids"])


class JsonLines:
    """A jsonl file that grows by whole lines; what an interrupted run left half written is cut off.

    `done` are the records already there. With `header`, the first line must equal it, so that results of other settings
    are never continued.
    """

    def __init__(self, path: str | Path, header: dict | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = list(self._whole_lines())
        if header is not None:
            header = json.loads(json.dumps(header, ensure_ascii=False))
            if lines and lines[0] != header:
                raise ValueError(
                    f"{self.path} holds results of other settings than this run's, and mixing them would mean nothing: "
                    "delete it, run with the settings it names in its first line, or choose another output."
                )
            if not lines:
                self.append(header)
            lines = lines[1:]
        self.done: list[dict] = lines

    def _whole_lines(self) -> Iterator[dict]:
        """Records of the file. What isn't ours is refused before a byte is changed."""
        if not self.path.exists():
            return
        *lines, tail = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            yield self._parse(line, number)
        if not tail:
            return
        try:
            yield json.loads(tail)  # whole but for its line end
            with self.path.open("ab") as file:
                file.write(b"\n")
        except ValueError:
            if not tail.startswith(b"{"):
                self._parse(tail, len(lines) + 1)
            os.truncate(self.path, self.path.stat().st_size - len(tail))

    def _parse(self, line: bytes, number: int) -> dict:
        try:
            return json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{self.path}, line {number} is no JSON ({error}), so no earlier run wrote this file: choose another "
                "output."
            ) from None

    def append(self, record: dict) -> dict:
        """Write a record; returns it as a later run will read it."""
        line = json.dumps(record, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return json.loads(line)
