"""Make a drafter's confidences true, measure what steps cost here, and see what scheduled verification gives at batch 1 to 16.

    python examples/calibrate_and_schedule.py TARGET DRAFTER --prompts heldout.jsonl --plot batch_sizes.png
    python examples/calibrate_and_schedule.py --tiny      # random models

`hf-dspark calibrate` and `hf-dspark profile` do the first two for good. Speeds are replayed: every batch size on the same
logged rounds, in measured median costs, so that no method profits from a quiet moment.
"""

import argparse
from functools import partial

import torch
from dloop import tiny_models
from quickstart import load_target

from hf_dspark import AutoDrafter
from hf_dspark.evaluation import calibration, plots
from hf_dspark.evaluation.profiling import profile_pair
from hf_dspark.evaluation.prompts import read_prompts, render
from hf_dspark.evaluation.replay import FixedLength, replay_scheduler
from hf_dspark.scheduling.policy import Policy


def real_models(args):
    target, tokenizer = load_target(args.target, torch.bfloat16)
    prompts = [p for file in args.prompts for p in read_prompts(file, args.limit)]
    drafter = AutoDrafter.from_pretrained(args.drafter, target=target, dtype=target.dtype)
    return target.eval(), drafter.eval(), [render(tokenizer, p.turns[0]) for p in prompts]


def replayed(logs, scheduler, costs, rows, temperatures):
    """Tokens per second, and drafts verified per row and round, over four beginnings among the logged answers."""
    begins = range(0, len(logs), max(1, len(logs) // 4))
    runs = [replay_scheduler(logs[i:] + logs[:i], costs, scheduler(), rows, temperatures=temperatures) for i in begins]
    total = {name: sum(getattr(r, name) for r in runs) for name in ("tokens", "seconds", "verified", "rounds")}
    return total["tokens"] / total["seconds"], total["verified"] / total["rounds"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="Hub id, folder, or smollm2")
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--prompts", nargs="+")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plot")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and not (args.drafter and args.prompts):
        parser.error("name a target, its drafter and --prompts, or pass --tiny")
    target, drafter, prompts = tiny_models() if args.tiny else real_models(args)
    prompts = prompts.repeat(8, 1).tolist() if args.tiny else prompts
    rows, block, tokens = (1, 2) if args.tiny else (1, 2, 4, 8, 16), drafter.config.max_block, 16 if args.tiny else args.tokens
    logs = calibration.collect(target, drafter, prompts, tokens)
    found = calibration.fit(drafter, logs)
    print(f"tau {found.tau:.2f} with everything verified; temperatures {found.temperatures}")
    costs = profile_pair(target, drafter, rows=rows, widths=tuple(range(1, block + 2)), repeats=3 if args.tiny else 9)
    drafter.norm.weight.data.neg_()  # drafts are worthless from here on
    bad = calibration.collect(target, drafter, prompts[:8], tokens)
    table = []
    print("batch | plain | best fixed length | auto | budget | bad drafter, auto / plain   (tokens per second)")
    for n in rows:
        speed = partial(replayed, costs=costs, rows=n, temperatures=found.temperatures)
        fixed = [speed(logs, lambda k=k: FixedLength(k))[0] for k in range(block + 1)]
        auto, budget = speed(logs, lambda: Policy(block, 1, costs))  # costs: as after `profile`
        lost, _ = speed(bad, lambda: Policy(block, 1, costs))
        plain, best, drafts = fixed[0], max(fixed), fixed.index(max(fixed))
        row = f"{n:5} | {plain:5.1f} | {best:5.1f} ({drafts} drafts) | {auto:5.1f} | {budget:.2f}"
        print(f"{row} | {lost / plain:.3f}", flush=True)
        table.append({"rows": n, "budget": budget, "speeds": {"plain": plain, "best fixed": best, "auto": auto}})
    if args.plot:
        plots.batch_sizes(table).savefig(args.plot, dpi=150)


if __name__ == "__main__":
    main()
