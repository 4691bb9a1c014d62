"""What one round proposes: the tokens, how they hang together, and the laws they were drawn from."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The proposal of one round for A active rows. Never written to: what is verified is the policy's return value.

    Args:
        tokens (`torch.Tensor`): [A, N] target ids.
        lengths (`list[int]`): [A] drafts offered; a row's drafts behind its length are filling.
        parents (`torch.Tensor`, *optional*): [A, N] the draft each one follows, -1 for the anchor. Parents come before
            their children, so the first n drafts of a row are a whole proposal for every n. `None` is a chain: 0
            follows the anchor, k follows k - 1.
        q (`torch.Tensor`, *optional*): [A, N, V] the distributions the drafts were drawn from; `None` for deterministic
            ones.
        log_q (`torch.Tensor`): [A, N] log-probabilities of the tokens at temperature 1, unwarped.
        confidence (`torch.Tensor`, *optional*): [A, N] calibrated logits of being accepted once the drafts before are.
        stages (`list[int]`): [A] drafting stages, 1 also where nothing is drafted.
        block (`int`): drafts of a whole stage.
        room (`list[int]`): [A] most drafts there could have been, settled before the first of them.
        sources (`list[str]`): [A] where each row's drafts come from: "drafter", "copy", "memory" (a copy of another
            text), "tree", or "none".
        matches (`list[int]`): [A] tokens of the text that a copy matched; 0 elsewhere.
        expected (`list[float]`): [A] drafts of a tree that are accepted by the drafter's own account; empty for chains.
    """

    tokens: torch.Tensor
    lengths: list[int]
    parents: torch.Tensor | None = None
    q: torch.Tensor | None = None
    log_q: torch.Tensor
    confidence: torch.Tensor | None = None
    stages: list[int]
    block: int
    room: list[int]
    sources: list[str] = field(default_factory=list)
    matches: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)

    def __post_init__(self):
        source = "drafter" if self.tokens.shape[1] else "none"
        object.__setattr__(self, "sources", self.sources or [source] * len(self.lengths))
        object.__setattr__(self, "matches", self.matches or [0] * len(self.lengths))

    @classmethod
    def empty(cls, rows: int, device, block: int = 0, room: list[int] | None = None) -> "Draft":
        """No drafts for `rows` rows: verifying them is a plain step."""
        tokens = torch.zeros(rows, 0, dtype=torch.long, device=device)
        return cls(
            tokens=tokens,
            lengths=[0] * rows,
            log_q=tokens.float(),
            stages=[1] * rows,
            block=block,
            room=room or [0] * rows,
        )
