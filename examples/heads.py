"""Multi-token-prediction heads that lie in the target's own checkpoint: no separate drafter, any batch size.

    python examples/heads.py TARGET        # a GLM-4 MoE or DeepSeek-V3 model, say
    python examples/heads.py --tiny        # a random target that carries one random head

The demo's model, smollm2, has none.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

from hf_dspark import AutoDrafter, SpeculationConfig


def tiny_target(folder: Path):
    """A checkpoint with one layer more than its target has, and a head's projection and norms around it."""
    torch.manual_seed(0)
    body = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, initializer_range=0.3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    Glm4MoeForCausalLM(Glm4MoeConfig(num_hidden_layers=3, **body)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    head = {name: torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    head["eh_proj"] = torch.cat([0.1 * torch.randn(32, 32), torch.eye(32)], 1)
    weights |= {f"model.layers.2.{name}.weight": weight for name, weight in head.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, config=Glm4MoeConfig(num_hidden_layers=2, **body))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and args.target is None:
        parser.error("give TARGET, whose checkpoint carries heads, or pass --tiny")
    if args.tiny:
        target = tiny_target(Path(tempfile.mkdtemp()))
        inputs = {"input_ids": torch.randint(1, 60, (3, 8))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto", device_map="auto")
        tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
        prompts = ["The three largest cities of Japan are", "def fibonacci(n):", "Water boils at"]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(target.device)
    drafter = AutoDrafter.from_target(target, chain_length=3)  # a single head may be fed its own output
    options = dict(max_new_tokens=24 if args.tiny else 256, do_sample=False)
    plain = target.generate(**inputs, **options)
    for name, gate in (("chains of 3", None), ("looped", -0.5)):
        text = target.generate(
            **inputs, **options, assistant_model=drafter, speculation=SpeculationConfig(loop_gate=gate)
        )
        print(
            f"{name}: {drafter.last_speculation.tau:.2f} tokens per forward of the target and row, batch of {len(text)}"
        )
        if target.dtype == torch.float32:
            print("the same as without a drafter:", torch.equal(text, plain))


if __name__ == "__main__":
    main()
