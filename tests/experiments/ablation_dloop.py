"""What looped drafting gives where drafts are good, part by part: the loop, the training for it, both, the automatic
gate, the best that any gate could do.

    python tests/experiments/ablation_dloop.py --tiny              seconds, too short to learn anything
    python tests/experiments/ablation_dloop.py --output runs       about 15 minutes on one core
    python tests/experiments/ablation_dloop.py --target smollm2 --base D1 --looped D2 --texts prompts.jsonl --blocks 2 3
    4 6

A small target learns a language of stock phrases whose order is almost fixed in some documents and free in others; two
drafters learn to draft for it, one with loop exposure. Texts come from the real decode loop. Time is a model's, not
this machine's: a verification costs 22.45 ms and a drafting stage 3.90 ms (the figures of DLoop, arXiv 2610.07659).
With `--target` the same arms are tried on drafters of your own, D1 trained without loop exposure and D2 with it, in
times of this machine (profiled first).
"""

import argparse
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_dspark import AutoDrafter, SpeculationConfig
from hf_dspark.embedded import load_smollm2
from hf_dspark.evaluation import metrics
from hf_dspark.evaluation.profiling import cached_profile
from hf_dspark.evaluation.prompts import read_prompts
from hf_dspark.evaluation.record import record
from hf_dspark.evaluation.replay import Costs, gate, oracle_gate, replay
from hf_dspark.scheduling.policy import Policy
from hf_dspark.training import ChatDataset, DrafterTrainer, DrafterTrainingArguments, new_drafter

PAPER = Costs(draft=3.90e-3, verify=lambda tokens: 22.45e-3)
VOCAB, BLOCK, STAGES = 96, 7, 8
SETS = {"set phrases": 0.97, "half free": 0.7, "free": 0.1}  # chance that a phrase is followed by its usual successor


class Language:
    """Documents of stock phrases. Every two phrases have a usual successor."""

    def __init__(self, phrases=48, seed=0):
        rng = random.Random(seed)
        self.phrases = [[rng.randrange(2, VOCAB - 1) for _ in range(rng.randint(4, 14))] for _ in range(phrases)]
        self.usual = {(a, b): rng.randrange(phrases) for a in range(phrases) for b in range(phrases)}

    def document(self, order: float, tokens: int, rng: random.Random) -> list[int]:
        """`order`: how often the usual phrase follows."""
        a, b, out = rng.randrange(len(self.phrases)), rng.randrange(len(self.phrases)), [1]
        while len(out) < tokens:
            out += self.phrases[b]
            a, b = b, self.usual[a % 6, b] if rng.random() < order else rng.randrange(len(self.phrases))
        return out[:tokens]

    def documents(self, count, tokens, seed):
        rng = random.Random(seed)
        return [self.document(order, tokens, rng) for _ in range(count) for order in SETS.values()]


def train_target(language, steps):
    torch.manual_seed(0)
    body = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, eos_token_id=None, tie_word_embeddings=True, **body))
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for step in range(steps):
        ids = torch.tensor(language.documents(8, 128, f"target {step}"))
        logits = target(ids).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            print(f"target, step {step + 1} of {steps}", flush=True)
    return target.eval()


@torch.inference_mode()
def answers(target, language, count, seed):
    """Training data: the target's own texts, half of them greedy."""
    starts = torch.tensor(language.documents(count, 12, seed))
    texts = []
    for part, sample in zip(starts.split(len(starts) // 2 + 1), (False, True)):
        options = dict(max_new_tokens=116, do_sample=sample, top_k=0, pad_token_id=0)
        texts += target.generate(part, attention_mask=torch.ones_like(part), **options).tolist()
    return ChatDataset([{"input_ids": text, "prompt_len": 12} for text in texts])


def train_drafter(target, data, steps, exposure, folder):
    if (folder / "config.json").exists():
        return AutoDrafter.from_pretrained(folder, target=target, dtype=torch.float32).eval()
    torch.manual_seed(0)
    options = dict(correction_head="markov", markov_rank=32, confidence_head=True)
    drafter = new_drafter(target, VOCAB - 1, None, block_size=BLOCK, num_hidden_layers=1, **options)
    arguments = DrafterTrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=steps, learning_rate=3e-3, lr_scheduler_type="cosine",
        warmup_steps=steps // 20, adam_beta2=0.95, weight_decay=0.0, use_cpu=True, ce_weight=0.0, num_anchors=24,
        loop_exposure=exposure, loop_start=0.5, logging_steps=max(1, steps // 5), report_to=[], disable_tqdm=True,
        save_strategy="no", skip_estimate=True,
    )  # fmt: skip
    DrafterTrainer(drafter, arguments, target, data).train()
    drafter.save_pretrained(folder)
    return drafter.eval()


class ModelledTime(Policy):
    """Decisions by the modelled times instead of this machine's."""

    def __init__(self, block, costs):
        super().__init__(block, STAGES)
        self.costs = costs

    def observe(self, draft, verified, accepted, fed, draft_seconds, verify_seconds):
        stages = max(draft.stages, default=0) if draft.tokens.shape[1] else 0
        super().observe(draft, verified, accepted, fed, stages * self.costs.draft, self.costs.verify(fed))


@dataclass
class Trial:
    """What the arms of one comparison share: prompts [n][ids], tokens of an answer, drafts of a stage."""

    target: torch.nn.Module
    prompts: list[list[int]]
    temperature: float
    tokens: int
    block: int = BLOCK
    costs: Costs = PAPER
    gates: tuple[float, ...] = (-0.25, -0.5, -1.0, -2.0)

    def decode(self, drafter, loop_gate=None):
        """The rounds [prompts][rounds] of answering each prompt alone."""
        policy, out = ModelledTime(self.block, self.costs), []
        sampling = (
            dict(do_sample=True, temperature=self.temperature, top_k=0) if self.temperature else dict(do_sample=False)
        )
        for i, ids in enumerate(self.prompts):
            inputs = torch.tensor([ids])
            # With a seed `match` samples the same text whatever drafts it, so arms differ in nothing but time.
            knobs = SpeculationConfig(
                loop_gate=loop_gate, max_draft_stages=STAGES, num_draft_tokens=self.block, verification="match", seed=i
            )
            with record(drafter, policy=policy) as recorder:
                self.target.generate(
                    inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=self.tokens, pad_token_id=0, **sampling,
                    assistant_model=drafter, speculation=knobs,
                )  # fmt: skip
            out.append(recorder.rounds)
        return [rounds for rounds in out if rounds]

    def figures(self, rounds):
        """Per prompt the modelled seconds per token; in all the tau, stages per round and verifications."""
        flat = [r for rs in rounds for r in rs]
        emitted = sum(r.emitted for r in flat)
        seconds = [sum(map(self._seconds, rs)) / sum(r.emitted for r in rs) for rs in rounds]
        return {"tau": emitted / len(flat), "stages": sum(r.stages for r in flat) / len(flat),
                "verifications": len(flat) / emitted, "seconds": seconds}  # fmt: skip

    def _seconds(self, r):
        return self.costs.verify(r.fed) + self.costs.draft * r.stages

    def oracle(self, rounds):
        """Replayed on rounds of which every stage was drafted: go on while the block at hand will be accepted whole."""
        each = [replay(rs, self.costs, oracle_gate) for rs in rounds]
        count, tokens = sum(r.rounds for r in each), sum(r.tokens for r in each)
        seconds = [r.seconds_per_token for r in each]
        return {"tau": tokens / count, "stages": sum(r.drafted for r in each) / self.block / count,
                "verifications": count / tokens, "seconds": seconds}  # fmt: skip

    def arms(self, base, looped):
        """{arm: figures}."""
        out = {"base": self.figures(self.decode(base))}
        out["loop only, -0.5"] = self.figures(self.decode(base, -0.5))
        out["loop only, auto"] = self.figures(self.decode(base, "auto"))
        out["training only"] = self.figures(self.decode(looped))
        for g in self.gates:
            out[f"both, {g}"] = self.figures(self.decode(looped, g))
        out["both, auto"] = self.figures(self.decode(looped, "auto"))
        everything = self.decode(looped, -1e9)
        out["both, oracle"] = self.oracle(everything)
        for g in self.gates:  # the gates on the oracle's rounds, for a like comparison
            out[f"replay, {g}"] = {"seconds": [replay(rs, self.costs, gate(g)).seconds_per_token for rs in everything]}
        return out


def lines(name, temperature, results):
    base = results["base"]
    for arm, found in results.items():
        if "tau" in found:
            speed, gain = metrics.speedup(base["seconds"], found["seconds"]), found["tau"] / base["tau"] - 1
            yield (
                f"| {name} | {temperature:.0f} | {arm} | {found['tau']:.2f} ({100 * gain:+.0f} %) | {found['stages']:.2f} | "
                f"{100 * found['verifications']:.1f} | {speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f}) |"
            )


def own_language(args):
    """(name, base drafter, looped drafter, trial) of every comparison, on models trained here."""
    language, kept = Language(), args.output / "target"
    if (kept / "config.json").exists():
        target = LlamaForCausalLM.from_pretrained(kept).eval()
    else:
        target = train_target(language, args.steps)
        target.save_pretrained(kept)
    data = answers(target, language, 2 if args.tiny else 256, "data")
    base, looped = (train_drafter(target, data, args.steps, n, args.output / f"exposure-{n}") for n in (0, 3))
    for name, order in SETS.items():
        rng = random.Random(f"prompts {name}")
        prompts = [language.document(order, 24, rng) for _ in range(args.prompts)]
        for temperature in args.temperature:
            yield name, base, looped, Trial(target, prompts, temperature, args.tokens)


def own_models(args):
    """As [`own_language`], on models given; seconds are this machine's medians."""
    if args.target == "smollm2":
        target, tokenizer = load_smollm2(torch.bfloat16)
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    base, looped = (
        AutoDrafter.from_pretrained(d, target=target.eval(), dtype=target.dtype) for d in (args.base, args.looped)
    )
    widths = (*range(1, 10), 13, 17, 25, 33, 49)
    table, _ = cached_profile(target, looped, args.output / "profile.json", rows=(1,), contexts=(256,), widths=widths)
    costs = Costs(table.draft_seconds(1, 256), lambda tokens: table.verify_seconds(tokens, 1, 256))
    chats = [[{"role": "user", "content": p.turns[0]}] for p in read_prompts(args.texts)[: args.prompts]]
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats
    ]
    for block in args.blocks:
        for temperature in args.temperature:
            yield (
                f"{block} a stage",
                base,
                looped,
                Trial(target, prompts, temperature, args.tokens, block, costs, (-0.5, -1.0)),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=1200, help="of each drafter; the target takes as many")
    parser.add_argument("--prompts", type=int, default=24, help="of each set")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--target", help="a model of your own instead; smollm2 is the demo's")
    parser.add_argument("--base", help="its drafter without loop exposure")
    parser.add_argument("--looped", help="its drafter with loop exposure")
    parser.add_argument("--texts", help="jsonl of prompts for it")
    parser.add_argument("--blocks", type=int, nargs="+", default=[BLOCK], help="drafts of a stage")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "ablation")
    args = parser.parse_args()
    if args.target and not (args.base and args.looped and args.texts):
        parser.error("--target needs --base, --looped and --texts beside it")
    torch.set_num_threads(1)
    if args.tiny:
        args.steps, args.prompts, args.tokens, args.output = 4, 1, 12, Path(tempfile.mkdtemp())
    args.output.mkdir(parents=True, exist_ok=True)
    rows = ["| documents | T | arm | tau | stages | verifications per 100 tokens | speed over base |", "|---" * 7 + "|"]
    results = {}
    for name, base, looped, trial in (own_models if args.target else own_language)(args):
        results[f"{name}, {trial.temperature}"] = found = trial.arms(base, looped)
        rows += lines(name, trial.temperature, found)
        (args.output / "ablation.json").write_text(json.dumps(results), encoding="utf-8")
        (args.output / "ablation.md").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
