"""Run by hand: `OMP_NUM_THREADS=2 python tests/overhead_check.py`. Share of decode time spent outside both models'
forwards.

SmolLM2-135M-Instruct in bf16 with the shipped DSpark drafter, greedy, one row; median over a few prompts.
"""

import statistics
import time
from pathlib import Path

import torch

from hf_dspark import AutoDrafter
from hf_dspark.decoding.target import Target
from hf_dspark.embedded import load_smollm2
from hf_dspark.evaluation.prompts import render

PROMPTS = ("How many minutes are in 3.5 hours?", "Write a Python function that reverses a list.", "Name 5 fruits.")


def main():
    target, tokenizer = load_smollm2(torch.bfloat16)
    drafter = AutoDrafter.from_pretrained(
        Path(__file__).parents[1] / "model_cards/dspark-smollm2-135m-instruct", target=target
    )
    inside = [0.0]

    def timed(cls, name):
        original = getattr(cls, name)

        def call(*args, **kwargs):
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                inside[0] += time.perf_counter() - began

        setattr(cls, name, call)

    timed(Target, "forward")
    for name in ("extend", "start", "step"):
        timed(type(drafter), name)
    shares = []
    for text in PROMPTS:
        ids = torch.tensor([render(tokenizer, text)])
        for keep in (False, True):  # the first call of a shape pays for set-up
            inside[0] = 0.0
            target.generate(ids, assistant_model=drafter, max_new_tokens=96, do_sample=False)
            stats = drafter.last_speculation
            total = stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds + stats.overhead_seconds
            if keep:
                shares.append(1 - inside[0] / total)
    print(
        f"outside both models' forwards: {statistics.median(shares):.1%} of decode time ({torch.get_num_threads()} "
        "threads)"
    )


if __name__ == "__main__":
    main()
