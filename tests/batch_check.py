"""Wall clock of plain, fixed-length and scheduled decoding at batch 1 to 16; run by hand, with the machine otherwise
idle.

python tests/batch_check.py TARGET DRAFTER PROMPTS.jsonl...      (TARGET smollm2: the demo's model)

Profiles the pair first, as `hf-dspark profile` does. Methods take turns on the same prompts; the median of the repeats
counts.
"""

import random
import sys
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import AutoDrafter, SpeculationConfig
from hf_dspark.embedded import load_smollm2
from hf_dspark.evaluation.profiling import cached_profile
from hf_dspark.evaluation.prompts import read_prompts

ROWS, REPEATS, TOKENS = (1, 2, 4, 8, 16), 3, 48
LENGTHS = {"1 draft": dict(num_draft_tokens=1), "3 drafts": dict(num_draft_tokens=3)}
METHODS = {"plain": None, **LENGTHS, "auto": dict(scheduler="auto")}


def main(target_name, drafter_name, *files):
    if target_name == "smollm2":
        target, tokenizer = load_smollm2(torch.bfloat16)
    else:
        target, tokenizer = (
            AutoModelForCausalLM.from_pretrained(target_name),
            AutoTokenizer.from_pretrained(target_name),
        )
    drafter = AutoDrafter.from_pretrained(drafter_name, target=target.eval(), dtype=target.dtype)
    cached_profile(target, drafter, rows=ROWS, widths=tuple(range(1, drafter.config.max_block + 2)))
    prompts = [p.turns[0] for file in files for p in read_prompts(file, 16)]
    random.Random(0).shuffle(prompts)
    tokenizer.padding_side = "left"
    print("batch | " + " | ".join(METHODS) + "   (tokens per second)")
    for rows in ROWS:
        speeds = {name: [] for name in METHODS}
        for turn in range(REPEATS + 1):
            chats = [[{"role": "user", "content": p}] for p in (prompts * 2)[turn * rows : (turn + 1) * rows]]
            options = dict(
                tokenize=True, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            inputs = tokenizer.apply_chat_template(chats, **options)
            for name in random.Random(turn).sample(list(METHODS), len(METHODS)):
                knobs = METHODS[name]
                extra = {} if knobs is None else {"assistant_model": drafter, "speculation": SpeculationConfig(**knobs)}
                began = time.perf_counter()
                out = target.generate(**inputs, do_sample=False, eos_token_id=None, max_new_tokens=TOKENS, **extra)
                assert out.shape[1] == inputs["input_ids"].shape[1] + TOKENS
                speeds[name].append(rows * TOKENS / (time.perf_counter() - began))
        print(
            f"{rows:5} | " + " | ".join(f"{median(s[1:]):.1f}" for s in speeds.values()), flush=True
        )  # the first warms up


if __name__ == "__main__":
    main(*sys.argv[1:])
