"""`hf-dspark train`: a drafter, or several side by side, for a target."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.evaluation.environment import environment

from .shared import EMBEDDED, check_drafter, load_drafter, load_target, say

app = typer.Typer(add_completion=False)
METHODS = {
    "dspark": dict(correction_head="markov", confidence_head=True),
    "dflash": dict(correction_head="none", confidence_head=False),
    "gated": dict(correction_head="gated", confidence_head=True),
    "rnn": dict(correction_head="rnn", confidence_head=True),
    "eagle3": {},
    "mtp": dict(tap_final_norm=True),
    "domino": dict(correction_head="domino", confidence_head=False, pure_draft_prefix_len=1),
}


@app.command()
def train(
    target: str = typer.Argument(..., help=f"Hub id or folder of the target; '{EMBEDDED}' is the demo's model."),
    data: Annotated[Path, typer.Option(exists=True, help="jsonl from `hf-dspark data generate`.")] = ...,
    output: Annotated[Path, typer.Option(help="Folder for checkpoints; the trained drafter lies in its `final`.")] = ...,
    eval_data: Annotated[Path, typer.Option(exists=True, help="Held-out jsonl.")] = None,
    eval_rows: int = typer.Option(64, help="Rows of --eval-data to use."),
    method: Annotated[list[str], typer.Option(help=f"{', '.join(METHODS)}; several train side by side.")] = ("dspark",),
    mask_token_id: int = typer.Option(None, help="An id that never occurs in text; needed for a new drafter."),
    block_size: int = typer.Option(7, help="Drafts of a block."),
    layers: int = typer.Option(1, help="Layers of the drafter."),
    markov_rank: int = typer.Option(256, help="Rank of the correction head."),
    draft_vocab_size: int = typer.Option(None, help="Draft only the most frequent ids of the data; all by default."),
    layer_ids: str = typer.Option(None, help="Tapped target layers with commas; five spread evenly by default."),
    init_from: str = typer.Option(None, help="'target' for its last layers, or a drafter to take what fits from."),
    max_length: int = typer.Option(4096, help="Longer chats are cut, packed rows filled up to here."),
    pack: bool = typer.Option(False, help="Several chats in a row of --max-length."),
    thinking: bool = typer.Option(None, help="How the data's chats were rendered; kept in the drafter's config."),
    num_anchors: int = typer.Option(512, help="Blocks drawn per chat."),
    batch_size: int = typer.Option(4, help="Chats of a micro-batch."),
    accumulate: int = typer.Option(1, help="Micro-batches of a step."),
    epochs: float = typer.Option(1.0, help="Passes over the data."),
    max_steps: int = typer.Option(-1, help="Instead of --epochs."),
    learning_rate: float = typer.Option(6e-4, help="Peak; warm-up over 4 % of the run, then a cosine to 0."),
    ce: float = typer.Option(0.1, help="Weight of the cross entropy of true tokens."),
    distill: float = typer.Option(0.9, help="Weight of KL or TV to the target."),
    confidence: float = typer.Option(1.0, help="Weight of the confidence loss."),
    kl_until: float = typer.Option(0.75, help="Share of the run over which KL turns into TV; 0 is TV at once."),
    loop_exposure: int = typer.Option(0, help="N of loop-aware training; 3 is typical."),
    loop_start: float = typer.Option(0.0, help="Share of the run before it begins."),
    feature_cache: str = typer.Option(None, help="Folder for the target's outputs, so that only the first epoch runs it."),
    feature_cache_gb: float = typer.Option(20.0, help="The cache stops growing there."),
    bf16: bool = typer.Option(False, help="bfloat16 autocast, float32 weights."),
    gradient_checkpointing: bool = typer.Option(False, help="Less memory, more time."),
    decode_prompts: int = typer.Option(8, help="Prompts of --eval-data that each evaluation really decodes."),
    decode_tokens: int = typer.Option(64, help="Tokens of each."),
    eval_steps: int = typer.Option(None, help="Steps between evaluations."),
    save_steps: int = typer.Option(500, help="Steps between checkpoints."),
    resume: bool = typer.Option(False, help="Go on from the last checkpoint in OUTPUT."),
    seed: int = typer.Option(0, help="Of weights, order, anchors and stages."),
    dtype: str = typer.Option("auto", help="Of the target: auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, ...; what accelerate chooses by default."),
):
    """Train a drafter for a target, or several on one target's features; under `accelerate launch` on many devices."""
    if init_from != "target":
        check_drafter(init_from)
    import transformers
    from transformers import TrainingArguments

    from hf_dspark.training import ChatDataset, DecodeCheck, DrafterTrainer, DrafterTrainingArguments, plot_history

    if unknown := [m for m in method if m not in METHODS]:
        raise ValueError(f"--method {unknown[0]} is unknown: use {', '.join(METHODS)}.")
    transformers.set_seed(seed)
    checkpointing = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))
    arguments = DrafterTrainingArguments(
        output_dir=str(output), per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulate,
        num_train_epochs=epochs, max_steps=max_steps, learning_rate=learning_rate, lr_scheduler_type="cosine",
        warmup_steps=0.04, weight_decay=0.0, bf16=bf16, use_cpu=device == "cpu", seed=seed, logging_steps=10, report_to=[],
        eval_strategy="steps" if eval_data and eval_steps else "no", eval_steps=eval_steps, save_steps=save_steps,
        save_total_limit=2, num_anchors=num_anchors, pack=pack, max_length=max_length, ce_weight=ce, distill_weight=distill,
        confidence_weight=confidence, kl_until=kl_until, loop_exposure=loop_exposure, loop_start=loop_start,
        feature_cache=feature_cache, feature_cache_gb=feature_cache_gb, **{checkpointing: gradient_checkpointing},
    )  # fmt: skip
    model, tokenizer = load_target(target, dtype, str(arguments.device))
    options = {"tokenizer": tokenizer, "max_length": max_length, "enable_thinking": thinking}
    dataset = ChatDataset.from_jsonl(data, **options)
    held_out = ChatDataset.from_jsonl(eval_data, limit=eval_rows, **options) if eval_data else None

    common = {"block_size": block_size, "num_hidden_layers": layers, "markov_rank": markov_rank}
    if layer_ids:
        common["target_layer_ids"] = [int(i) for i in layer_ids.split(",")]
    if target != EMBEDDED:
        common["target_name"] = target
    drafters = {
        name: build(model, dataset, mask_token_id, draft_vocab_size, init_from, {**common, **METHODS[name]}) for name in method
    }
    for drafter in drafters.values():
        drafter.config.template_hash, drafter.config.enable_thinking = template_of(tokenizer), thinking
    trainer = DrafterTrainer(
        drafters if len(drafters) > 1 else drafters[method[0]],
        arguments,
        model,
        dataset,
        eval_dataset=held_out,
        decode_check=DecodeCheck.from_dataset(model, held_out, decode_prompts, decode_tokens) if held_out else None,
    )
    result = trainer.train(resume_from_checkpoint=resume or None)
    if held_out:
        say(json.dumps(trainer.evaluate(), indent=1))
    trainer.save_model(str(output / "final"))
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(output / "final" / "trainer_state.json"))
        try:
            plot_history(trainer.state.log_history, output / "final" / "training.png")
        except ImportError as error:
            say(str(error))
        record = run_record(model, dataset, data, trainer.state.global_step, result.metrics["train_runtime"] / 3600)
        for name in drafters:
            folder = output / "final" / (name if len(drafters) > 1 else "")
            (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        say(f"Trained: {output / 'final'}")
    trainer.accelerator.wait_for_everyone()  # or processes that are done would end those that still write
    trainer.accelerator.end_training()


def run_record(target, dataset, data: Path, steps: int, hours: float) -> dict:
    """What `hf-dspark card` says of a run; `hours` are those since the last resume."""
    facts = environment(target)
    return {
        "target": target.config._name_or_path or type(target).__name__,
        "data": f"{data.name}, the target's own answers",
        "examples": len(dataset),
        "tokens": dataset.supervised,
        "steps": steps,
        "hours": round(hours, 3),
        "machine": f"{facts['cpu']}, {facts['threads']} threads" if facts["device"] == "cpu" else facts["machine"],
        "command": shlex.join(["hf-dspark", "train", *sys.argv[2:]]),
        "versions": facts["versions"],
    }


def template_of(tokenizer):
    from hf_dspark.training import template_hash

    return template_hash(tokenizer)


def build(target, dataset, mask_token_id, draft_vocab_size, init_from, options):
    """A drafter by the options, or what `init_from` gives."""
    from hf_dspark.training import init_from_drafter, init_from_target, init_mtp, new_drafter, new_eagle3, new_mtp

    other = load_drafter(init_from, target) if init_from and init_from != "target" else None
    text = target.config.get_text_config()
    ids = dataset.draft_vocabulary(draft_vocab_size, text.vocab_size) if draft_vocab_size else None
    if "tap_final_norm" in options:
        drafter = new_mtp(target, ids, chain_length=options["block_size"], target_name=options.get("target_name"))
        if other is not None:
            init_from_drafter(drafter, other)
        elif init_from == "target":
            init_mtp(drafter, target)
        return drafter
    if "correction_head" not in options:
        taps = {k: v for k, v in options.items() if k in ("target_layer_ids", "target_name", "num_hidden_layers")}
        return new_eagle3(target, ids, chain_length=options["block_size"], **taps)
    if mask_token_id is None and other is None:
        raise ValueError(
            "A new drafter fills its blocks with a token that never occurs in text, and none was named: pass --mask-token-id "
            "(an unused special token of the tokenizer)."
        )
    if other is not None:
        mask_token_id = other.config.mask_token_id if mask_token_id is None else mask_token_id
    if options["correction_head"] == "domino":
        options |= {"gru_hidden_size": text.hidden_size, "correction_size": options["markov_rank"]}
    drafter = new_drafter(target, mask_token_id, ids, **options)
    if other is not None:
        init_from_drafter(drafter, other)
    elif init_from == "target":
        init_from_target(drafter, target)
    return drafter
