"""What the loop decides from measurements: how much to draft, how much of it to verify, and whether to loop.

Decisions use past rounds, measured seconds, and confidences of earlier drafts only, so every verifier stays exact. They rest
on timings, so under `ratio` and `block` the tokens (not their distribution) differ from run to run.
"""

import os
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from hf_dspark.drafting.proposer import Draft
from hf_dspark.scheduling.cost import GENERIC, CostTable, OnlineCost, machine_key
from hf_dspark.scheduling.gate import OnlineGate, break_even
from hf_dspark.scheduling.headless import predict_confidence, step_features
from hf_dspark.scheduling.prefix import algorithm1
from hf_dspark.scheduling.throttle import DraftThrottle


class StaticGate:
    """DLoop's gate (arXiv 2610.07659): another stage while the latest block's summed log-probability is at least `value`."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, scores: list[list[float]], rows: int) -> list[bool]:
        """`scores` [R][S]: each stage's score so far, of the rows that may go on; `rows` are active in all."""
        return [s[-1] >= self.value for s in scores]


class AutoGate:
    """The break-even gate: another stage where what it saves, at the measured costs and the chance that every draft so far is
    accepted, is more than what it costs. The rows of a batch share the stage's time, so they decide together."""

    def __init__(self, policy: "Policy"):
        self.policy = policy

    def __call__(self, scores: list[list[float]], rows: int) -> list[bool]:
        stage = len(scores[0])
        needed = self.policy.break_even(stage)
        chance = self.policy.chances(torch.tensor(scores))
        go = chance >= needed
        return go.tolist() if float(chance[go].sum()) >= needed * rows else [False] * len(scores)


class Policy:
    """Measurements of one drafter on one target, kept across generate calls, and the decisions drawn from them.

    Args:
        block: drafts per stage. max_stages: most stages per round. prior: measured costs of this machine, if there are any.
        recursive: drafting takes a forward per draft (EAGLE-3) and not one per block.
    """

    def __init__(self, block: int, max_stages: int, prior: CostTable | None = None, recursive: bool = False):
        self.block = block
        self.cost = OnlineCost(prior or GENERIC, recursive=recursive)
        self.throttle = DraftThrottle(block, self.cost)
        self.gate = OnlineGate(max_stages)
        self.tokens_per_round, self.rounds, self.plain_rounds = 1.0, 0, 0
        self.rows, self.context = 1, 0.0

    def begin(self, rows: int, context: float) -> None:
        """A round of `rows` active rows with `context` tokens on average."""
        self.rows, self.context = rows, context
        self.rounds += 1

    def plan(self) -> int:
        """Drafts per row for the coming round; 0 is a plain step."""
        planned = self.throttle.next_length(self.rows, self.context)
        self.plain_rounds += planned == 0
        return planned

    def prune(self, draft: Draft) -> list[int]:
        """Drafts to verify of each row, [A], by DSpark's Algorithm 1 over its confidences (arXiv 2607.05147).

        The draft's own time enters as one stage's, however many were drafted: their number depends on the drafts themselves.
        """
        if draft.confidence is None or not draft.tokens.shape[1]:
            return draft.lengths
        curve = self.cost.curve(self.rows, self.context, drafts=self.block).isotonic()
        lengths = algorithm1(draft.confidence, curve, torch.tensor(draft.lengths), padded=True)
        return [min(a, b) for a, b in zip(draft.lengths, lengths.tolist())]

    def chances(self, scores: torch.Tensor) -> torch.Tensor:
        """Chance [R] that every draft so far is accepted, from stage scores [R, S]."""
        return self.gate.chain_probability(scores)

    def break_even(self, stage: int) -> float:
        """The chance from which on one more stage pays, after `stage` stages."""
        rows, K = self.rows, self.block
        tokens = rows * (1 + stage * K)
        verify = self.cost.verify_seconds(tokens, rows, self.context)
        more = self.cost.verify_seconds(tokens + rows * K, rows, self.context) - verify
        draft = self.cost.draft_seconds(rows, self.context, K)
        return break_even(draft, verify, more, (draft + verify) / self.tokens_per_round)

    def observe(self, draft: Draft, verified: list[int], accepted: list[int], fed: int, draft_seconds, verify_seconds) -> None:
        """Learn from a round: `verified`, `accepted` [A] drafts; the target was fed `fed` tokens per row."""
        rows, stages = self.rows, max(draft.stages, default=1)
        self.cost.record_verify(verify_seconds, rows * fed, rows, self.context)
        if not draft.tokens.shape[1]:
            return
        self.cost.record_draft(draft_seconds / stages, min(draft.tokens.shape[1], self.block), rows, self.context)
        self.throttle.observe(accepted, verified)
        mean = 1 + sum(accepted) / len(accepted)
        self.tokens_per_round += max(0.05, 1 / self.rounds) * (mean - self.tokens_per_round)
        scores = stage_scores(draft, self.block)
        if scores is not None:
            self.gate.observe(scores, torch.tensor(accepted), torch.tensor(verified), self.block)

    def note(self) -> str:
        """What was decided, in a sentence."""
        cost = self.cost
        plain = cost.verify_seconds(self.rows, self.rows, self.context)
        draft = cost.draft_seconds(self.rows, self.context, self.block)
        chances = ", ".join(f"{c:.2f}" for c in self.throttle.history.conditional())
        return (
            f"{self.plain_rounds} of {self.rounds} rounds were plain steps; at {self.rows} rows a plain step takes "
            f"{1e3 * plain:.1f} ms and a draft {1e3 * draft:.1f} ms, and drafts are accepted with {chances}."
        )


def stage_scores(draft: Draft, block: int) -> torch.Tensor | None:
    """Summed log-probability [A, S] of every whole stage, None without one."""
    whole = draft.log_q.shape[1] // block if block else 0
    return draft.log_q[:, : whole * block].unflatten(1, (whole, block)).sum(-1) if whole else None


def survival_estimate(drafter):
    """`estimate(log_probs, before, k)` of a calibrated drafter without a confidence head (`config.survival_model`), or None."""
    model = getattr(drafter.config, "survival_model", None)
    if model is None or getattr(drafter.config, "confidence_head", False):
        return None
    return lambda log_probs, before, k: predict_confidence(model, step_features(log_probs, before)[:, None], k)[:, 0]


_POLICIES: WeakKeyDictionary = WeakKeyDictionary()


def policy_for(drafter, target, speculation) -> Policy:
    """The drafter's policy on this target, made on first use."""
    block = speculation.num_draft_tokens
    block = drafter.config.max_block if block is None else block
    key = (id(target), block, str(target.dtype), speculation.max_draft_stages)
    policies = _POLICIES.setdefault(drafter, {})
    if key not in policies:
        table = profile_path(drafter, target)
        prior = CostTable.load(table) if table.exists() else None
        recursive = drafter.config.model_type == "hf_eagle3"
        policies[key] = Policy(block, speculation.max_draft_stages, prior, recursive)
    return policies[key]


def profile_path(drafter, target) -> Path:
    """Where this machine's measured costs of the pair are kept (written by `hf-dspark profile`)."""
    from huggingface_hub import constants

    name = f"{target.config.name_or_path or type(target).__name__}+{drafter.config.name_or_path or type(drafter).__name__}"
    key = machine_key(name, target.dtype, str(target.device))
    home = Path(os.environ.get("HF_DSPARK_CACHE", Path(constants.HF_HOME) / "hf_dspark"))
    safe = "".join(c if c.isalnum() or c in "-.+" else "_" for c in "-".join(map(str, key.values())))
    return home / "profiles" / f"{safe[-150:]}.json"
