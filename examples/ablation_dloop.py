"""What looped drafting gives where drafts are good, part by part: the loop, the training for it, both, the automatic gate, the
best that any gate could do.

    python examples/ablation_dloop.py --tiny              seconds, too short to learn anything
    python examples/ablation_dloop.py --output runs       about 15 minutes on one core

A small target learns a language of stock phrases whose order is almost fixed in some documents and free in others; two drafters
learn to draft for it, one with loop exposure. Texts come from the real decode loop. Time is a model's, not this machine's: a
verification costs 22.45 ms and a drafting stage 3.90 ms (the figures of DLoop, arXiv 2610.07659).
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark import AutoDrafter, SpeculationConfig
from hf_dspark.decoding.policy import Policy
from hf_dspark.evaluation import metrics
from hf_dspark.evaluation.record import record
from hf_dspark.evaluation.replay import Costs, gate, oracle_gate, replay
from hf_dspark.training import ChatDataset, DrafterTrainer, DrafterTrainingArguments, new_drafter

VERIFY, DRAFT = 22.45e-3, 3.90e-3
COSTS = Costs(DRAFT, lambda tokens: VERIFY)
VOCAB, BLOCK, STAGES = 96, 7, 8
GATES = (-0.25, -0.5, -1.0, -2.0)
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

    def observe(self, draft, verified, accepted, fed, draft_seconds, verify_seconds):
        stages = max(draft.stages, default=0) if draft.tokens.shape[1] else 0
        super().observe(draft, verified, accepted, fed, stages * DRAFT, VERIFY)


def decode(target, drafter, prompts, temperature, tokens, loop_gate=None):
    """The rounds [prompts][rounds] of answering each prompt alone."""
    drafter.policy, out = ModelledTime(BLOCK, STAGES), []
    sampling = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    for i, ids in enumerate(prompts):
        inputs = torch.tensor([ids])
        # With a seed `match` samples the same text whatever drafts it, so arms differ in nothing but time.
        knobs = SpeculationConfig(loop_gate=loop_gate, max_draft_stages=STAGES, verification="match", seed=i)
        with record(drafter) as recorder:
            target.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, pad_token_id=0, **sampling,
                assistant_model=drafter, speculation=knobs,
            )  # fmt: skip
        out.append(recorder.rounds)
    return out


def figures(rounds):
    """Per prompt the modelled seconds per token; in all the tau, stages per round and verifications."""
    flat = [r for rs in rounds for r in rs]
    seconds = [sum(VERIFY + DRAFT * r.stages for r in rs) / sum(r.emitted for r in rs) for rs in rounds]
    emitted = sum(r.emitted for r in flat)
    return {"tau": emitted / len(flat), "stages": sum(r.stages for r in flat) / len(flat), "verifications": len(flat) / emitted,
            "seconds": seconds}  # fmt: skip


def oracle(rounds):
    """Replayed on rounds of which every stage was drafted: go on while the block at hand will be accepted whole."""
    each = [replay(rs, COSTS, oracle_gate) for rs in rounds]
    count, tokens = sum(r.rounds for r in each), sum(r.tokens for r in each)
    seconds = [r.seconds_per_token for r in each]
    return {"tau": tokens / count, "stages": sum(r.drafted for r in each) / BLOCK / count, "verifications": count / tokens,
            "seconds": seconds}  # fmt: skip


def arms(target, base, looped, prompts, temperature, tokens):
    """{arm: figures}, the automatic gate's regret against static ones among them."""
    out = {"base": figures(decode(target, base, prompts, temperature, tokens))}
    out["loop only, -0.5"] = figures(decode(target, base, prompts, temperature, tokens, -0.5))
    out["loop only, auto"] = figures(decode(target, base, prompts, temperature, tokens, "auto"))
    out["training only"] = figures(decode(target, looped, prompts, temperature, tokens))
    for g in GATES:
        out[f"both, {g}"] = figures(decode(target, looped, prompts, temperature, tokens, g))
    out["both, auto"] = figures(decode(target, looped, prompts, temperature, tokens, "auto"))
    everything = decode(target, looped, prompts, temperature, tokens, -1e9)
    out["both, oracle"] = oracle(everything)
    for g in GATES:  # the gates on the oracle's rounds, for a like comparison
        out[f"replay, {g}"] = {"seconds": [replay(rs, COSTS, gate(g)).seconds_per_token for rs in everything]}
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=1200, help="of each drafter; the target takes as many")
    parser.add_argument("--prompts", type=int, default=24, help="of each set")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "ablation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tiny:
        args.steps, args.prompts, args.tokens, args.output = 4, 1, 12, Path(tempfile.mkdtemp())
    args.output.mkdir(parents=True, exist_ok=True)
    language, kept = Language(), args.output / "target"
    if (kept / "config.json").exists():
        target = LlamaForCausalLM.from_pretrained(kept).eval()
    else:
        target = train_target(language, args.steps)
        target.save_pretrained(kept)
    data = answers(target, language, 2 if args.tiny else 256, "data")
    base, looped = (train_drafter(target, data, args.steps, n, args.output / f"exposure-{n}") for n in (0, 3))
    rows = ["| documents | T | arm | tau | stages | verifications per 100 tokens | speed over base |", "|---" * 7 + "|"]
    results = {}
    for name, order in SETS.items():
        rng = random.Random(f"prompts {name}")
        prompts = [language.document(order, 24, rng) for _ in range(args.prompts)]
        for temperature in (0.0, 1.0):
            results[f"{name}, {temperature}"] = found = arms(target, base, looped, prompts, temperature, args.tokens)
            rows += lines(name, temperature, found)
            (args.output / "ablation.json").write_text(json.dumps(results), encoding="utf-8")
    print("\n".join(rows))
    (args.output / "ablation.md").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
