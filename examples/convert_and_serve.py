"""Try a drafter in Python, then export it for the server you outgrow Python with.

    python examples/convert_and_serve.py deepseek-ai/dspark_qwen3_4b_block7 Qwen/Qwen3-4B
    python examples/convert_and_serve.py --tiny          # random models of a few kilobytes, no download
"""

import argparse
import tempfile
from pathlib import Path

import torch
from quickstart import load_target
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import AutoDrafter, DSparkConfig, DSparkDrafter
from hf_dspark.hub import export

SERVE = {
    "speculators": """vllm serve {target} --speculative-config \\
    '{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": {drafts}}}'""",
    "deepspec": """vllm serve {target} --speculative-config \\
    '{{"method": "dspark", "model": "{folder}", "num_speculative_tokens": {drafts}}}'""",
    "sglang": """python -m sglang.launch_server --model-path {target} \\
    --speculative-algorithm {method_upper} --speculative-draft-model-path {folder}""",
    "zlab": """vllm serve {target} --speculative-config \\
    '{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {drafts}}}'""",
}


def tiny_models(folder: Path):
    """A random target and a random drafter for it: they draft nonsense, but every step below is the real one."""
    body = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    target = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=4, **body))
    taps = dict(target_layer_ids=[0, 2], num_target_layers=4)
    config = DSparkConfig(**body, **taps, block_size=4, mask_token_id=63, markov_rank=8, confidence_head=True)
    target.save_pretrained(folder / "target")
    DSparkDrafter(config).save_pretrained(folder / "drafter")
    return folder / "drafter", folder / "target"


def method(config) -> str:
    """vLLM's name for such a drafter, which it must be given. SGLang has the same in capitals."""
    if config.model_type != "hf_dspark":
        return config.model_type.removeprefix("hf_")
    plain = config.correction_head == "none" and not config.sample_from_anchor
    return "dflash" if plain or config.correction_head == "domino" else "dspark"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", nargs="?", help="Hub id or folder, in any published format")
    parser.add_argument("target", nargs="?", help="Hub id, folder, or smollm2")
    parser.add_argument("--out", type=Path, help="where the exports go; a temporary folder by default")
    parser.add_argument("--tiny", action="store_true", help="random models instead")
    args = parser.parse_args()
    if not args.tiny and not (args.drafter and args.target):
        parser.error("name a drafter and its target, or pass --tiny")
    out = args.out or Path(tempfile.mkdtemp())
    drafter_name, target_name = tiny_models(out) if args.tiny else (args.drafter, args.target)

    target = AutoModelForCausalLM.from_pretrained(target_name) if args.tiny else load_target(target_name)[0]
    target_name = target.config.name_or_path
    drafter = AutoDrafter.from_pretrained(drafter_name, target=target)
    prompt = torch.tensor([[5, 9, 11, 7]])
    generated = target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    print(f"Drafting works: {generated[0, 4:].tolist()}, {drafter.last_speculation.tau:.2f} tokens per target forward\n")

    for name, command in SERVE.items():
        try:
            folder = export(drafter, out / name, name, dtype=torch.bfloat16)
        except ValueError as why:
            print(f"{name}: {why}\n")
            continue
        facts = dict(target=target_name, folder=folder, drafts=drafter.config.max_block, method=method(drafter.config))
        print(f"{name}:\n    {command.format(**facts, method_upper=facts['method'].upper())}\n")


if __name__ == "__main__":
    main()
