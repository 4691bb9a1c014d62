"""From chats to batches: rendering with the target's own template, what is supervised, packing, the reduced
vocabulary."""

import hashlib
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset, Sampler

from .anchors import draw_anchors, keyed_generator


def template_hash(tokenizer) -> str | None:
    """Short hash of the chat template, kept in a drafter's config to tell whether it meets the prompts it was trained
    on."""
    template = tokenizer.chat_template
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]


def render_chat(tokenizer, messages: list[dict], enable_thinking: bool | None = None) -> tuple[list[int], list[bool]]:
    """Token ids of a chat and whether each is the assistant's, its end-of-turn token included.

    Templates with `{% generation %}` say themselves which tokens are the assistant's. For others the chat is rendered
    up to each assistant message and after it: what is added is supervised. Some templates rewrite history (they drop
    the thinking of earlier turns, say); a turn that the whole chat doesn't show as the model once saw it is left
    unsupervised.

    Raises:
        ValueError: when no assistant turn is left.
    """
    options = {"tokenize": True, "return_dict": True}
    if enable_thinking is not None:
        options["enable_thinking"] = enable_thinking
    if "generation %}" in str(tokenizer.chat_template).replace("-%}", "%}"):
        out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, **options)
        return list(out["input_ids"]), [bool(x) for x in out["assistant_masks"]]

    def ids(count, prompt):
        out = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=prompt, **options)
        return list(out["input_ids"])

    whole = ids(len(messages), False)
    mask = [False] * len(whole)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = ids(i, True), ids(i + 1, False)
            if after[: len(before)] == before and whole[: len(after)] == after:
                mask[len(before) : len(after)] = [True] * (len(after) - len(before))
    if not any(mask):
        raise ValueError(
            "The chat template shows no assistant turn as it was when the model answered (or there is none), so "
            "nothing can be supervised: store input_ids and prompt_len, or use a template with {% generation %} marks."
        )
    return whole, mask


def example_from(row: dict, tokenizer=None, enable_thinking: bool | None = None) -> dict:
    """`{"input_ids", "labels"}` of one line of a data file.

    Stored `input_ids` are used as they are, supervised from `prompt_len` on (text doesn't tokenise back to what was
    generated); else `messages` are rendered.

    Raises:
        ValueError: when the row has neither.
    """
    if "input_ids" in row:
        ids = row["input_ids"]
        if not (isinstance(ids, list) and ids and all(isinstance(i, int) and i >= 0 for i in ids)):
            raise ValueError("A data row's input_ids must be a list of token ids, at least one: render the chat again.")
        if "labels" in row:
            return {"input_ids": ids, "labels": list(row["labels"])}
        if "prompt_len" not in row:
            raise ValueError("A data row has input_ids but neither prompt_len nor labels: say where the answer begins.")
        mask = [i >= row["prompt_len"] for i in range(len(ids))]
    elif "messages" in row and tokenizer is not None:
        ids, mask = render_chat(tokenizer, row["messages"], enable_thinking)
    else:
        raise ValueError(
            f"A data row has the fields {sorted(row)}, which give no tokens: it needs input_ids and prompt_len, or "
            "messages and a tokenizer with a chat template."
        )
    return {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}


def numbered_rows(path, limit: int | None = None) -> list[tuple[int, dict]]:
    """The rows of a jsonl file with the numbers of their lines, from 1.

    Raises:
        ValueError: a line that is no JSON object, or is a prompt without an answer, by file and number.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        if limit is not None and len(rows) == limit:
            break
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON ({error}): give one JSON object a line.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is a {type(row).__name__}: give one JSON object a line.")
        if not {"input_ids", "messages"} & set(row) and {"turns", "prompt"} & set(row):
            raise ValueError(
                f"{path}, line {number} is a prompt without an answer, and a drafter learns from answers: let the "
                "target answer it first, with `hf-dspark data generate TARGET --prompts FILE --out ANSWERS`."
            )
        rows.append((number, row))
    return rows


BLANK = {"input_ids": [0], "labels": [-100], "example_id": -1}  # fills up the last batches of an epoch, teaches nothing


class ChatDataset(Dataset):
    """Supervised chats, each with the id and the epoch that key its anchors.

    The id is the row's "example_id", or its number. The epoch comes with the index, as [`KeyedSampler`] gives it: a
    worker process has no epoch of its own.

    Args:
        rows: dicts as [`example_from`] reads them. max_length (`int`): longer chats are cut.

    Raises:
        ValueError: when less than 1 % of all tokens are supervised, as then the spans were surely not found.
    """

    def __init__(self, rows, tokenizer=None, max_length: int = 4096, enable_thinking: bool | None = None):
        self.examples = []
        for row in rows:
            example = example_from(row, tokenizer, enable_thinking)
            example = {k: v[:max_length] for k, v in example.items()}
            self.examples.append({**example, "example_id": row.get("example_id", len(self.examples))})
        self.tokens = sum(len(e["input_ids"]) for e in self.examples)
        self.supervised = sum(x != -100 for e in self.examples for x in e["labels"])
        if self.supervised < 0.01 * self.tokens or not self.tokens:
            raise ValueError(
                f"Only {self.supervised} of {self.tokens} tokens are supervised, so there is nothing to learn: look at "
                "the rows with `hf-dspark data preview`, and store input_ids with prompt_len if the template hides the "
                "answers."
            )
        self.max_length = max(len(e["input_ids"]) for e in self.examples)

    @classmethod
    def from_jsonl(cls, path, tokenizer=None, limit: int | None = None, **kwargs) -> "ChatDataset":
        """From a file with one row a line; `limit` keeps the first so many.

        Raises:
            ValueError: a line that holds no row, by file and number.
        """
        rows, thinking = [], kwargs.pop("enable_thinking", None)
        for number, row in numbered_rows(path, limit):
            try:
                rows.append({**row, **example_from(row, tokenizer, thinking)})
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
        return cls(rows, tokenizer, **kwargs)

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        """Example `index` of epoch 0; or of another, for an index `(epoch, number)`; a blank one if its number is
        None."""
        epoch, number = index if isinstance(index, tuple) else (0, index)
        return {**(BLANK if number is None else self.examples[number]), "epoch": epoch}

    def fingerprint(self) -> str:
        """Hash of all tokens and labels, for a cache to know its data by."""
        return hashlib.sha256(json.dumps(self.examples).encode()).hexdigest()[:16]

    def unused_ids(self, tokenizer, vocab_size: int) -> list[int]:
        """Ids that could fill a drafter's blocks: special tokens without a part in chats, then ids without a token,
        none of which occurs in these examples."""
        used = {i for e in self.examples for i in e["input_ids"]}
        names = "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"
        used |= {getattr(tokenizer, name, None) for name in names}
        special = [i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
        return [i for i in [*special, *range(len(tokenizer), vocab_size)] if i < vocab_size and i not in used]

    def check_mask_token(self, mask_token_id: int | None, tokenizer, vocab_size: int) -> str | None:
        """A warning for a mask token that is an ordinary one; None for a good one.

        Raises:
            ValueError: it is missing, outside the vocabulary, or occurs in these examples; with ids to use instead.
        """
        free = ", ".join(
            f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in self.unused_ids(tokenizer, vocab_size)[:4]
        )
        instead = f"unused ids of this tokenizer are {free}" if free else "this tokenizer has no unused special token"
        if mask_token_id is None:
            raise ValueError(
                "A new drafter fills its blocks with a token that never occurs in text, and none was named: pass "
                f"--mask-token-id; {instead}."
            )
        if not 0 <= mask_token_id < vocab_size:
            raise ValueError(f"mask_token_id={mask_token_id} is outside the vocabulary of {vocab_size}; {instead}.")
        token = tokenizer.convert_ids_to_tokens(mask_token_id)
        count = sum(e["input_ids"].count(mask_token_id) for e in self.examples)
        if count:
            raise ValueError(
                f"mask_token_id={mask_token_id} ({token}) occurs {count} times in the data, so the drafter couldn't "
                f"tell a token to draft from text; {instead}."
            )
        if (
            token is None
            or mask_token_id in tokenizer.all_special_ids
            or mask_token_id in tokenizer.added_tokens_decoder
        ):
            return None
        return f"mask_token_id={mask_token_id} is the ordinary token {token!r}, which other texts may hold; {instead}."

    def draft_vocabulary(self, size: int, vocab_size: int) -> torch.Tensor:
        """The `size` most frequent supervised ids, ascending (FR-Spec, arXiv 2502.14856); ties go to the smaller id."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for example in self.examples:
            labels = torch.tensor(example["labels"])
            counts += torch.bincount(labels[labels >= 0], minlength=vocab_size)
        return counts.argsort(descending=True, stable=True)[:size].sort().values


def as_chats(data, tokenizer=None, max_length: int = 4096):
    """`data` as a [`ChatDataset`]: itself, or any sized dataset of rows (a list, a `datasets.Dataset`); a dict of them
    too.

    Raises:
        ValueError: `data` has no length.
    """
    if data is None or isinstance(data, ChatDataset):
        return data
    if isinstance(data, dict):
        return {name: as_chats(part, tokenizer, max_length) for name, part in data.items()}
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            f"{type(data).__name__} was given as a dataset, and it has no length, so an epoch's order can't be drawn "
            "from the seed and a resumed run couldn't find its place: load the rows, and give ChatDataset(rows, "
            "tokenizer)."
        )
    return ChatDataset((data[i] for i in range(len(data))), tokenizer, max_length)


class KeyedSampler(Sampler):
    """The order of an epoch, a function of (seed, epoch) alone, as indices `(epoch, number)`.

    Blank examples fill up the last batches, which accelerate would else fill with examples of the epoch's beginning: a
    step then holds the same examples for any number of processes.

    Args:
        size (`int`): examples. group (`int`): examples of a micro-batch on all processes.
        seed (`int`, *optional*): of the order; None keeps that of the data.
        epoch: a function that gives the epoch as an iteration begins. drop_last (`bool`): leave an incomplete group
            out.
    """

    def __init__(self, size: int, group: int, seed: int | None = None, epoch=lambda: 0, drop_last: bool = False):
        self.size, self.group, self.seed, self.epoch, self.drop_last = size, group, seed, epoch, drop_last

    def __len__(self):
        return self.size // self.group * self.group if self.drop_last else -(-self.size // self.group) * self.group

    def __iter__(self):
        epoch, order = self.epoch(), list(range(self.size))
        if self.seed is not None:
            order = torch.randperm(self.size, generator=keyed_generator(self.seed, epoch, -1)).tolist()
        order += [None] * (len(self) - self.size)
        return iter([(epoch, number) for number in order[: len(self)]])


class BlockCollator:
    """Examples to a batch, anchors included.

    Anchors depend on (seed, epoch, example id) alone. Rows hold one document each, or with `pack` as many as fit into
    `length` tokens, first fit; documents never see each other, as position ids restart with each.

    Returns:
        `dict`: "input_ids", "labels", "position_ids" [B, T]; "anchors" [B, N], -1 where there is none; "documents", a
            list of (example id, row, first column, columns).
    """

    def __init__(self, num_anchors: int, seed: int = 0, pack: bool = False, length: int = 4096):
        self.num_anchors, self.seed, self.pack, self.length = num_anchors, seed, pack, length

    def __call__(self, examples: list[dict]) -> dict:
        examples = [e for e in examples if e.get("example_id") != -1] or examples[:1]
        rows = self._packed(examples) if self.pack else [[e] for e in examples]
        width = max(sum(len(e["input_ids"]) for e in row) for row in rows)
        anchors = [self._anchors(row) for row in rows]
        batch = {
            "input_ids": torch.zeros(len(rows), width, dtype=torch.long),
            "labels": torch.full((len(rows), width), -100),
            "position_ids": torch.zeros(len(rows), width, dtype=torch.long),
            "anchors": torch.full((len(rows), max(1, max(map(len, anchors)))), -1),
            "documents": [],
        }
        for r, row in enumerate(rows):
            at = 0
            for example in row:
                n = len(example["input_ids"])
                batch["input_ids"][r, at : at + n] = torch.tensor(example["input_ids"])
                batch["labels"][r, at : at + n] = torch.tensor(example["labels"])
                batch["position_ids"][r, at : at + n] = torch.arange(n)
                if example.get("example_id") != -1:
                    batch["documents"].append((example.get("example_id", 0), r, at, n))
                at += n
            batch["anchors"][r, : len(anchors[r])] = anchors[r]
        return batch

    def _packed(self, examples):
        rows, room = [], []
        for example in examples:
            n = len(example["input_ids"])
            fits = next((i for i, free in enumerate(room) if free >= n), None)
            if fits is None:
                rows.append([])
                room.append(self.length)
                fits = len(rows) - 1
            rows[fits].append(example)
            room[fits] -= n
        return rows

    def _anchors(self, row):
        found, at = [], 0
        for e in row:
            generator = keyed_generator(self.seed, e.get("epoch", 0), e.get("example_id", 0))
            found.append(draw_anchors(torch.tensor(e["labels"]), self.num_anchors, generator) + at)
            at += len(e["input_ids"])
        return torch.cat(found)
