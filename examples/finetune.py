"""Train a drafter on a target's own answers: with `DrafterTrainer`, and with transformers' stock `Trainer` on stored features.

    python examples/finetune.py --tiny          seconds, on random models
    python examples/finetune.py smollm2 --data answers.jsonl --steps 300      SmolLM2-135M-Instruct from the demo extra

Answers come from `hf-dspark data generate`. On one CPU core, 300 steps of 4 x 64 blocks take about ten minutes and the drafter
then emits about 1.3 tokens per round; `hf-dspark train --help` has the knobs for more.
"""

import argparse
import tempfile

import torch
from quickstart import load_target
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_dspark.training import ChatDataset, DecodeCheck, DrafterTrainer, DrafterTrainingArguments, new_drafter
from hf_dspark.training.targets import FrozenTarget


def tiny_world():
    """A random target and its own greedy answers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    prompts = torch.randint(1, 60, (24, 4))
    texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, do_sample=False)
    return target, ChatDataset([{"input_ids": ids, "prompt_len": 4} for ids in texts.tolist()]), {"mask_token_id": 63}


def real_world(args):
    target, tokenizer = load_target(args.target, torch.bfloat16)
    data, vocabulary = ChatDataset.from_jsonl(args.data, tokenizer), target.config.get_text_config().vocab_size
    options = {"mask_token_id": args.mask_token_id, "draft_ids": data.draft_vocabulary(8192, vocabulary)}
    return target, data, {**options, "target_name": target.config.name_or_path}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target", nargs="?", help="Hub id, folder, or smollm2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--mask-token-id", type=int, default=16, help="an id that text never holds; 16 suits smollm2")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output")
    args = parser.parse_args()
    if not args.tiny and not (args.target and args.data):
        parser.error("name a target and --data, or pass --tiny")
    target, data, options = tiny_world() if args.tiny else real_world(args)
    output = args.output or tempfile.mkdtemp()
    common = {"output_dir": output, "max_steps": args.steps, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    common |= {"logging_steps": max(1, args.steps // 4), "per_device_train_batch_size": 4}
    common |= {"learning_rate": 1e-2 if args.tiny else 2e-3}

    # Ours: the target runs inside the step, losses compare distributions, and evaluation really decodes.
    drafter = new_drafter(target, block_size=5, num_hidden_layers=1, markov_rank=32, confidence_head=True, **options)
    arguments = DrafterTrainingArguments(**common, num_anchors=64, bf16=not args.tiny)
    check = DecodeCheck.from_dataset(target, data, count=4, max_new_tokens=16)
    before = check(drafter)
    DrafterTrainer(drafter, arguments, target, data).train()
    print("decoding before", before, "and after", check(drafter))
    drafter.save_pretrained(output)

    # Stock: any dataset with features, input_ids and labels of one length; the loss is plain cross entropy.
    frozen, rows = FrozenTarget(target, drafter.config.target_layer_ids), []
    for example in data.examples[:24]:
        ids, labels = (torch.tensor(example[k])[: 20 if args.tiny else 128] for k in ("input_ids", "labels"))
        if len(ids) == (20 if args.tiny else 128):
            features = frozen(ids[None], labels[None], torch.arange(len(ids))[None], packed=False).features[0]
            rows.append({"features": features.float(), "input_ids": ids, "labels": labels})
    Trainer(drafter, TrainingArguments(**{**common, "max_steps": 5, "logging_steps": 5}), train_dataset=rows).train()


if __name__ == "__main__":
    main()
