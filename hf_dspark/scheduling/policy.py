"""What the loop decides from measurements: how much to draft, how much of it to verify, and whether to loop.

Decisions use past rounds, measured seconds, and confidences of earlier drafts only, so every verifier stays exact. They
rest on timings, so under `ratio` and `block` the tokens (not their distribution) differ from run to run.
"""

from collections import Counter, deque
from statistics import median

import torch

from .choice import choose
from .copying import CopyExpectation
from .correction import Correction
from .cost import GENERIC, CostTable, LatencyCurve, OnlineCost
from .gate import OnlineGate
from .prefix import algorithm1, lookahead
from .throttle import DraftThrottle


class StaticGate:
    """DLoop's gate (arXiv 2610.07659): another stage while the latest block's summed log-probability is at least
    `value`."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, scores: list[list[float]], rows: int) -> list[bool]:
        """`scores` [R][S]: each stage's score so far, of the rows that may go on; `rows` are active in all."""
        return [s[-1] >= self.value for s in scores]


class AutoGate:
    """Another stage where the tokens it is expected to add are worth more than the time it takes.

    A stage adds its own `a` accepted drafts if everything before it is accepted (chance f); the bonus token comes in
    any case. With t seconds per token it pays iff f a t >= T_d + dT, its draft time and what it adds to the
    verification. f is learnt from the stages' summed log-probabilities, `a` by stage, t and the costs are measured.
    (The break-even point of [`scheduling.break_even`] is the case where every stage is accepted like a first one: then
    a t = T_d + T_v - t. Measured by replay that loops too little in easy text, and too much where later stages are
    poor.) The rows of a batch share the stage's time, so they decide together.
    """

    def __init__(self, policy: "Policy"):
        self.policy = policy
        policy.loops = True

    def __call__(self, scores: list[list[float]], rows: int) -> list[bool]:
        return [self.policy.another_stage(scores)] * len(scores)


class Policy:
    """Measurements of one drafter on one target, kept across generate calls, and the decisions drawn from them.

    Args:
        block: drafts per stage. max_stages: most stages per round. prior: measured costs of this machine, if there are
            any.
        recursive: drafting takes a forward per draft (EAGLE-3) and not one per block.
    """

    PLAIN_STEPS = 3  # at every new batch size, since what drafting is compared with grows with it
    FADE = 0.98  # of the first stage's acceptance and of the time per token, per round
    FADE_LATER = (
        0.995  # of later stages' acceptance: they are seen rarely, and what the stage before suggests must wear off
    )
    WEIGHT = 1.5  # observations that the stage before counts for
    SHAPE_ROUNDS, SHAPE_EVERY = (
        6,
        64,
    )  # trees and chains tried before they are compared, and how often the other is tried
    PROBING, PROBED = 0.01, 0.5  # share of the time spent on stages that seem not to pay, at what chance

    def __init__(self, block: int, max_stages: int, prior: CostTable | None = None, recursive: bool = False):
        self.block, self.loops = block, False
        self.cost = OnlineCost(prior or GENERIC, recursive=recursive)
        self.throttle = DraftThrottle(block, self.cost)
        self.gate = OnlineGate(max_stages)
        self.correction = Correction(block * max_stages)
        self.copying = {source: CopyExpectation() for source in ("copy", "memory")}
        self.recursive, self.confident, self.measuring = recursive, False, False
        self._chances: list[list[float]] | None = None  # corrected chances of this round's drafts
        self.rounds = self.plain_rounds = self.looped_rounds = 0
        self.rows, self.context, self.packed = 1, 0.0, False
        self._plain: Counter[int] = Counter()  # plain steps by number of rows
        self._reached, self._accepted = (
            [0.0] * max_stages,
            [0.0] * max_stages,
        )  # by stage: how often, drafts of it accepted
        self._seconds = self._tokens = self._savings = 0.0
        self._tree_accepted = self._tree_expected = 0.0
        self._shapes: dict[tuple, tuple] = {}  # (shape, size of the batch) -> faded tokens and seconds, and rounds
        self._tree_seconds: deque[float] = deque(maxlen=32)  # of building trees
        self._single, self._further = 0, deque(maxlen=32)  # times of later stages, in first ones

    def begin(self, rows: int, context: float, packed: bool = False) -> None:
        """A round of `rows` active rows with `context` tokens on average; `packed`: its forward costs the tokens sent,
        and not the longest row's for every row."""
        self.rows, self.context, self.packed, self._chances = rows, context, packed, None
        self.rounds += 1

    # ------------------------------------------------------------------ decisions

    def choose(self, copies: list[tuple], scheduled: bool) -> tuple[list[int], int]:
        """How much of each row's copy is verified, and how many drafts the other rows get.

        Args:
            copies: per row what could be copied, with its source; see `drafting.copies.offers`.
            scheduled: whether the drafter's part is decided here too, see [`plan`].

        Returns:
            tokens of each row's copy [A], 0 where it doesn't copy, and drafts per row of the others.
        """
        chances = [self.copying[source].expected(copy.match, len(copy.tokens)) for copy, source in copies]
        if not any(chances):
            return [0] * len(copies), self.plan() if scheduled else self.block
        curve = self.cost.curve(self.rows, self.context, stages=0).isotonic()
        draft_seconds = self.cost.draft_seconds(self.rows, self.context, self.block) if self.block else 0.0

        def best(drafts, optional):
            return choose(chances, drafts, lambda width: curve(self.rows * width), draft_seconds, optional)

        choice = best(self.throttle.history.survival(), scheduled)
        if all(choice.copies):
            return choice.copies, 0
        planned = self.plan() if scheduled else self.block
        if planned:
            return choice.copies if choice.drafts else best(self.throttle.history.survival(), False).copies, planned
        return [0] * len(copies) if self.measuring else best([], True).copies, 0

    def plan(self) -> int:
        """Drafts per row for the coming round; 0 is a plain step."""
        near = sum(n for rows, n in self._plain.items() if rows <= 1.5 * self.rows and self.rows <= 1.5 * rows)
        self.measuring = near < self.PLAIN_STEPS
        planned = 0 if self.measuring else self.throttle.next_length(self.rows, self.context)
        self.measuring |= self.throttle.measuring
        if planned and self.confident and not self.recursive:
            planned = self.block  # a block is paid for as a whole, and confidences tell rounds apart
        return planned

    def prune(self, draft) -> list[int]:
        """Drafts to verify of each row, [A], by [`lookahead`] over its confidences, corrected by what became of earlier
        ones: a head that is sure of too much wastes verifications, one that doubts too much throws drafts away, and
        neither would ever show. The draft's own time is spent by now and does not count. Copies were settled before,
        and stay."""
        mine = _drafted(draft)
        if draft.confidence is None or not mine:
            return draft.lengths
        self.confident = True
        offered, past = [draft.lengths[i] for i in mine], self.throttle.history.conditional()
        chances = self.correction(draft.confidence[mine])
        past = (past + past[-1:] * draft.tokens.shape[1])[: -(-draft.tokens.shape[1] // self.block) * self.block]
        self._chances = [row[:n] or [0.0] for row, n in zip(chances.tolist(), offered)]  # nothing offered gains nothing
        curve = self.cost.curve(self.rows, self.context, stages=0).isotonic()
        rate, room = self.throttle.rate(self.rows, self.context), [draft.room[i] for i in mine]
        if self.packed:
            chosen = self._per_row(chances, past, curve, rate, offered, room)
        else:
            latency = self._padded_latency(draft, curve, mine)
            length = lookahead(chances, past, latency, rate, torch.tensor(offered), room, self.block)
            chosen = [length] * len(mine)
        return _pruned(draft, mine, chosen)

    def _per_row(self, chances, past, curve, rate, offered: list[int], room: list[int]) -> list[int]:
        """Each row's own length. What the other rows will send is expected from earlier rounds: their drafts of this
        one must not depend on each other's order."""
        others, chosen = (self.rows - 1) * (1 + sum(self.throttle.history.survival())), []
        for j, (n, most) in enumerate(zip(offered, room)):
            one = chances[j : j + 1], past, lambda tokens: curve(others + tokens), rate
            chosen.append(lookahead(*one, torch.tensor([n]), [most], self.block))
        return chosen

    def _padded_latency(self, draft, curve, mine: list[int]):
        """Seconds by the tokens of the rows `mine`, in a forward as wide as its longest row, copies included."""
        copied = max((n for n, source in zip(draft.lengths, draft.sources) if source != "drafter"), default=0)
        return lambda tokens: curve(self.rows * max(tokens / len(mine), 1 + copied))

    def allot(self, draft) -> list[int]:
        """Drafts to verify of each row, [A], by DSpark's Algorithm 1 (arXiv 2607.05147) over the confidences as they
        are; without a confidence head, over what became of earlier drafts. Copies stay."""
        mine = _drafted(draft)
        if not mine:
            return draft.lengths
        offered, width = [draft.lengths[i] for i in mine], draft.tokens.shape[1]
        if draft.confidence is None:
            past = self.throttle.history.conditional()
            chances = torch.tensor([(past + past[-1:] * width)[:width]] * len(mine))
        else:
            chances = draft.confidence[mine].sigmoid()
            self._chances = [row[:n] or [0.0] for row, n in zip(chances.tolist(), offered)]
        curve = self.cost.curve(self.rows, self.context, drafts=self.block).isotonic()
        latency = self._padded_latency(draft, curve, mine)
        if self.packed:
            others = sum(1 + n for n, source in zip(draft.lengths, draft.sources) if source != "drafter")
            latency = lambda tokens: curve(others + tokens)  # noqa: E731
        return _pruned(
            draft, mine, algorithm1(chances, latency, torch.tensor(offered), padded=not self.packed).tolist()
        )

    def tree_size(self, trees: list) -> int:
        """Nodes of each row's tree worth verifying, from the drafter's own probabilities of the paths, corrected by how
        many were accepted before. With children drawn from laws it is asked before they are drawn."""
        chances = [sorted(tree.scores.exp().tolist(), reverse=True) for tree in trees]
        curve = self.cost.curve(self.rows, self.context, stages=0).isotonic()
        draft, tokens = self.rows * median(self._tree_seconds or [0.0]), float(self.rows)
        best, size = tokens / (draft + curve(self.rows)), 0
        for m in range(max(map(len, chances), default=0)):
            tokens += self.tree_worth() * sum(row[m] for row in chances if m < len(row))
            rate = tokens / (draft + curve(self.rows * (2 + m)))
            if rate > best:
                best, size = rate, m + 1
        return size

    def node_price(self) -> float:
        """Chance of being accepted from which on one more token per row is worth its time in the verification: what it adds
        to the forward, in tokens that the time would otherwise give."""
        curve = self.cost.curve(self.rows, self.context, stages=0).isotonic()
        few, many = 4, 12
        added = (curve(self.rows * many) - curve(self.rows * few)) / (many - few)
        tokens, seconds, _ = self._shapes.get(self._shape("tree"), (0.0, 0.0, 0))
        rate = tokens / seconds if seconds else 2.0 * self.rows / curve(self.rows)
        return min(1.0, added / self.rows * rate)

    def tree_worth(self) -> float:
        """Accepted drafts of trees over those expected, 1 before any tree."""
        return (self._tree_accepted + 2.0) / (self._tree_expected + 2.0)

    def use_tree(self) -> bool:
        """Whether the coming round is a tree and not a chain: what gave more tokens per second in batches of about this
        size, and now and then the other."""
        tree, chain = (self._shapes.get(self._shape(shape), (0.0, 0.0, 0)) for shape in ("tree", "chain"))
        if min(tree[2], chain[2]) < self.SHAPE_ROUNDS or self.rounds % self.SHAPE_EVERY == 0:
            return tree[2] < chain[2]
        return tree[0] * chain[1] > chain[0] * tree[1]

    def _shape(self, shape: str) -> tuple[str, int]:
        return shape, (self.rows - 1).bit_length()  # batches of 1, 2, 3-4, 5-8, ... rows are compared among themselves

    def _observe_shape(self, draft, accepted: list[int], fed: float, draft_seconds: float) -> None:
        """Count a round's tokens and its seconds: typical ones, as a stray slice of another process mustn't decide."""
        shape, spent = "chain", 0.0
        if draft.parents is not None:
            self._tree_accepted = self.FADE * self._tree_accepted + sum(accepted)
            self._tree_expected = self.FADE * self._tree_expected + sum(draft.expected)
            self._tree_seconds.append(draft_seconds / self.rows)
            shape, spent = "tree", self.rows * median(self._tree_seconds)
        elif _drafted(draft):
            spent = self.cost.draft_seconds(self.rows, self.context, self.block)
        spent += self.cost.verify_seconds(self.rows * fed, self.rows, self.context)
        tokens, seconds, count = self._shapes.get(self._shape(shape), (0.0, 0.0, 0))
        tokens = self.FADE * tokens + sum(accepted) + len(accepted)
        self._shapes[self._shape(shape)] = tokens, self.FADE * seconds + spent, count + 1

    def another_stage(self, scores: list[list[float]]) -> bool:
        """Whether rows with these stage `scores` [R][S] draft one more, see [`AutoGate`].

        What is measured only while looping could keep looping off for ever, so now and then a stage is drafted all the
        same.
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
        before, after = (
            prior.verify_seconds(t, self.rows, self.context) for t in (tokens, tokens + self.rows * self.block)
        )
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

    def observe(
        self, draft, verified: list[int], accepted: list[int], fed: float, draft_seconds, verify_seconds
    ) -> None:
        """Learn from a round: `verified`, `accepted` [A] drafts; the target was fed `fed` tokens per row on average."""
        self.cost.record_verify(verify_seconds, self.rows * fed, self.rows, self.context)
        mine, stages = _drafted(draft), max(draft.stages, default=1)
        self._observe_shape(draft, accepted, fed, draft_seconds)
        if draft.parents is not None:
            return
        self.plain_rounds += fed == 1 and not mine
        if not mine:
            self._plain[self.rows] += fed == 1
        else:
            ours, hits = [verified[i] for i in mine], [accepted[i] for i in mine]
            drafted = min(draft.tokens.shape[1], self.block)
            self._observe_draft_time(draft_seconds, stages, drafted)
            self.looped_rounds += stages > 1
            if self._chances is not None:
                self.correction.observe(draft.confidence[mine], ours, hits)
                self.throttle.history.expect(self._chances)
            else:
                self.throttle.observe(hits, ours)
        if self.loops and len(mine) == len(verified):
            self._observe_stages(draft, verified, accepted, stages, fed)

    def observe_copies(self, copies: list[tuple], committed: list[list[int]]) -> None:
        """Learn what copies are worth from what the rows said instead, `committed` [A]: a copy needn't be verified for
        that.

        A committed token follows the target's law, so it equals a copied one as often as that would be accepted.
        """
        for (copy, source), tokens in zip(copies, committed, strict=True):
            judged = min(len(copy.tokens), len(tokens))
            right = next((k for k in range(judged) if copy.tokens[k] != tokens[k]), judged)
            self.copying[source].observe(copy.match, judged, right)

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
            self._reached[s], self._accepted[s] = (
                fade * self._reached[s] + len(mine),
                fade * self._accepted[s] + sum(mine),
            )
        scores = stage_scores(draft, K)
        if scores is not None:
            self.gate.observe(scores, torch.tensor(accepted), torch.tensor(verified), K)

    def note(self) -> str:
        """What was decided since the last note, and what it rests on: what was measured, never what is merely
        assumed."""
        rows, cost, chances = self.rows, self.cost, self.throttle.history.conditional()
        profiled, drafted = cost.prior is not GENERIC, cost.draft_stages() > 0  # a profiled prior is this machine's own
        plain = cost.verify_seconds(rows, rows, self.context) if profiled or cost.plain_steps() else None
        draft = cost.draft_seconds(rows, self.context, self.block) if profiled or drafted else None
        plain, draft = ("not measured yet" if s is None else f"{1e3 * s:.1f} ms" for s in (plain, draft))
        while (
            len(chances) > 1 and chances[-1] == chances[-2]
        ):  # no draft was ever judged there: the place before stands in
            chances.pop()
        accepted = ", ".join(f"{c:.2f}" for c in chances) if drafted else "not measured yet"
        text = (
            f"{self.plain_rounds} of {self.rounds} rounds were plain steps. Measured in this call and those before it, "
            f"for {rows} row{'s' * (rows != 1)}: a plain step {plain}"
        )
        if self.block:
            text += f", a draft {draft}, chances of drafts 1, 2, ... once those before are accepted {accepted}"
        text += "."
        if self.loops and self.block and drafted:
            chance = self.break_even(1) / self.rows
            pays = (
                f"pays from a chance of {chance:.2f} on that the first is accepted whole"
                if chance < 1
                else "never pays"
            )
            text += f" {self.looped_rounds} rounds had several stages; a second one {pays}."
        self.rounds = self.plain_rounds = self.looped_rounds = 0
        self.loops = False
        return text


def stage_scores(draft, block: int) -> torch.Tensor | None:
    """Summed log-probability [A, S] of every whole stage, None without one."""
    whole = draft.log_q.shape[1] // block if block else 0
    return draft.log_q[:, : whole * block].unflatten(1, (whole, block)).sum(-1) if whole else None


def _pruned(draft, rows: list[int], chosen: list[int]) -> list[int]:
    """The draft's lengths, those of `rows` cut to what was `chosen`."""
    lengths = list(draft.lengths)
    for i, n in zip(rows, chosen, strict=True):
        lengths[i] = min(lengths[i], n)
    return lengths


def _drafted(draft) -> list[int]:
    """The rows whose drafts are the drafter's."""
    return [i for i, source in enumerate(draft.sources) if source == "drafter"]
