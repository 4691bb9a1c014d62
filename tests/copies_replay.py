"""What copies are worth along known answers. Run by hand: `PYTHONPATH=. python tests/copies_replay.py ANSWERS.jsonl
DRAFTER`.

Greedy answers of SmolLM2-135M-Instruct (`input_ids`, `prompt_len`, `temperature`, one object a line) are decoded again
by the policy, with the drafter's real drafts at every place and with the copies that the text offers there; time is
counted in profiled costs. Prints tokens per round and the speed over plain decoding for: the drafter alone, copies
alone from matches of one or of two tokens on, both, and both with the drafter's block continued by a copy where that is
expected to pay.
"""

import json
import sys
from types import SimpleNamespace

import torch

from hf_dspark import AutoDrafter
from hf_dspark.decoding.target import FeatureTap
from hf_dspark.drafting.copying import Copy, CopyIndex
from hf_dspark.embedded import load_smollm2
from hf_dspark.scheduling.copying import CopyExpectation
from hf_dspark.scheduling.cost import CostTable
from hf_dspark.scheduling.policy import Policy

# Milliseconds of one row on the machine of docs/NUMBERS.md.
TABLE = CostTable((1,), (0,), (1, 4, 6, 8, 11), (((61.3, 64.5, 66.1, 69.2, 73.5),),), ((7.0,),))
LIMIT = 10


@torch.no_grad()
def drafts_along(target, drafter, ids: list[int], start: int) -> dict[int, tuple[list[int], float]]:
    """By the number of committed tokens: the drafts there, and the chance that they are all accepted as its head sees
    it."""
    out, tokens, K = {}, torch.tensor([ids]), 3
    with FeatureTap(target, drafter.config.target_layer_ids) as tap:
        target(input_ids=tokens)
        features = tap.features(drafter.device)
    for first in range(start + 1, len(ids), 32):
        places = torch.arange(first, min(first + 32, len(ids)))
        count, width = len(places), int(places[-1]) - 1
        cache = drafter.new_cache(torch.zeros(count, dtype=torch.long))
        valid = torch.arange(width) < (places - 1)[:, None]
        following = tokens[:, 1 : width + 1].expand(count, -1)
        seed = drafter.extend(cache, features[:, :width].expand(count, -1, -1), following, valid)
        prev = tokens[0, places - 1]
        state, drafted, sure = drafter.start(cache, prev, seed, None, K), [], torch.zeros(count)
        for _ in range(K):
            logits, confidence, state = drafter.step(cache, state, prev)
            prev = drafter.target_ids(logits.argmax(-1))
            drafted.append(prev)
            sure += torch.nn.functional.logsigmoid(confidence.float())
        rows = torch.stack(drafted, 1).tolist()
        out |= {int(n): (row, c) for n, row, c in zip(places, rows, sure.exp().tolist())}
    return out


def right(drafts: list[int], rest: list[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(drafts, rest)) if a != b), min(len(drafts), len(rest)))


class Replay:
    """One way of drafting over all answers, with one policy that learns along. `shortest`: matches that are copied
    from, None for no copies; `drafting`: whether there is a drafter; `continued`: whether its block may go on as a
    copy."""

    def __init__(self, shortest=None, drafting=False, continued=False):
        self.shortest, self.drafting, self.continued = shortest, drafting, continued
        self.policy = Policy(3 if drafting else 0, 1, TABLE)
        self.behind = CopyExpectation()
        self.rounds = self.tokens = self.seconds = self.longer = self.gained = 0

    def answer(self, ids: list[int], start: int, drafts: dict) -> None:
        index, n = CopyIndex(ids[: start + 1], self.shortest or 1), start + 1
        while n < len(ids):
            rest = ids[n:]
            self.policy.begin(1, 0.0)
            copy = index.propose(min(LIMIT, len(rest))) if self.shortest else Copy([], 0)
            (length,), planned = self.policy.choose([(copy, "copy")], False)
            offered = copy.tokens[:length] if length else drafts[n][0][: min(planned, len(rest))]
            extra = self.extra(index, offered, drafts[n][1], len(rest)) if not length and len(offered) == 3 else []
            a = right([*offered, *extra], rest)
            drafted, width = not length and planned > 0, 1 + len(offered) + len(extra)
            spent = 7.0 * drafted, TABLE.verify_seconds(width)
            source = "copy" if length else "drafter" if drafted else "none"
            round_ = SimpleNamespace(
                sources=[source],
                stages=[1],
                tokens=SimpleNamespace(shape=(1, 3)),
                confidence=None,
                parents=None,
                lengths=[len(offered)],
            )
            self.policy.observe(round_, [len(offered)], [min(a, len(offered))], width, *spent)
            self.policy.observe_copies([(copy, "copy")], [rest[: a + 1]])
            if drafted and a >= 3 and self.continued and self.asked.tokens:  # what would have gone on behind the block
                behind = rest[3 : a + 1]
                judged = min(len(self.asked.tokens), len(behind))
                self.behind.observe(self.asked.match, judged, right(self.asked.tokens[:judged], behind))
            self.rounds, self.tokens = self.rounds + 1, self.tokens + len(rest[: a + 1])
            self.seconds += sum(spent)
            self.longer, self.gained = self.longer + bool(extra), self.gained + max(0, a - len(offered)) * bool(extra)
            index.extend(rest[: a + 1])
            n += a + 1

    def extra(self, index, drafted, sure: float, room: int) -> list[int]:
        """The copy that goes on behind the drafts, as long as it is expected to pay."""
        self.asked = Copy([], 0)
        if not self.continued or self.tokens < 50:
            return []
        self.asked = copy = index.propose_after(drafted, min(LIMIT, room - len(drafted)))
        chances = self.behind.expected(copy.match, len(copy.tokens))
        price = self.tokens / self.seconds
        costs = [price * (TABLE.verify_seconds(4 + k) - TABLE.verify_seconds(4)) for k in range(len(chances) + 1)]
        gains = [sure * sum(chances[:k]) - cost for k, cost in enumerate(costs)]
        best = max(range(len(gains)), key=gains.__getitem__)
        return copy.tokens[:best]


WAYS = {
    "the drafter alone": dict(drafting=True),
    "copies, two tokens matching": dict(shortest=2),
    "copies, one token matching": dict(shortest=1),
    "both, two tokens matching": dict(shortest=2, drafting=True),
    "both, one token matching": dict(shortest=1, drafting=True),
    "both, blocks continued": dict(shortest=1, drafting=True, continued=True),
}


def main(answers: str, place: str, limit: int = 60):
    target, _ = load_smollm2(torch.float32)
    drafter = AutoDrafter.from_pretrained(place, target=target)
    kept = [a for a in map(json.loads, open(answers)) if a["temperature"] == 0][:limit]
    ways = {name: Replay(**options) for name, options in WAYS.items()}
    for k, a in enumerate(kept):
        drafts = drafts_along(target, drafter, a["input_ids"], a["prompt_len"])
        for way in ways.values():
            way.answer(a["input_ids"], a["prompt_len"], drafts)
        if k % 10 == 9 or k + 1 == len(kept):
            print(f"{k + 1} answers", flush=True)
            for name, way in ways.items():
                speed = way.tokens * TABLE.verify_seconds(1) / way.seconds
                more = f", {way.longer} blocks continued by {way.gained} accepted tokens" if way.continued else ""
                print(f"  {name:28} tau {way.tokens / way.rounds:.2f}, {speed:.3f} x plain{more}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
