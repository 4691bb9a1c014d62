"""What a speculative generate call returns: statistics per row and round, and the per-token outputs of plain
generate."""

from dataclasses import dataclass, field, fields

import torch
from transformers.generation import GenerateDecoderOnlyOutput

COPIED = ("copy", "memory")  # sources of drafts that no drafter made


def describe_sources(by_source: dict[str, dict[str, int]]) -> str:
    """Example: 'drafter 12 rounds of 1.75 tokens, copy 5 rounds of 4.20 tokens'."""
    parts = []
    for source, counts in by_source.items():
        name, rounds = "plain" if source == "none" else source, counts["rounds"]
        parts.append(f"{name} {rounds} round{'s' * (rounds != 1)} of {counts['emitted'] / rounds:.2f} tokens")
    return ", ".join(parts)


@dataclass(repr=False)
class SpeculationStats:
    """What was drafted, accepted and spent, per output row and round. Reading the prompt (the prefill) is no round.

    Lists are indexed `[row][round]`. A round that ends at a stop token or at the budget counts the tokens it emitted,
    and as verified only the drafts before that end.

    Args:
        acceptance_lengths (`list[list[int]]`): tokens emitted, the bonus token included.
        draft_lengths (`list[list[int]]`): drafts verified.
        accepted_lengths (`list[list[int]]`): drafts accepted.
        draft_stages (`list[list[int]]`): drafting stages.
        sources (`list[list[str]]`): where the drafts came from: "drafter", "copy", "memory", "tree", or "none" for a
            plain step.
        reach (`list[list[int]]`): most drafts that the round could accept: a tree's depth, a chain's length.
        side_branches (`list[list[int]]`): accepted drafts that weren't their parent's first child in a tree.
        draft_seconds (`float`, defaults to 0.0): seconds of drafting, and of extending the drafter's context.
        verify_seconds (`float`, defaults to 0.0): seconds of the target's forward passes in rounds.
        prefill_seconds (`float`, defaults to 0.0): seconds of reading the prompt.
        overhead_seconds (`float`, defaults to 0.0): seconds of rounds outside both models.
        notes (`list[str]`): what `"auto"` settings decided and measured.
    """

    acceptance_lengths: list[list[int]]
    draft_lengths: list[list[int]]
    accepted_lengths: list[list[int]]
    draft_stages: list[list[int]]
    sources: list[list[str]] = field(default_factory=list)
    reach: list[list[int]] = field(default_factory=list)
    side_branches: list[list[int]] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    overhead_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        rows, rounds = len(self.acceptance_lengths), len(self._pooled("acceptance_lengths"))
        text = f"SpeculationStats({rows} row{'s' * (rows != 1)}, {rounds} round{'s' * (rounds != 1)}"
        if rounds:
            text += f", {sum(self._pooled('acceptance_lengths'))} tokens, tau {self.tau:.2f}"
            drafted = any(self._pooled("draft_lengths"))
            text += f", {self.acceptance_rate:.0%} of the drafts accepted" if drafted else ", no drafts"
            if not {"none", "drafter"} >= self.by_source.keys():
                text += f" ({describe_sources(self.by_source)})"
        kinds = ("prefill", "draft", "verify", "overhead")
        text += ", seconds: " + ", ".join(f"{kind} {getattr(self, f'{kind}_seconds'):.2f}" for kind in kinds)
        return "".join([text, *(f"\n  {note}" for note in self.notes), ")"])

    @classmethod
    def empty(cls, rows: int) -> "SpeculationStats":
        return cls(*[[[] for _ in range(rows)] for _ in range(7)])

    @classmethod
    def of(cls, rows: list["RowOutputs"], seconds: "Seconds", notes: list[str]) -> "SpeculationStats":
        """The statistics of finished rows."""
        columns = [[list(column) for column in zip(*row.rounds)] or [[] for _ in range(7)] for row in rows]
        return cls(
            *[[row[i] for row in columns] for i in range(7)],
            draft_seconds=seconds.draft,
            verify_seconds=seconds.verify,
            prefill_seconds=seconds.prefill,
            overhead_seconds=seconds.overhead,
            notes=notes,
        )

    def add(self, row: int, emitted: int, verified: int, accepted: int, stages: int, source: str = "drafter") -> None:
        self.acceptance_lengths[row].append(emitted)
        self.draft_lengths[row].append(verified)
        self.accepted_lengths[row].append(accepted)
        self.draft_stages[row].append(stages)
        self.sources[row].append(source)
        self.reach[row].append(verified)
        self.side_branches[row].append(0)

    @property
    def by_source(self) -> dict[str, dict[str, int]]:
        """Rounds, tokens emitted, drafts verified and drafts accepted of each source of drafts."""
        out: dict[str, dict[str, int]] = {}
        names = ("acceptance_lengths", "draft_lengths", "accepted_lengths")
        for source, *counts in zip(self._pooled("sources"), *map(self._pooled, names)):
            mine = out.setdefault(source, {"rounds": 0, "emitted": 0, "verified": 0, "accepted": 0})
            for name, count in zip(mine, (1, *counts)):
                mine[name] += count
        return out

    def _pooled(self, name) -> list[int]:
        return [x for row in getattr(self, name) for x in row]

    @property
    def tau(self) -> float:
        """Tokens per round, bonus included, pooled over rows and rounds. Example: rounds of 3 and 1 tokens give 2.0."""
        lengths = self._pooled("acceptance_lengths")
        return sum(lengths) / len(lengths) if lengths else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Drafts accepted over drafts verified. Example: 2 of 5 and 0 of 5 give 0.2."""
        verified = sum(self._pooled("draft_lengths"))
        return sum(self._pooled("accepted_lengths")) / verified if verified else float("nan")

    @property
    def accepted_histogram(self) -> list[int]:
        """At k, from 0: rounds that accepted k drafts. Example: rounds of 0, 2 and 2 give [1, 0, 2]."""
        accepted = self._pooled("accepted_lengths")
        return [accepted.count(k) for k in range(max(accepted, default=-1) + 1)]

    @property
    def side_branch_rate(self) -> float:
        """Of the accepted drafts, the share that weren't their parent's first child, which a chain would have
        missed."""
        accepted = sum(self._pooled("accepted_lengths"))
        return sum(self._pooled("side_branches")) / accepted if accepted else float("nan")

    @property
    def conditional_acceptance(self) -> list[float]:
        """At k: of the rounds that verified drafts of depth k and accepted one of each depth before, the share that
        accepted one of that depth too; of a chain, draft k itself. Of the drafter alone: copies say nothing about it,
        see `by_source`."""
        sources = self._pooled("sources") or ["drafter"] * len(self._pooled("draft_lengths"))
        pairs = zip(sources, self._pooled("reach"), self._pooled("accepted_lengths"))
        pairs = [(n, a) for source, n, a in pairs if source not in COPIED]
        out = []
        for k in range(1, max((n for n, _ in pairs), default=0) + 1):
            reached = [a for n, a in pairs if n >= k and a >= k - 1]
            out.append(sum(a >= k for a in reached) / len(reached) if reached else float("nan"))
        return out


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """As plain generate's output, plus `speculation` ([`SpeculationStats`]).

    `past_key_values` is a [`TargetCache`]: pass it on to continue, or call its `to_dynamic()`. In a batch, `scores` and
    `logits` of a row that has ended are zeros.
    """

    speculation: SpeculationStats | None = None


@dataclass
class Seconds:
    """Where a loop's time goes. Drafting and verification end with a copy to the host, so they hold what a device did
    for them."""

    draft: float = 0.0
    verify: float = 0.0
    overhead: float = 0.0
    prefill: float = 0.0

    def add(self, other: "Seconds") -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


class RowOutputs:
    """What is kept of one row: its rounds, and what plain generate can return of committed tokens. Scores and logits;
    hidden states and attentions where the row is the only one, one tuple over layers per generated token, the prompt's
    being the first.

    Args:
        generation_config: of the call; None keeps the rounds alone.
    """

    STATES = ("hidden_states", "attentions")

    def __init__(self, generation_config=None):
        def wants(name):
            asked = getattr(generation_config, f"output_{name}", False)
            return bool(asked and generation_config.return_dict_in_generate)

        self.wants_scores, self.wants_logits = wants("scores"), wants("logits")
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.states: dict[str, list[tuple]] = {name: [] for name in self.STATES if wants(name)}
        self.flags = {f"output_{name}": True for name in self.states}
        self.rounds: list[tuple[int, int, int, int, str, int, int]] = []

    def add(self, logits: torch.Tensor, scores: dict[int, torch.Tensor], count: int) -> None:
        """Keep the first `count` positions of `logits` [L+1, V] and processed `scores` {position: [V]}."""
        if self.wants_logits:
            self.logits.extend(logits[:count].float())
        if self.wants_scores:
            self.scores.extend(scores[i] for i in range(count))

    def add_round(self, emitted, verified, accepted, stages: int, source: str, reach: int, side_branches: int) -> None:
        self.rounds.append((emitted, verified, accepted, stages, source, reach, side_branches))

    def add_states(self, output, count: int, cached: int) -> None:
        """Keep the states of the first `count` tokens fed in a round, behind `cached` ones; the prompt's whole if
        nothing is there yet."""
        for name, kept in self.states.items():
            layers = getattr(output, name)
            if not kept:
                kept.append(tuple(layers))
                continue
            for i in range(count):
                one = [x[..., i : i + 1, :] for x in layers]
                kept.append(tuple(x[..., : cached + i + 1] for x in one) if name == "attentions" else tuple(one))


def stacked(rows: list[RowOutputs], name: str) -> tuple[torch.Tensor, ...] | None:
    """One [B, V] tensor of `name`, "scores" or "logits", per generated column; None where nobody asked."""
    if not getattr(rows[0], f"wants_{name}"):
        return None
    kept = [getattr(row, name) for row in rows]
    blank = torch.zeros_like(next(r[0] for r in kept if r))
    return tuple(torch.stack([r[i] if i < len(r) else blank for r in kept]) for i in range(max(map(len, kept))))
