"""The four families on one target, trained for the same processor time: what they accept, what drafting costs, what it
gains.

    python tests/experiments/families.py --tiny           seconds, on random models
    python tests/experiments/families.py --data train.jsonl --held-out heldout.jsonl --feature-cache F --output runs
    python tests/experiments/families.py --family dspark-3 dspark-7 dspark-5x2 ... --loop-exposure 0     lengths, two
    layers

Data come from `hf-dspark data generate`; the target is SmolLM2-135M-Instruct from the demo extra. With a second run,
families found in the output folder aren't trained again, and finished answers are kept.
"""

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

from hf_dspark import AutoDrafter
from hf_dspark.embedded import load_smollm2
from hf_dspark.evaluation.benchmark import Method, Plan, run
from hf_dspark.evaluation.prompts import Prompt, read_prompts
from hf_dspark.training import ChatDataset, DrafterTrainer, DrafterTrainingArguments, new_drafter, new_eagle3, new_mtp

FAMILIES = {
    "dspark": dict(correction_head="markov", markov_rank=64, confidence_head=True),
    "dflash": dict(correction_head="none"),
    "domino": dict(correction_head="domino", gru_hidden_size=256, correction_size=64, pure_draft_prefix_len=1),
    "eagle3": {},
    "mtp": {},
}
METHODS = [Method("plain"), Method("own"), Method("own", {"loop_gate": -0.5})]


class Variant(NamedTuple):
    """E.g. `dspark-7x2`: a DSpark drafter of seven drafts a stage and two layers; 5 and 1 if not given."""

    name: str
    family: str
    block: int
    layers: int

    @classmethod
    def of(cls, name):
        found = re.fullmatch(rf"({'|'.join(FAMILIES)})(?:-(\d+))?(?:x(\d+))?", name)
        if not found or (found[1] in ("eagle3", "mtp") and found[3]):
            known = ", ".join(FAMILIES)
            raise argparse.ArgumentTypeError(
                f"{name!r} is no FAMILY[-BLOCK][xLAYERS] of {known} (chains have one layer)"
            )
        return cls(name, found[1], int(found[2] or 5), int(found[3] or 1))


class Numbers:
    """A tokenizer whose words are token ids."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": list(map(int, text.split()))}

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids))


class Budget(TrainerCallback):
    """Counts the processor seconds of the steps, and ends a run that takes much longer than `seconds`."""

    def __init__(self, seconds=float("inf")):
        self.limit, self.ends = 1.1 * seconds, []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.process_time())
        control.should_training_stop |= self.ends[-1] - self.ends[0] > self.limit


def tiny_world(args):
    torch.manual_seed(0)
    body = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, initializer_range=0.3)
    target = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=4, eos_token_id=None, **body)).eval()
    ids = torch.randint(1, 60, (24, 4))
    texts = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False).tolist()
    data = ChatDataset([{"input_ids": text, "prompt_len": 4} for text in texts])
    prompts = [Prompt((" ".join(map(str, text[:4])),), "tiny", i) for i, text in enumerate(texts[: args.prompts])]
    return target, Numbers(), data, data.draft_vocabulary(60, 64), 63, prompts


def real_world(args):
    target, tokenizer = load_smollm2(torch.bfloat16)
    rows = [json.loads(line) for line in args.data.open(encoding="utf-8")]
    random.Random(0).shuffle(order := list(range(len(rows))))
    data = ChatDataset([{**rows[i], "example_id": i} for i in order[: args.examples]], tokenizer)
    prompts = random.Random(0).sample(read_prompts(args.held_out), args.prompts)
    return target.eval(), tokenizer, data, ChatDataset(rows, tokenizer).draft_vocabulary(8192, 49152), 16, prompts


def train(variant, world, args, folder, steps, budget, start=0.6):
    target, _, data, draft_ids, mask, _ = world
    torch.manual_seed(0)
    if variant.family == "eagle3":
        drafter = new_eagle3(target, draft_ids, chain_length=variant.block)
    elif variant.family == "mtp":
        drafter = new_mtp(target, draft_ids, chain_length=variant.block)
    else:
        shape = dict(block_size=variant.block, num_hidden_layers=variant.layers, **FAMILIES[variant.family])
        drafter = new_drafter(target, mask, draft_ids, **shape)
    arguments = DrafterTrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=steps, learning_rate=2e-3, lr_scheduler_type="cosine",
        warmup_steps=min(40, steps // 10), adam_beta2=0.95, weight_decay=0.0, bf16=not args.tiny, use_cpu=True, ce_weight=0.0,
        num_anchors=64, loop_exposure=args.loop_exposure, loop_start=start, loss_chunk=4096, logging_steps=max(1, steps // 10),
        report_to=[], disable_tqdm=True, save_strategy="no", feature_cache=args.feature_cache, skip_estimate=True,
    )  # fmt: skip
    DrafterTrainer(drafter, arguments, target, data, callbacks=[budget]).train()
    return drafter


def trained(variant, world, args):
    """A drafter of the family after `--minutes` of processor time, loop-aware in the last 40 % of its steps; and its
    facts."""
    folder = args.output / variant.name
    if (folder / "facts.json").exists():
        drafter = AutoDrafter.from_pretrained(folder, target=world[0], dtype=world[0].dtype)
        return drafter, json.loads((folder / "facts.json").read_text())
    each = []
    for start in (1.0, 0.0):  # seconds of a step of one stage, and of a step of several
        train(variant, world, args, folder, 8, probe := Budget(), start)
        each.append((probe.ends[-1] - probe.ends[1]) / (len(probe.ends) - 2))
    looped = 0.4 if args.loop_exposure else 0.0
    steps = max(10, int(60 * args.minutes / ((1 - looped) * each[0] + looped * each[1])))
    drafter = train(variant, world, args, folder, steps, budget := Budget(60 * args.minutes))
    drafter.save_pretrained(folder)
    facts = {"parameters": sum(p.numel() for p in drafter.parameters()), "steps": len(budget.ends)}
    facts["minutes"] = (budget.ends[-1] - budget.ends[0]) / 60
    (folder / "facts.json").write_text(json.dumps(facts))
    return drafter.to(world[0].dtype).eval(), facts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=20, help="processor time of each family")
    parser.add_argument(
        "--family", nargs="+", type=Variant.of, metavar="FAMILY[-BLOCK][xLAYERS]", help="e.g. dspark-7x2"
    )
    parser.add_argument(
        "--loop-exposure", type=int, default=3, help="of the last 40 %% of the steps; 0 trains without looping"
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--examples", type=int, default=1500)
    parser.add_argument("--feature-cache", help="folder that keeps the target's outputs, shared by all families")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "families")
    args = parser.parse_args()
    variants = args.family or list(map(Variant.of, FAMILIES))
    torch.set_num_threads(1)
    world = target, tokenizer, *_, prompts = tiny_world(args) if args.tiny else real_world(args)
    plan = Plan(prompts, METHODS, (0.0, 1.0), args.tokens, chat=not args.tiny)
    lines = ["| family | M parameters | steps | minutes | T | looped | tau | draft ms a round | speed over plain |"]
    lines.append("|---" * 9 + "|")
    for variant in variants:
        drafter, facts = trained(variant, world, args)
        out = run(
            target, tokenizer, drafter, plan, {"family": variant.name, **facts}, args.output / f"{variant.name}.jsonl"
        )
        for result in out["results"]:
            if result["set"] == out["results"][-1]["set"] and result["method"] != "plain":
                speed, draft = result["speedup_over_plain"], 1000 * result["split"]["draft_seconds"] * result["tau"]
                lines.append(
                    f"| {variant.name} | {facts['parameters'] / 1e6:.1f} | {facts['steps']} | {facts['minutes']:.1f} | "
                    f"{result['temperature']:.0f} | {'yes' if 'loop' in result['method'] else 'no'} | {result['tau']:.2f} | "
                    f"{draft:.1f} | {speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f}) |"
                )
        print("\n".join(lines), flush=True)
    (args.output / "families.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
