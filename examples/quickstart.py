"""Load a target and its drafter, generate, and look at what the drafter did.

    python examples/quickstart.py Qwen/Qwen3-4B deepseek-ai/dspark_qwen3_4b_block7
    python examples/quickstart.py smollm2 model_cards/dspark-smollm2-135m-instruct     # after `make demo`
    python examples/quickstart.py --tiny          # random models of a few kilobytes, no download
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_dspark import AutoDrafter, DSparkConfig, DSparkDrafter, SpeculationConfig
from hf_dspark.embedded import load_smollm2


def tiny_models():
    """A random target, a random drafter for it, and a prompt: drafts are nonsense, the text is the target's all the same."""
    torch.manual_seed(0)
    body = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, initializer_range=0.3, eos_token_id=None, **body)).eval()
    config = DSparkConfig(**body, target_layer_ids=[0, 2], num_target_layers=4, block_size=4, mask_token_id=63, markov_rank=8)
    return target, DSparkDrafter(config).bind(target).eval(), torch.randint(1, 60, (1, 8)), lambda ids: str(ids.tolist())


def load_target(name, dtype=torch.float32):
    """A target and its tokenizer; `smollm2` is the model of the demo extra, in `dtype`."""
    if name == "smollm2":
        return load_smollm2(dtype)
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto"), AutoTokenizer.from_pretrained(name)


def real_models(target_name, drafter_name):
    target, tokenizer = load_target(target_name)
    drafter = AutoDrafter.from_pretrained(drafter_name, target=target)
    chat = [{"role": "user", "content": "Explain speculative decoding to a child in five sentences."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    return target, drafter, ids.to(target.device), lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="Hub id, folder, or smollm2 for the model of the demo extra")
    parser.add_argument("drafter", nargs="?", help="Hub id or folder, in any published format")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and not args.drafter:
        parser.error("name a target and its drafter, or pass --tiny")
    target, drafter, ids, text = tiny_models() if args.tiny else real_models(args.target, args.drafter)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24 if args.tiny else 256)

    # The whole change is one argument. Greedy text is the text without a drafter.
    out = target.generate(ids, assistant_model=drafter, do_sample=False, return_dict_in_generate=True, **options)
    print(text(out.sequences[0, ids.shape[1] :]))
    stats = out.speculation
    drafted = f"{stats.acceptance_rate:.0%} of the drafts accepted" if sum(stats.draft_lengths[0]) else "no drafts"
    print(f"\n{stats.tau:.2f} tokens per forward of the target, {drafted}")
    print(f"drafting {stats.draft_seconds:.2f} s, verifying {stats.verify_seconds:.2f} s")
    if args.tiny:
        plain = target.generate(ids, do_sample=False, **options)
        print("the same as without a drafter:", torch.equal(plain, out.sequences))

    # Sampling has the target's distribution; with "match" and a seed it can be repeated token for token.
    speculation = SpeculationConfig(verification="match", seed=7)
    sampled = target.generate(
        ids, assistant_model=drafter, do_sample=True, temperature=0.8, top_p=0.95, speculation=speculation, **options
    )
    print("\n" + text(sampled[0, ids.shape[1] :]))


if __name__ == "__main__":
    main()
