"""What the loop decides from measurements: how much to draft, how much of it to verify, and whether to loop.

Decisions use past rounds, measured seconds, and confidences of earlier drafts only, so every verifier stays exact. They rest
on timings, so under `ratio` and `block` the tokens (not their distribution) differ from run to run.
"""

import os
from collections import Counter, deque
from pathlib import Path
from statistics import median
from weakref import WeakKeyDictionary

import torch

from hf_dspark.drafting.proposer import Draft
from hf_dspark.scheduling.correction import Correction
from hf_dspark.scheduling.cost import GENERIC, CostTable, LatencyCurve, OnlineCost, machine_key
from hf_dspark.scheduling.gate import OnlineGate
from hf_dspark.scheduling.headless import predict_confidence, step_features
from hf_dspark.scheduling.prefix import lookahead
from hf_dspark.scheduling.throttle import DraftThrottle


class StaticGate:
    """DLoop's gate (arXiv 2610.07659): another stage while the latest block's summed log-probability is at least `value`."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, scores: list[list[float]], rows: int) -> list[bool]:
        """`scores` [R][S]: each stage's score so far, of the rows that may go on; `rows` are active in all."""
        return [s[-1] >= self.value for s in scores]


class AutoGate:
    """Another stage where the tokens it is expected to add are worth more than the time it takes.

    A stage adds its own `a` accepted drafts if everything before it is accepted (chance f); the bonus token comes in any
    case. With t seconds per token it pays iff f a t >= T_d + dT, its draft time and what it adds to the verification. f is
    learnt from the stages' summed log-probabilities, `a` by stage, t and the costs are measured. (The break-even point of
    [`scheduling.break_even`] is the case where every stage is accepted like a first one: then a t = T_d + T_v - t. Measured
    by replay that loops too little in easy text, and too much where later stages are poor.) The rows of a batch share the
    stage's time, so they decide together.
    """

    def __init__(self, policy: "Policy"):
        self.policy = policy
        policy.loops = True

    def __call__(self, scores: list[list[float]], rows: int) -> list[bool]:
        return [self.policy.another_stage(scores)] * len(scores)


class Policy:
    """Measurements of one drafter on one target, kept across generate calls, and the decisions drawn from them.

    Args:
        block: drafts per stage. max_stages: most stages per round. prior: measured costs of this machine, if there are any.
        recursive: drafting takes a forward per draft (EAGLE-3) and not one per block.
    """

    PLAIN_STEPS = 3  # at every new batch size, since what drafting is compared with grows with it
    FADE = 0.98  # of the first stage's acceptance and of the time per token, per round
    FADE_LATER = 0.995  # of later stages' acceptance: they are seen rarely, and what the stage before suggests must wear off
    WEIGHT = 1.5  # observations that the stage before counts for
    PROBING, PROBED = 0.01, 0.5  # share of the time spent on stages that seem not to pay, at what chance

    def __init__(self, block: int, max_stages: int, prior: CostTable | None = None, recursive: bool = False):
        self.block, self.loops = block, False
        self.cost = OnlineCost(prior or GENERIC, recursive=recursive)
        self.throttle = DraftThrottle(block, self.cost)
        self.gate = OnlineGate(max_stages)
        self.correction = Correction(block * max_stages)
        self.recursive, self.confident = recursive, False
        self._told: list[list[float]] | None = None  # corrected chances of this round's drafts
        self.rounds = self.plain_rounds = self.looped_rounds = 0
        self.rows, self.context = 1, 0.0
        self._plain: Counter[int] = Counter()  # plain steps by number of rows
        self._reached, self._accepted = [0.0] * max_stages, [0.0] * max_stages  # by stage: how often, drafts of it accepted
        self._seconds = self._tokens = self._savings = 0.0
        self._single, self._further = 0, deque(maxlen=32)  # times of later stages, in first ones

    def begin(self, rows: int, context: float) -> None:
        """A round of `rows` active rows with `context` tokens on average."""
        self.rows, self.context, self._told = rows, context, None
        self.rounds += 1

    # ------------------------------------------------------------------ decisions

    def plan(self) -> int:
        """Drafts per row for the coming round; 0 is a plain step."""
        near = sum(n for rows, n in self._plain.items() if rows <= 1.5 * self.rows and self.rows <= 1.5 * rows)
        planned = self.throttle.next_length(self.rows, self.context) if near >= self.PLAIN_STEPS else 0
        if planned and self.confident and not self.recursive:
            planned = self.block  # a block is paid for as a whole, and confidences tell rounds apart
        self.plain_rounds += planned == 0
        return planned

    def prune(self, draft: Draft) -> list[int]:
        """Drafts to verify of each row, [A], by [`lookahead`] over its confidences, corrected by what became of earlier ones: a
        head that is sure of too much wastes verifications, one that doubts too much throws drafts away, and neither would ever
        show. The draft's own time is spent by now and does not count."""
        if draft.confidence is None or not draft.tokens.shape[1]:
            return draft.lengths
        self.confident = True
        chances, past = self.correction(draft.confidence), self.throttle.history.conditional()
        past = (past + past[-1:] * draft.tokens.shape[1])[: -(-draft.tokens.shape[1] // self.block) * self.block]
        self._told = [row[:n] or [0.0] for row, n in zip(chances.tolist(), draft.lengths)]  # nothing offered gains nothing
        curve = self.cost.curve(self.rows, self.context, stages=0).isotonic()
        rate, offered = self.throttle.rate(self.rows, self.context), torch.tensor(draft.lengths)
        length = lookahead(chances, past, curve, rate, offered, draft.room, self.block)
        return [min(n, length) for n in draft.lengths]

    def another_stage(self, scores: list[list[float]]) -> bool:
        """Whether rows with these stage `scores` [R][S] draft one more, see [`AutoGate`].

        What is measured only while looping could keep looping off for ever, so now and then a stage is drafted all the same.
        """
        stage = len(scores[0])
        chance = float(self.gate.chain_probability(torch.tensor(scores)).sum())
        if chance >= self.break_even(stage):
            return True
        # A price is doubted too: measured once too high, it would never be measured again.
        price = min(self._price(stage), self._usual_price(stage))
        if self._savings < price or chance < self.PROBED * len(scores):
            return False
        self._savings -= price
        return True

    def break_even(self, stage: int) -> float:
        """Rows whose drafts so far must be expected to be accepted, for one more stage after `stage` to pay."""
        return self._price(stage) / (self._next_accepted(stage) * self._seconds_per_token())

    def _price(self, stage: int) -> float:
        """Seconds that one more stage takes, drafted and verified."""
        curve, tokens = self._curve(), self.rows * (1 + stage * self.block)
        return self._stage_seconds(1) + curve(tokens + self.rows * self.block) - curve(tokens)

    def _usual_price(self, stage: int) -> float:
        """As [`_price`], the verification growing as the prior says."""
        prior, tokens = self.cost.prior, self.rows * (1 + stage * self.block)
        before, after = (prior.verify_seconds(t, self.rows, self.context) for t in (tokens, tokens + self.rows * self.block))
        return self._stage_seconds(1) + (after / before - 1) * self.cost.verify_seconds(tokens, self.rows, self.context)

    def _next_accepted(self, stage: int) -> float:
        """Drafts of stage `stage` (from 0) that are accepted if all before it were."""
        mean, weight = 0.35 * self.block, 0.5
        for reached, accepted in zip(self._reached[: stage + 1], self._accepted):
            mean = (accepted + weight * mean) / (reached + weight)
            weight = self.WEIGHT
        return mean

    def _seconds_per_token(self) -> float:
        if self._tokens:
            return self._seconds / self._tokens
        return self._curve()(self.rows * (1 + self.block)) / self.rows / (1 + self._next_accepted(0))

    def _curve(self) -> LatencyCurve:
        """Seconds of a round of one stage by the tokens verified."""
        return self.cost.curve(self.rows, self.context, drafts=self.block).isotonic()

    def _stage_seconds(self, later: int) -> float:
        """Of `later` stages after the first."""
        ratio = median(self._further) if self._further else 1.0
        return later * ratio * self.cost.draft_seconds(self.rows, self.context, self.block)

    # ------------------------------------------------------------------ measurements

    def observe(self, draft: Draft, verified: list[int], accepted: list[int], fed: int, draft_seconds, verify_seconds) -> None:
        """Learn from a round: `verified`, `accepted` [A] drafts; the target was fed `fed` tokens per row."""
        drafted, stages = draft.tokens.shape[1], max(draft.stages, default=1)
        self.cost.record_verify(verify_seconds, self.rows * fed, self.rows, self.context)
        if not drafted:
            self._plain[self.rows] += 1
        else:
            self._observe_draft_time(draft_seconds, stages, min(drafted, self.block))
            self.looped_rounds += stages > 1
            if self._told is not None:
                self.correction.observe(draft.confidence, verified, accepted)
                self.throttle.history.expect(self._told)
            else:
                self.throttle.observe(accepted, verified)
        if self.loops:
            self._observe_stages(draft, verified, accepted, stages, fed)

    def _observe_draft_time(self, seconds: float, stages: int, drafts: int) -> None:
        """A later stage extends no context from the target, so it has a time of its own."""
        first = self.cost.draft_seconds(self.rows, self.context, self.block)
        self._single += stages == 1
        if stages == 1 or self._single < 4:
            self.cost.record_draft(seconds / stages, drafts, self.rows, self.context)
        else:
            self._further.append(max(seconds - first, 0.0) / (stages - 1) / first)

    def _observe_stages(self, draft, verified, accepted, stages, fed) -> None:
        seconds = self._stage_seconds(stages - 1) + self._curve()(self.rows * fed)
        self._seconds = self.FADE * self._seconds + seconds
        self._tokens = self.FADE * self._tokens + sum(accepted) + len(accepted)
        self._savings += self.PROBING * seconds
        K = self.block
        for s in range(len(self._reached)):
            mine = [min(a - s * K, K) for a, n in zip(accepted, verified) if n >= (s + 1) * K and a >= s * K]
            fade = self.FADE_LATER if s else self.FADE
            self._reached[s], self._accepted[s] = fade * self._reached[s] + len(mine), fade * self._accepted[s] + sum(mine)
        scores = stage_scores(draft, K)
        if scores is not None:
            self.gate.observe(scores, torch.tensor(accepted), torch.tensor(verified), K)

    def note(self) -> str:
        """What was decided since the last note, and what it rests on: what was measured, never what is merely assumed."""
        rows, cost, chances = self.rows, self.cost, self.throttle.history.conditional()
        profiled, drafted = cost.prior is not GENERIC, cost.draft_stages() > 0  # a profiled prior is this machine's own
        plain = cost.verify_seconds(rows, rows, self.context) if profiled or cost.plain_steps() else None
        draft = cost.draft_seconds(rows, self.context, self.block) if profiled or drafted else None
        plain, draft = ("not measured yet" if s is None else f"{1e3 * s:.1f} ms" for s in (plain, draft))
        while len(chances) > 1 and chances[-1] == chances[-2]:  # no draft was ever judged there: the place before stands in
            chances.pop()
        accepted = ", ".join(f"{c:.2f}" for c in chances) if drafted else "not measured yet"
        text = (
            f"{self.plain_rounds} of {self.rounds} rounds were plain steps. Measured in this call and those before it, for "
            f"{rows} row{'s' * (rows != 1)}: a plain step {plain}, a draft {draft}, chances of drafts 1, 2, ... once those "
            f"before are accepted {accepted}."
        )
        if self.loops and self.block and drafted:
            chance = self.break_even(1) / self.rows
            pays = f"pays from a chance of {chance:.2f} on that the first is accepted whole" if chance < 1 else "never pays"
            text += f" {self.looped_rounds} rounds had several stages; a second one {pays}."
        self.rounds = self.plain_rounds = self.looped_rounds = 0
        self.loops = False
        return text


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
    """The drafter's policy on this target, made on first use; `drafter.policy`, where one is set, stands in for it."""
    given = getattr(drafter, "policy", None)
    if given is not None:
        return given
    recursive, asked = drafter.config.recursive, speculation.num_draft_tokens
    longest = drafter.config.max_block
    block = longest if asked is None else min(asked, longest) if drafter.config.fixed_block else asked
    policies = _POLICIES.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {})
    key = block, str(target.dtype), speculation.max_draft_stages
    if key not in policies:
        table = profile_path(drafter, target)
        prior = CostTable.load(table) if table.exists() else None
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
