"""`hf-dspark train`: a drafter, or several side by side, for a target."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import typer

from hf_dspark.evaluation.environment import environment

from .shared import EMBEDDED, check_drafter, console, load_drafter, load_target, say, table, warn

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def train(ctx: typer.Context):
    """Train a drafter for a target, or several on one target's features; the options are those of
    `train_options.py`."""
    from .train_options import parse

    given, arguments = parse(ctx.args or ["--help"])
    if given.init_from != "target":
        check_drafter(given.init_from)
    elif "eagle3" in given.method:
        raise ValueError(
            "--init-from target was given with --method eagle3, whose layer reads twice the target's width, so the "
            "target's layers don't fit: leave --init-from out, or name a trained drafter."
        )
    output, publish = Path(arguments.output_dir), publication(given, arguments)
    old = claim(output, given.resume, given.overwrite)
    if is_finished(output, arguments, given.resume):
        say(f"The run in {output} is finished, so there is nothing to train: set more steps to continue it.")
        return
    trainer, record = prepare(given, arguments)
    for path in old if arguments.process_index == 0 else []:  # only now, as nothing can be refused any more
        shutil.rmtree(path)
    try:
        seconds = run(trainer, given, arguments)
    except KeyboardInterrupt:
        step = trainer.state.global_step
        say(f"Stopped at step {step}. Go on with --resume, from the last checkpoint in {output}.")
        raise typer.Exit(130) from None
    if trainer.eval_dataset is not None:
        show(trainer.evaluate(), list(trainer.named))
    write(trainer, output / "final", {**record, "steps": trainer.state.global_step, "hours": round(seconds / 3600, 3)})
    if trainer.is_world_process_zero() and publish:
        say(f"Published: {push(output / 'final', **publish)}")
    trainer.accelerator.wait_for_everyone()  # or processes that are done would end those that still write
    trainer.accelerator.end_training()


def publication(given, arguments) -> dict:
    """What --push-to-hub asks for, taken from the trainer, which would publish checkpoints instead of the drafter."""
    if not arguments.push_to_hub:
        return {}
    if len(given.method) > 1:
        raise ValueError(
            "--push-to-hub publishes one drafter, and several methods were given: train one, or push by hand."
        )
    arguments.push_to_hub = False
    name = arguments.hub_model_id or Path(arguments.output_dir).resolve().name
    return {
        "name": name,
        "private": arguments.hub_private_repo,
        "token": arguments.hub_token,
        "branch": arguments.hub_revision,
    }


def push(folder: Path, name: str, private, token, branch) -> str:
    """Write the drafter's card and upload its folder; the address of the commit."""
    from huggingface_hub import HfApi

    from hf_dspark.hub.card import write_card

    write_card(folder)
    api = HfApi(token=token)
    repo = api.create_repo(name, private=private, exist_ok=True).repo_id
    if branch:
        api.create_branch(repo, branch=branch, exist_ok=True)
    return str(api.upload_folder(repo_id=repo, folder_path=folder, revision=branch))


def is_finished(output: Path, arguments, resume: bool) -> bool:
    """Whether --resume meets a run that has all its steps and wrote its drafter."""
    from transformers.trainer_utils import get_last_checkpoint

    from hf_dspark.training.trainer import finished_state

    last = get_last_checkpoint(output) if resume and (output / "final").exists() else None
    return last is not None and finished_state(last, arguments) is not None


def claim(output: Path, resume: bool, overwrite: bool) -> list[Path]:
    """Refuse a folder that holds a run, unless it is to be gone on with or replaced; the checkpoints to remove then.

    Raises:
        ValueError: a run nobody gave up, a file in the place of a folder, or both options.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file: name a folder.")
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it: give one of them.")
    checkpoints = sorted(output.glob("checkpoint-*"))
    found = [*checkpoints, *([output / "final"] if (output / "final").exists() else [])]
    if found and not (resume or overwrite):
        raise ValueError(
            f"{output} holds a run ({', '.join(path.name for path in found)}): continue it with --resume, replace it "
            "with --overwrite, or give another --output."
        )
    return checkpoints if overwrite else []


def prepare(given, arguments):
    """The trainer, and what is known of the run before it begins."""
    import transformers

    from hf_dspark.training import ChatDataset, DecodeCheck, DrafterTrainer, template_hash
    from hf_dspark.training.callbacks import LogLines

    transformers.set_seed(arguments.seed)
    model, tokenizer = load_target(given.target, given.dtype, str(arguments.device))
    options = {"tokenizer": tokenizer, "max_length": arguments.max_length, "enable_thinking": given.thinking}
    dataset = ChatDataset.from_jsonl(given.data, **options)
    held_out = ChatDataset.from_jsonl(given.eval_data, limit=given.eval_rows, **options) if given.eval_data else None
    drafters = {name: build(name, model, tokenizer, dataset, given) for name in given.method}
    for drafter in drafters.values():
        drafter.config.template_hash, drafter.config.enable_thinking = template_hash(tokenizer), given.thinking
    check = DecodeCheck.from_dataset(model, held_out, given.decode_prompts, given.decode_tokens) if held_out else None
    drafter = drafters if len(drafters) > 1 else drafters[given.method[0]]
    trainer = DrafterTrainer(drafter, arguments, model, dataset, eval_dataset=held_out, decode_check=check)
    for shown in (transformers.ProgressCallback, transformers.PrinterCallback):
        trainer.remove_callback(shown)
    trainer.add_callback(LogLines)
    return trainer, run_record(model, dataset, given.data)


def run(trainer, given, arguments) -> float:
    """Train; the seconds it took.

    Raises:
        KeyboardInterrupt: the run was stopped before its end.
    """
    from hf_dspark.training.callbacks import StopOnInterrupt

    stop = StopOnInterrupt()
    trainer.add_callback(stop)
    result = trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint or given.resume or None)
    if stop.interrupted and trainer.state.global_step < trainer.state.max_steps:
        raise KeyboardInterrupt
    return result.metrics["train_runtime"]


def show(metrics: dict, names: list[str]) -> None:
    """The held-out metrics, a column per drafter."""
    prefixes = {name: f"eval_{name}_" if name else "eval_" for name in names}
    wanted = ("tau", "greedy_tau", "decode_tau", "accept_rate@1", "ce_loss", "kl_loss", "tv_loss")
    body = [[key, *(metrics.get(prefix + key) for prefix in prefixes.values())] for key in wanted]
    console.print(
        table(f"held out, loss {metrics['eval_loss']:.3f}", ["", *(name or "drafter" for name in names)], body)
    )


def write(trainer, final: Path, record: dict) -> None:
    """The drafter, or a folder for each; the old ones go, and a card of theirs is marked."""
    from hf_dspark.hub.card import mark_stale
    from hf_dspark.training import plot_history

    first = trainer.is_world_process_zero()
    if first and final.exists():
        for path in [p for p in final.rglob("*") if p.is_file() and p.name != "README.md"]:
            path.unlink()
    trainer.save_model(str(final))
    if not first:
        return
    trainer.state.save_to_json(str(final / "trainer_state.json"))
    try:
        plot_history(trainer.state.log_history, final / "training.png")
    except ImportError as error:
        say(str(error))
    for name in trainer.named:
        folder = final / name
        (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if mark_stale(folder):
            warn([f"{folder / 'README.md'} was written for other weights and is marked so: run `hf-dspark card`."])
    say(f"Trained: {final}")


def run_record(target, dataset, data: Path) -> dict:
    """What `hf-dspark card` says of a run."""
    facts = environment(target)
    return {
        "target": target.config._name_or_path or type(target).__name__,
        "data": f"{data.name}, the target's own answers",
        "examples": len(dataset),
        "tokens": dataset.supervised,
        "machine": f"{facts['cpu']}, {facts['threads']} threads" if facts["device"] == "cpu" else facts["machine"],
        "command": shlex.join(["hf-dspark", "train", *sys.argv[2:]]),
        "versions": facts["versions"],
    }


def build(method: str, target, tokenizer, dataset, given):
    """A drafter by the options, with the weights that --init-from gives."""
    from hf_dspark.training import init_from_drafter, init_from_target, init_mtp, new_drafter, new_eagle3, new_mtp

    from .train_options import METHODS

    text, options = target.config.get_text_config(), {"num_hidden_layers": given.layers}
    other = load_drafter(given.init_from, target) if given.init_from and given.init_from != "target" else None
    ids = dataset.draft_vocabulary(given.draft_vocab_size, text.vocab_size) if given.draft_vocab_size else None
    if given.layer_ids:
        options["target_layer_ids"] = [int(i) for i in given.layer_ids.split(",")]
    if given.target != EMBEDDED:
        options["target_name"] = given.target
    if method == "mtp":
        drafter = new_mtp(target, ids, chain_length=given.block_size, target_name=options.get("target_name"))
    elif method == "eagle3":
        drafter = new_eagle3(target, ids, chain_length=given.block_size, **options)
    else:
        mask = given.mask_token_id
        if mask is None and other is not None:
            mask = getattr(other.config, "mask_token_id", None)
        warn(filter(None, [dataset.check_mask_token(mask, tokenizer, text.vocab_size)]))
        options |= {"block_size": given.block_size, "markov_rank": given.markov_rank, **METHODS[method]}
        if method == "domino":
            options |= {"gru_hidden_size": text.hidden_size, "correction_size": given.markov_rank}
        drafter = new_drafter(target, mask, ids, **options)
    if other is not None:
        taken = init_from_drafter(drafter, other)
        say(f"{len(taken)} of {len(drafter.state_dict())} tensors of {method} start from {given.init_from}.")
    elif given.init_from == "target":
        (init_mtp if method == "mtp" else init_from_target)(drafter, target)
    return drafter
