"""Drafts copied from text that is known already, without any weights.

The last tokens of a text are looked up among its earlier tokens; what followed them there is the draft. Written from
the literature: prompt lookup decoding (Saxena 2023) and LLMA (arXiv 2304.04487) copy from the prompt; REST (2311.08252)
from a store of documents; token recycling (2408.08696) and SuffixDecoding (2411.04975) from earlier answers.
`CopyIndex` covers one row's own text, `CopyMemory` many texts. Among the longest matches the most recent one is copied:
on SmolLM2's answers the most frequent continuation gains nothing over it.

A draft depends on the committed text alone, so its distribution q is one-hot, and every verification is exact.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from safetensors import safe_open
from safetensors.torch import save_file

COUNTED = 64  # match lengths beyond it are reported as this
_BREAK = -1  # stands before each text, so that no match crosses from one into the other
_FACTOR, _MASK = 0x9E3779B97F4A7C5, (1 << 60) - 1  # keys of 60 bits: Python's integers up to there take 32 bytes


@dataclass(frozen=True)
class Copy:
    """A draft copied from known text.

    Args:
        tokens: token ids, at most as many as were asked for; empty where nothing matched.
        match: how many tokens before the draft agree with those before its source, counted up to 64; 0 where nothing
            matched.
    """

    tokens: list[int]
    match: int


class _Suffixes:
    """Where each n-gram of a text ended last, for n from `shortest` to `longest`.

    An n-gram that occurred once is stored up to the first length that was new then; a second visitor pushes the first
    one deeper. So an entry that is missing means: the next shorter n-gram's latest occurrence is the only candidate.
    That keeps two or three entries per token of usual text instead of one per length. Keys are hashes; callers compare
    the tokens.
    """

    def __init__(self, shortest: int, longest: int):
        if not 1 <= shortest <= longest <= COUNTED:
            raise ValueError(
                f"min_match={shortest} and max_match={longest} name no match lengths: "
                f"set 1 <= min_match <= max_match <= {COUNTED}."
            )
        self.shortest, self.longest = shortest, longest
        self.tokens = array("i")
        self.first = 0  # position of tokens[0]: positions keep counting when old tokens are dropped
        self.latest: dict[int, int] = {}

    def insert(self, end: int) -> int:
        """Enter the n-grams that end at position `end`; returns where the longest known one ended before, or -1."""
        tokens, latest, at, skip = self.tokens, self.latest, end - self.first, self.shortest - 1
        key, source = 0, -1
        for n in range(self.longest):
            token = tokens[at - n]
            if token < 0:  # the document starts here, and `end` hides the earlier visitor from those who come deeper
                self._push(key, source, n)
                break
            parent, key = key, (key * _FACTOR + token + 1) & _MASK
            if n < skip:
                continue
            previous = latest.get(key, -1)
            if previous < 0 <= source:
                if tokens[source - self.first - n] == token:
                    previous = source
                else:
                    self._push(parent, source, n)
            latest[key] = end
            if previous < 0:
                break
            source = previous
        return source

    def _push(self, key: int, source: int, n: int) -> None:
        """Enter the (n + 1)-gram that ends at `source`, whose last n tokens have the key `key`."""
        token = self.tokens[source - self.first - n] if source >= 0 else _BREAK
        if token >= 0:
            self.latest[(key * _FACTOR + token + 1) & _MASK] = source

    def remove(self, end: int) -> None:
        """Forget the n-grams whose latest occurrence ended at `end`. Positions must leave in the order they came."""
        key, at = 0, end - self.first
        for n in range(self.longest):
            token = self.tokens[at - n]
            if token < 0:
                return
            key = (key * _FACTOR + token + 1) & _MASK
            if self.latest.get(key) == end:
                del self.latest[key]

    def find(self, suffix: Sequence[int]) -> int:
        """Where the longest known n-gram at the end of `suffix` ended last, or -1."""
        key, source = 0, -1
        for n, token in enumerate(suffix[: -self.longest - 1 : -1]):
            if token < 0:
                break
            key = (key * _FACTOR + token + 1) & _MASK
            if n + 1 < self.shortest:
                continue
            previous = self.latest.get(key, -1)
            if previous < 0:
                break
            source = previous
        return source

    def agreement(self, source: int, suffix: Sequence[int], limit: int = COUNTED) -> int:
        """How many tokens up to position `source` agree with the end of `suffix`, counted up to `limit`."""
        at, last, match = source - self.first, len(suffix) - 1, 0
        limit = min(limit, at + 1, last + 1)
        while match < limit and self.tokens[at - match] == suffix[last - match] >= 0:
            match += 1
        return match


class CopyIndex:
    """The text of one row, prompt and output, and where it said before what it says now.

    Extending takes constant time per token however long the text is. A token takes about 150 bytes in usual text, at
    most about 700 (with the default match lengths, where every passage stands there twice). It holds plain numbers and
    can be pickled.

    Args:
        tokens: the text so far, token ids.
        min_match: matches shorter than this are not copied, default 2.
        max_match: up to this length the longest match wins, and among equally long ones the most recent. Default 8.

    Raises:
        ValueError: match lengths out of order, or a negative token id.
    """

    def __init__(self, tokens: Sequence[int] = (), min_match: int = 2, max_match: int = 8):
        self._suffixes = _Suffixes(min_match, max_match)
        self._suffixes.tokens.append(_BREAK)
        self._source = -1
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._suffixes.tokens) - 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens (never drafts).

        Args:
            tokens: token ids, in order.

        Raises:
            ValueError: a negative id; the index is unchanged.
        """
        text, insert = self._suffixes.tokens, self._suffixes.insert
        for token in _checked(tokens):
            text.append(token)
            self._source = insert(len(text) - 1)

    def propose(self, limit: int) -> Copy:
        """What followed the latest of the longest earlier matches of the text's end.

        Args:
            limit: tokens wanted. Where the copy reaches the end of the text it goes on with what it copied (a period).

        Returns:
            A `Copy` with `limit` tokens, or with none.
        """
        return self._copy(self._source, limit)

    def propose_after(self, drafted: Sequence[int], limit: int) -> Copy:
        """What `propose` would answer if `drafted` were appended to the text. The index stays as it is.

        Args:
            drafted: token ids, a draft that is to be continued. The time grows with its square: a block, not a text.
            limit: tokens wanted behind it.

        Raises:
            ValueError: a negative id.
        """
        if not drafted:
            return self.propose(limit)
        drafted = _checked(drafted)
        suffixes, text = self._suffixes, self._suffixes.tokens
        size = len(text)
        text.extend(drafted)  # behind the text while the answer is found; taken off below
        try:
            source = suffixes.find(text)
            best = max(suffixes.shortest, suffixes.agreement(source, text, suffixes.longest) if source >= 0 else 0)
            for end in range(size, len(text) - 1):  # matches that end within the draft, which are more recent
                match = suffixes.agreement(end, text, suffixes.longest)
                if match >= best:
                    source, best = end, match
            return self._copy(source, limit)
        finally:
            del text[size:]

    def _copy(self, source: int, limit: int) -> Copy:
        text = self._suffixes.tokens
        match = self._suffixes.agreement(source, text) if source >= 0 else 0
        tokens = text[source + 1 : source + 1 + max(0, limit)].tolist()
        if match < self._suffixes.shortest or not tokens:
            return Copy([], 0)
        if len(tokens) < limit:
            tokens = (tokens * (limit // len(tokens) + 1))[:limit]
        return Copy(tokens, match)


class CopyMemory:
    """Texts to copy from that are shared by rows and calls: your own documents, or earlier answers.

    Privacy: what one user wrote is proposed in other users' calls. The target verifies every proposal, so it is output
        only where the
    target itself would say the same. But the time that an answer takes shows whether a proposal was accepted. Use one
    memory per group of users who may know of each other's texts.

    The size is bounded: the oldest documents are removed first. Calls from several threads are safe. A call of `add`
    delays other calls by a few microseconds per token.

    Args:
        max_tokens (`int`, defaults to 1,000,000): most tokens kept, of about 180 bytes each (at most 1,000 bytes). Of a
            longer document the last `max_tokens` tokens are kept.
        vocabulary_size (`int`, *optional*): size of the vocabulary that the ids belong to. `None`: set by the first
            `bind`.
        tokenizer (`str`, *optional*): a name or hash of the tokenizer that made the ids. `None`: set by the first
            `bind`.
        min_match (`int`, defaults to 3): tokens that have to match, at least, before something is copied.
        max_match (`int`, defaults to 8): longest match that is looked up.
        learns (`bool`, defaults to `True`): whether the texts of calls that use this memory are added when they end.

    Raises:
        ValueError: `max_tokens` below 1, or match lengths out of order.
    """

    def __init__(
        self,
        max_tokens: int = 1_000_000,
        vocabulary_size: int | None = None,
        tokenizer: str | None = None,
        min_match: int = 3,
        max_match: int = 8,
        learns: bool = True,
    ):
        self.learns = learns
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} keeps nothing: set at least 1, or use no memory.")
        self.max_tokens, self.vocabulary_size, self.tokenizer = max_tokens, vocabulary_size, tokenizer
        self._suffixes = _Suffixes(min_match, max_match)
        self._lengths: deque[int] = deque()
        self._size = 0
        self._oldest = 0  # position of the break before the oldest document
        self._lock = Lock()

    def __len__(self) -> int:
        return self._size

    def bind(self, vocabulary_size: int | None = None, tokenizer: str | None = None) -> None:
        """Say which vocabulary the ids belong to. The first call settles it; what is None is not compared.

        Raises:
            ValueError: the memory holds ids of another vocabulary.
        """
        for name, mine, theirs in (
            ("vocabulary_size", self.vocabulary_size, vocabulary_size),
            ("tokenizer", self.tokenizer, tokenizer),
        ):
            if None not in (mine, theirs) and mine != theirs:
                raise ValueError(
                    f"this CopyMemory holds token ids of {name}={mine!r}, not {theirs!r}: the same id means another "
                    "text there. Use one CopyMemory per tokenizer and add the documents to it again."
                )
        self.vocabulary_size = self.vocabulary_size or vocabulary_size
        self.tokenizer = self.tokenizer or tokenizer

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a document. One too short to be copied from (`min_match` tokens or fewer) is ignored.

        Args:
            tokens (`Sequence[int]`): token ids of a text, or of a prompt with its answer.

        Raises:
            ValueError: an id outside the vocabulary; the memory is unchanged.
        """
        tokens = _checked(tokens)
        if self.vocabulary_size is not None and len(tokens) and max(tokens) >= self.vocabulary_size:
            raise ValueError(
                f"token id {max(tokens)} lies outside the vocabulary of {self.vocabulary_size}: another tokenizer made "
                "it. Tokenize the document with the target's own."
            )
        tokens = tokens[-self.max_tokens :]
        if len(tokens) <= self._suffixes.shortest:
            return
        with self._lock:
            while self._size + len(tokens) > self.max_tokens:
                self._evict()
            text, insert = self._suffixes.tokens, self._suffixes.insert
            text.append(_BREAK)
            start = self._suffixes.first + len(text)
            text.extend(tokens)
            for end in range(start, start + len(tokens) - 1):  # nothing follows the last token
                insert(end)
            self._lengths.append(len(tokens))
            self._size += len(tokens)

    def propose(self, suffix: Sequence[int], limit: int) -> Copy:
        """What followed the latest of the longest matches of `suffix`.

        Args:
            suffix: the last tokens of a text: `max_match` of them decide what is copied, up to 64 are counted as
                `match`.
            limit: tokens wanted.

        Returns:
            A `Copy` with 1 to `limit` tokens, fewer where the document ends, or with none.
        """
        with self._lock:
            source = self._suffixes.find(suffix)
            match = self._suffixes.agreement(source, suffix) if source >= 0 else 0
            if match < self._suffixes.shortest or limit < 1:
                return Copy([], 0)
            at = source + 1 - self._suffixes.first
            tokens = self._suffixes.tokens[at : at + limit].tolist()
        return Copy(tokens[: tokens.index(_BREAK)] if _BREAK in tokens else tokens, match)

    def documents(self) -> list[list[int]]:
        """The documents kept, oldest first."""
        with self._lock:
            at, documents = self._oldest - self._suffixes.first, []
            for length in self._lengths:
                documents.append(self._suffixes.tokens[at + 1 : at + 1 + length].tolist())
                at += 1 + length
        return documents

    def save(self, path: str | Path) -> None:
        """Write the documents as one safetensors file with tensors `tokens` and `lengths` (no pickle)."""
        documents = self.documents()
        header = {
            "format": "hf_dspark.copy_memory",
            "max_tokens": self.max_tokens,
            "vocabulary_size": self.vocabulary_size or "",
            "tokenizer": self.tokenizer or "",
            "min_match": self._suffixes.shortest,
            "max_match": self._suffixes.longest,
            "learns": int(self.learns),
        }
        tensors = {
            "tokens": torch.tensor([token for document in documents for token in document], dtype=torch.int32),
            "lengths": torch.tensor([len(document) for document in documents], dtype=torch.int64),
        }
        save_file(tensors, path, {name: str(value) for name, value in header.items()})

    @classmethod
    def load(cls, path: str | Path, vocabulary_size: int | None = None, tokenizer: str | None = None) -> "CopyMemory":
        """Read what `save` wrote and index it again, a few seconds per million tokens.

        Args:
            path: the file.
            vocabulary_size, tokenizer: what the ids must belong to; None is not compared.

        Raises:
            ValueError: another kind of file, or ids of another vocabulary.
        """
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != "hf_dspark.copy_memory":
                raise ValueError(
                    f"{path} is no CopyMemory: its header names another format. Give a file that CopyMemory.save wrote."
                )
            tokens, lengths = file.get_tensor("tokens"), file.get_tensor("lengths")
        memory = cls(
            int(header["max_tokens"]),
            int(header["vocabulary_size"]) if header["vocabulary_size"] else None,
            header["tokenizer"] or None,
            int(header["min_match"]),
            int(header["max_match"]),
            bool(int(header["learns"])),
        )
        memory.bind(vocabulary_size, tokenizer)
        for document in tokens.split(lengths.tolist()):
            memory.add(document.tolist())
        return memory

    def _evict(self) -> None:
        suffixes, length = self._suffixes, self._lengths.popleft()
        for end in range(self._oldest + 1, self._oldest + length):
            suffixes.remove(end)
        self._size -= length
        self._oldest += 1 + length
        unused = self._oldest - suffixes.first
        if 2 * unused > len(suffixes.tokens):  # seldom, so that moving the rest costs each token a constant share
            del suffixes.tokens[:unused]
            suffixes.first = self._oldest


def _checked(tokens: Sequence[int]) -> array:
    """The token ids as 32-bit integers, all or none."""
    ids = array("i", tokens)
    if ids and min(ids) < 0:
        raise ValueError(
            f"token id {min(ids)} is negative, which no text contains: pass the row's tokens without padding."
        )
    return ids
