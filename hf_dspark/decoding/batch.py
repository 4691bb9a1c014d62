"""The rows at work: what was asked, what each has so far, and what they hold together. Rows come and go between
rounds."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from hf_dspark.drafting.copying import CopyIndex
from hf_dspark.drafting.proposer import Proposer
from hf_dspark.modeling.draft_cache import BUCKET
from hf_dspark.verification.commit import commit, row_stopped
from hf_dspark.verification.probabilities import Scorer

from .cache import TargetCache
from .outputs import RowOutputs


@dataclass(eq=False, kw_only=True)
class Settings:
    """What the rows of one call share.

    Args:
        do_sample (`bool`), seed (`int`): sample with keyed noise, or decode greedily.
        stop_ids (`frozenset[int]`): tokens that end a row.
        criteria: transformers' stopping criteria, without those that `stop_ids` and the budgets stand for.
        scorer ([`Scorer`]): applies the call's processors.
    """

    do_sample: bool
    seed: int
    stop_ids: frozenset[int]
    criteria: object
    scorer: Scorer


@dataclass(eq=False, kw_only=True)
class Request:
    """One text to write.

    Args:
        key (`Hashable`): the caller's name for it, given back with every commit.
        prompt (`list[int]`): token ids, without pads.
        budget (`int`): most new tokens, at least 1.
        settings ([`Settings`]): of its call. place (`int`): its row in the call's scorer.
        stream (`int`): of the keyed noise.
        shown (`torch.Tensor`): [columns] the prompt as stopping criteria see it, pads included.
        outputs ([`RowOutputs`]): what is kept of its tokens.
    """

    key: Hashable
    prompt: list[int]
    budget: int
    settings: Settings
    place: int
    stream: int
    shown: torch.Tensor
    outputs: RowOutputs


@dataclass
class Commit:
    """Tokens of one row that became output in a round, and why the row ends with them, if it does: "stop", "length",
    "criteria", or "error"."""

    key: Hashable
    tokens: list[int]
    reason: str | None
    error: Exception | None = None


class Row:
    """A request at work. `n` tokens are committed; the last of them, the anchor, hasn't been read by the target yet.

    `error`: what the request's own processors or criteria raised; it ends the row, without the round's tokens.
    """

    def __init__(self, request: Request, copying: int | None = None):
        self.request, self.settings, self.outputs = request, request.settings, request.outputs
        self.tokens = list(request.prompt)
        self.start = len(self.tokens)
        self.stopped = self.text = self.error = None
        self.copies = None if copying is None else CopyIndex(self.tokens, copying)

    @property
    def n(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        return self.n - self.start

    @property
    def left(self) -> int:
        return self.request.budget - self.generated

    def ask(self, drafts: list[int], scores: dict[int, torch.Tensor]) -> None:
        """Prepare the question to the stopping criteria about a round's `drafts`: `stopped(i)` tells whether one fires
        once i + 1 of them
        (of a tree: of those that [`fill`] put there) are in place. `scores` {position: [V]} are filled as they become
        known."""
        self.stopped = None
        if not self.settings.criteria:
            return
        shown = self.request.shown
        new = torch.tensor([*self.tokens[self.start :], *drafts, 0], dtype=torch.long, device=shown.device)
        self.text = torch.cat([shown, new])[None]
        before, seen = list(self.outputs.scores), None
        if self.outputs.wants_scores:
            seen = lambda i: before + [scores[k] for k in range(i + 1)]  # noqa: E731
        self.stopped = row_stopped(self.settings.criteria, self.text, len(shown) + self.generated, seen)

    def fill(self, tokens: list[int]) -> None:
        """Put what was accepted so far into the text that the criteria are asked about."""
        start = len(self.request.shown) + self.generated
        self.text[0, start : start + len(tokens)] = torch.tensor(tokens, device=self.text.device)

    def commit(self, tokens: list[int]) -> Commit:
        """Take verified `tokens`, up to the first that ends the row."""
        if self.stopped is not None:
            self.fill(tokens)
        try:
            kept, reason = commit(tokens, self.settings.stop_ids, self.left, self.stopped)
        except Exception as error:
            self.error = self.error or error
        if self.error is not None:
            return Commit(self.request.key, [], "error", self.error)
        self.tokens += kept
        if self.copies is not None:
            self.copies.extend(kept)
        return Commit(self.request.key, kept, reason)


@dataclass(eq=False)
class Group:
    """Rows of a batch that share their settings: `rows` [R] are their places in it."""

    settings: Settings
    rows: list[int] = field(default_factory=list)


class Batch:
    """Rows and what they hold together: the committed tokens, the target's cache and the drafter's context.

    Args:
        requests: one per row. cache: the target's, with some first tokens of each prompt already (usually none).
        proposer: the drafter's context of the same tokens. device: of the token buffer.
        copying: the shortest match that texts are copied at; None never copies.
    """

    def __init__(
        self, requests: list[Request], cache: TargetCache, proposer: Proposer, device, copying: int | None = None
    ):
        self.rows = [Row(r, copying) for r in requests]
        self.cache, self.proposer, self.device = cache, proposer, device
        longest = max((row.n for row in self.rows), default=0)
        self.ids = torch.zeros(len(requests), _bucket(longest), dtype=torch.long, device=device)
        if requests:
            filled = [row.tokens + [0] * (longest - row.n) for row in self.rows]
            self.ids[:, :longest] = torch.tensor(filled, device=device)
        self.anchors: torch.Tensor | None = None
        self._groups: list[Group] | None = None

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.n for row in self.rows]

    @property
    def groups(self) -> list[Group]:
        """The rows by their settings."""
        if self._groups is None:
            groups: dict[int, Group] = {}
            for i, row in enumerate(self.rows):
                groups.setdefault(id(row.settings), Group(row.settings)).rows.append(i)
            self._groups = list(groups.values())
        return self._groups

    def commit(self, tokens: list[list[int]]) -> tuple[list[Commit], torch.Tensor]:
        """Take each row's verified tokens. Returns what became output, and the same on the device [A, T], filled with
        zeros."""
        before = self.lengths
        commits = [row.commit(new) for row, new in zip(self.rows, tokens, strict=True)]
        width = max(1, *(len(c.tokens) for c in commits))
        table = [
            [n, max(len(c.tokens) - 1, 0), *c.tokens, *[0] * (width - len(c.tokens))] for n, c in zip(before, commits)
        ]
        table = torch.tensor(table).to(self.device)
        self._reserve(max(before) + width)
        every = torch.arange(len(table), device=self.device)[:, None]
        new = table[:, 2:]
        self.ids[every, table[:, :1] + torch.arange(width, device=self.device)] = new
        self.anchors = new.gather(1, table[:, 1:2])[:, 0]
        return commits, new

    def _reserve(self, length: int) -> None:
        if length > self.ids.shape[1]:
            longer = self.ids.new_zeros(len(self.ids), _bucket(max(length, self.ids.shape[1] * 3 // 2)))
            longer[:, : self.ids.shape[1]] = self.ids
            self.ids = longer

    def prefix(self, row: int, path: torch.Tensor) -> torch.Tensor:
        """The committed tokens of a row and a `path` [k] of drafts behind them, [1, n + k]."""
        committed = self.ids[row, : self.rows[row].n]
        return torch.cat([committed, path])[None] if len(path) else committed[None]

    # ------------------------------------------------------------------ rows that come and go

    def admit(self, other: "Batch") -> None:
        """Take over another batch's rows, below ours."""
        if not other.rows:
            return
        if not self.rows:
            self.__dict__.update(other.__dict__)
            return
        width = max(self.ids.shape[1], other.ids.shape[1])
        self._reserve(width)
        other._reserve(width)
        self.ids = torch.cat([self.ids[:, :width], other.ids[:, :width]])
        self.anchors = torch.cat([self.anchors, other.anchors])
        self.cache.append(other.cache)
        self.proposer.append(other.proposer)
        self.rows, self._groups = self.rows + other.rows, None

    def retire(self, ended: list[int]) -> None:
        """Let the rows `ended` leave. The last rows take their places, so that no other row is copied."""
        order = list(range(len(self.rows)))
        for i in sorted(ended, reverse=True):
            last = order.pop()
            if i < len(order):
                order[i] = last
        self.rows, self._groups = [self.rows[i] for i in order], None
        if not order:
            return
        index = torch.tensor(order, dtype=torch.long)
        self.cache.keep(order)
        self.proposer.keep(order)
        on_device = index.to(self.device)
        self.ids, self.anchors = self.ids[on_device], self.anchors[on_device]


def _bucket(length: int) -> int:
    return -(-max(length, 1) // BUCKET) * BUCKET + BUCKET
