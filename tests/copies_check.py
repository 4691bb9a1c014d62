"""Run by hand on a quiet machine: `OMP_NUM_THREADS=1 PYTHONPATH=. python tests/copies_check.py [DRAFTER]`. Copies by
the clock.

SmolLM2-135M-Instruct in bfloat16, greedy. Texts that don't repeat (the copy index is shown unique tokens in their
place, so that copies are looked for and never found) must cost at most 1 % against copy=None; the predictable prompts
of examples/ should be at least three times as fast as plain decoding. Ways take turns on every prompt, and medians over
the repeats are compared.
"""

import json
import statistics
import sys
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from hf_dspark import AutoDrafter, CopyDrafter, SpeculationConfig
from hf_dspark.decoding import batch
from hf_dspark.drafting.copying import CopyIndex
from hf_dspark.embedded import load_smollm2
from hf_dspark.evaluation.prompts import render

NEW, REPEATS = 128, 5
PREDICTABLE = Path(__file__).parents[1] / "examples" / "prompts" / "predictable.jsonl"
FRESH = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Describe a market in the morning.",
)


class Unique(CopyIndex):
    """Indexes a new token in the place of each: as much work, and nothing to copy."""

    fresh = count()

    def extend(self, tokens):
        super().extend([next(self.fresh) % 2**31 for _ in tokens])


@contextmanager
def nothing_repeats(on: bool):
    batch.CopyIndex = Unique if on else CopyIndex
    try:
        yield
    finally:
        batch.CopyIndex = CopyIndex


def seconds(target, ids, unique: bool, **options) -> float:
    """Per new token."""
    with nothing_repeats(unique):
        began = time.perf_counter()
        out = target.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
        return (time.perf_counter() - began) / (out.shape[1] - ids.shape[1])


def compare(target, prompts, ways: dict, unique: bool) -> dict[str, float]:
    """Mean over prompts of the median seconds per token."""
    times = {name: [[] for _ in prompts] for name in ways}
    for repeat in range(REPEATS + 1):
        for i, ids in enumerate(prompts):
            for name, options in ways.items():
                spent = seconds(target, ids, unique, **options)
                if repeat:  # the first turn warms up and lets the policy learn
                    times[name][i].append(spent)
    return {name: statistics.mean(map(statistics.median, kept)) for name, kept in times.items()}


def main(place: str | None = None):
    target, tokenizer = load_smollm2(torch.bfloat16)
    ways = {"plain": {}, "copies": dict(assistant_model=CopyDrafter())}
    if place is not None:
        drafter = AutoDrafter.from_pretrained(place, target=target)
        for name, copy in (("drafter", None), ("drafter and copies", "auto")):
            ways[name] = dict(assistant_model=drafter, speculation=SpeculationConfig(num_draft_tokens=3, copy=copy))
    predictable = [json.loads(line) for line in PREDICTABLE.read_text().splitlines()]
    texts = [p["turns"][0] if "turns" in p else p["prompt"] for p in predictable]
    for name, some, unique in (("nothing repeats", FRESH, True), ("predictable", texts, False)):
        prompts = [torch.tensor([render(tokenizer, text)]) for text in some]
        found = compare(target, prompts, ways, unique)
        for way, spent in found.items():
            print(f"{name:16} {way:20} {1e3 * spent:7.2f} ms/token, {found['plain'] / spent:.3f} x plain", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
