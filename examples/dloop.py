"""Looped drafting (DLoop): several drafting stages per verification, with a fixed gate, an automatic one, and none.

python examples/dloop.py TARGET DRAFTER
python examples/dloop.py --tiny          # random models: nothing is accepted, and the text is the target's all the same
"""

import argparse
from collections import Counter

import torch
from quickstart import load_target
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark import AutoDrafter, DSparkConfig, DSparkDrafter, SpeculationConfig

GATES = {"one stage": None, "gate -0.5": -0.5, "gate -1.0": -1.0, "auto": "auto"}


def tiny_models():
    torch.manual_seed(0)
    body = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, initializer_range=0.3, eos_token_id=None, **body)).eval()
    heads = dict(markov_rank=8, confidence_head=True)
    config = DSparkConfig(**body, target_layer_ids=[0, 2], num_target_layers=4, block_size=4, mask_token_id=63, **heads)
    return target, DSparkDrafter(config).bind(target).eval(), torch.randint(1, 60, (1, 8))


def real_models(target_name, drafter_name, prompt):
    target, tokenizer = load_target(target_name)
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    return target, AutoDrafter.from_pretrained(drafter_name, target=target), ids.to(target.device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="Hub id, folder, or smollm2")
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--prompt", default="Write the multiplication table of 7, one product per line.")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and not args.drafter:
        parser.error("name a target and its drafter, or pass --tiny")
    target, drafter, ids = tiny_models() if args.tiny else real_models(args.target, args.drafter, args.prompt)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24 if args.tiny else 256, do_sample=False)
    texts = []
    for name, gate in GATES.items():
        speculation = SpeculationConfig(loop_gate=gate, max_draft_stages=8)
        texts.append(target.generate(ids, assistant_model=drafter, speculation=speculation, **options))
        stats = drafter.last_speculation
        seconds = stats.draft_seconds + stats.verify_seconds + stats.overhead_seconds
        stages = dict(sorted(Counter(stats.draft_stages[0]).items()))
        verifications = len(stats.draft_stages[0])
        print(
            f"{name:>10}: tau {stats.tau:.2f}, {verifications} verifications, {seconds:.2f} s, rounds by stages {stages}"
        )
    if target.dtype == torch.float32:
        print("same text with every gate:", all(torch.equal(texts[0], t) for t in texts))


if __name__ == "__main__":
    main()
