"""Answer several prompts at once, and keep a chat going without reading its past again.

    python examples/batch_and_chat.py Qwen/Qwen3-4B deepseek-ai/dspark_qwen3_4b_block7
    python examples/batch_and_chat.py --tiny          # random models of a few kilobytes, no download
"""

import argparse

import torch
from quickstart import load_target, tiny_models

from hf_dspark import AutoDrafter

PROMPTS = ("Why is the sky blue?", "Write a haiku about rivers.", "What is 17 times 23? Think step by step.")
TURNS = ("Name a river in Africa.", "How long is it?", "Which countries does it cross?")


def real_world(args):
    target, tokenizer = load_target(args.target)
    drafter = AutoDrafter.from_pretrained(args.drafter, target=target)

    def render(chat):
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]

    return target, drafter, render, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), tokenizer.pad_token_id or 0


def tiny_world():
    """Every character is a token, those above 255 spell the answers, which so render as they were generated."""
    target, drafter, _, _ = tiny_models()
    render = lambda chat: [ord(c) - 256 if ord(c) > 255 else 1 + ord(c) % 59 for m in chat for c in m["content"]]  # noqa: E731
    return target, drafter, render, lambda ids: "".join(chr(256 + i) for i in ids), 0


def batch(target, drafter, render, text, pad, new):
    """Rows of different lengths, padded on the left; each gets the text it would get alone."""
    rows = [render([{"role": "user", "content": p}]) for p in PROMPTS]
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows], device=target.device)
    mask = torch.arange(width, device=target.device) >= torch.tensor([[width - len(r)] for r in rows], device=target.device)
    options = dict(max_new_tokens=new, do_sample=False, pad_token_id=pad, return_dict_in_generate=True)
    out = target.generate(ids, attention_mask=mask.long(), assistant_model=drafter, **options)
    for prompt, row, lengths in zip(PROMPTS, out.sequences, out.speculation.acceptance_lengths, strict=True):
        print(f"> {prompt}\n{text(row[width:].tolist())}\n[{sum(lengths) / len(lengths):.2f} tokens per forward]\n")


def chat(target, drafter, render, text, new):
    """The cache of one turn goes into the next, and with it what the drafter knows of the conversation."""
    history, known, cache = [], [], {}
    for turn in TURNS:
        history.append({"role": "user", "content": turn})
        ids = render(history)
        if ids[: len(known)] != known:  # the template renders answers otherwise than they were generated: start over
            cache, known = {}, []
        inputs = torch.tensor([ids], device=target.device)
        options = dict(max_new_tokens=new, do_sample=False, return_dict_in_generate=True, **cache)
        out = target.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_model=drafter, **options)
        answer = out.sequences[0, len(ids) :].tolist()
        name = "cache" if "cache" in out else "past_key_values"  # before transformers 5.24
        read, cache, known = len(ids) - len(known), {name: out[name]}, out.sequences[0, :-1].tolist()
        history.append({"role": "assistant", "content": text(answer)})
        print(f"> {turn}\n{text(answer)}\n[read {read} of {len(ids)} tokens, {out.speculation.tau:.2f} tokens per forward]\n")


def main():
    parser = argparse.ArgumentParser(description="Batches and chats with a drafter.")
    parser.add_argument("target", nargs="?", help="Hub id, folder, or smollm2")
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and not args.drafter:
        parser.error("name a target and its drafter, or pass --tiny")
    target, drafter, render, text, pad = tiny_world() if args.tiny else real_world(args)
    batch(target, drafter, render, text, pad, 12 if args.tiny else 256)
    chat(target, drafter, render, text, 12 if args.tiny else 128)


if __name__ == "__main__":
    main()
