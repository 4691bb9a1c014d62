"""What trees of drafts give: tokens per round of a chain and of trees of several sizes, and the speed that makes of it.

    python tests/experiments/trees.py --tiny                                 seconds, a random pair that shows nothing
    python tests/experiments/trees.py --texts gsm8k.jsonl humaneval.jsonl    SmolLM2 and the drafter of model_cards/

Tokens per round (tau) come from the real decode loop. Speed is modelled, so that it doesn't depend on this machine's
load: a round costs one verification and one drafting stage. "GPU" has the figures of DLoop (arXiv 2610.07659), where a
verification takes 22.45 ms whatever its size and a stage 3.90 ms; "CPU" has those of SmolLM2-135M in bfloat16 on one
core.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark import AutoDrafter, DSparkConfig, DSparkDrafter, SpeculationConfig
from hf_dspark.decoding.generate import listening
from hf_dspark.embedded import load_smollm2
from hf_dspark.evaluation import metrics
from hf_dspark.evaluation.prompts import read_prompts, render
from hf_dspark.evaluation.replay import Costs
from hf_dspark.scheduling import LatencyCurve

CURVE = LatencyCurve((1, 2, 4, 8, 16, 32, 64, 128), (0.059, 0.059, 0.063, 0.070, 0.107, 0.145, 0.211, 0.351))
COSTS = {"GPU": Costs(draft=3.90e-3, verify=lambda tokens: 22.45e-3), "CPU": Costs(draft=9.0e-3, verify=CURVE)}
BUDGETS = (4, 8, 16, 32)


def arms(kinds, budgets) -> dict[str, dict]:
    """{name: knobs}."""
    return {"chain": {}} | {f"{kind}, {n}": dict(tree=kind, tree_budget=n) for kind in kinds for n in budgets}


def decode(target, drafter, prompts, tokens: int, temperature: float, knobs: dict) -> list[list[tuple[int, int, int]]]:
    """Of every round of every prompt: tokens fed to the target, drafting stages, tokens emitted."""
    out = []
    sampling = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    for i, ids in enumerate(prompts):
        rounds, inputs = [], torch.tensor([ids])
        # With a seed `match` samples the same text whatever drafts it, so that arms differ in nothing but rounds.
        speculation = SpeculationConfig(verification="match", seed=i, **knobs)

        def seen(event, rounds=rounds):
            rounds.append((1 + max(event.verified), max(event.draft.stages), len(event.commits[0].tokens)))

        with listening(observer=seen):
            target.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, assistant_model=drafter,
                speculation=speculation, pad_token_id=0, **sampling,
            )  # fmt: skip
        out.append(rounds)
    return out


def seconds(rounds, costs: Costs) -> float:
    """Modelled seconds per token of one answer."""
    return sum(costs.verify(fed) + stages * costs.draft for fed, stages, _ in rounds) / sum(n for *_, n in rounds)


def table(found: dict) -> list[str]:
    """One line per temperature and arm of `found` {temperature: {arm: rounds}}; speeds are over decoding without
    drafts."""
    rows = ["| T | drafts | tokens verified | tau | GPU | CPU | GPU, over the chain |", "|---" * 7 + "|"]
    for temperature, by_arm in found.items():
        for arm, answers in by_arm.items():
            flat = [r for rounds in answers for r in rounds]
            tau, fed = sum(r[2] for r in flat) / len(flat), sum(r[0] for r in flat) / len(flat)
            cells = []
            for costs in COSTS.values():
                plain = [costs.verify(1)] * len(answers)
                cells.append(metrics.speedup(plain, [seconds(rounds, costs) for rounds in answers])["ratio"])
            chain = [seconds(rounds, COSTS["GPU"]) for rounds in by_arm["chain"]]
            gain = metrics.speedup(chain, [seconds(rounds, COSTS["GPU"]) for rounds in answers])
            cells = " | ".join(f"{c:.2f}" for c in cells)
            interval = f"{gain['ratio']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
            rows.append(f"| {temperature:g} | {arm} | {fed:.1f} | {tau:.2f} | {cells} | {interval} |")
    return rows


def tiny_pair():
    torch.manual_seed(0)
    body = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2)
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, eos_token_id=None, **body)).eval()
    config = DSparkConfig(**body, num_hidden_layers=1, block_size=5, mask_token_id=60, target_layer_ids=[0, 1],
                          num_target_layers=3)  # fmt: skip
    return target, DSparkDrafter(config).bind(target).eval(), [[5, 9, 2, 7], [3, 8]]


def shipped_pair(args):
    target, tokenizer = load_smollm2(torch.bfloat16)
    drafter = AutoDrafter.from_pretrained(args.drafter, target=target, dtype=torch.bfloat16)
    prompts = [render(tokenizer, p.turns[0]) for path in args.texts for p in read_prompts(path, args.prompts)]
    return target, drafter.eval(), prompts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--texts", type=Path, nargs="+", help="jsonl files of prompts")
    parser.add_argument("--drafter", default=Path(__file__).parents[2] / "model_cards" / "dspark-smollm2-135m-instruct")
    parser.add_argument("--kinds", nargs="+", default=["ddtree", "dartree"])
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="nodes of a tree")
    parser.add_argument("--prompts", type=int, default=4, help="of each file")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "trees")
    args = parser.parse_args()
    if not args.tiny and not args.texts:
        parser.error("give --texts, or --tiny")
    torch.set_num_threads(1)
    if args.tiny:
        args.tokens, args.output = 16, Path(tempfile.mkdtemp())
    args.output.mkdir(parents=True, exist_ok=True)
    target, drafter, prompts = tiny_pair() if args.tiny else shipped_pair(args)
    found: dict = {temperature: {} for temperature in args.temperature}
    for arm, knobs in arms(args.kinds, args.budgets).items():
        for temperature in args.temperature:
            found[temperature][arm] = decode(target, drafter, prompts, args.tokens, temperature, knobs)
            print(f"{arm}, T = {temperature:g}: finished", flush=True)
            (args.output / "trees.json").write_text(json.dumps(found), encoding="utf-8")
    (args.output / "trees.md").write_text("\n".join(table(found)) + "\n", encoding="utf-8")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
