"""`hf-dspark generate`: one prompt on the screen, or a file of prompts into a file of answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.evaluation.prompts import JsonLines, read_prompts, render

from .loading import QUANTIZATIONS
from .shared import (
    EMBEDDED,
    check_drafter,
    check_output,
    check_target,
    console,
    finite,
    interruptible,
    load_drafter,
    load_target,
    number,
    percent,
    progress,
    prompt_warnings,
    say,
    warn,
)

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    target: str = typer.Argument(
        ..., callback=check_target, help=f"Hub id or folder of the target; '{EMBEDDED}' is the demo's model."
    ),
    prompt: str = typer.Argument(None, help="The prompt; '-' reads standard input."),
    drafter: str = typer.Option(
        None, callback=check_drafter, help="Hub id or folder of a drafter, or 'none'; else copies."
    ),
    batch_file: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="jsonl of `prompt`, `turns` or `messages`, not PROMPT.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Answers of --batch-file; the same command continues an interrupted run.")
    ] = None,
    batch_size: int = typer.Option(1, min=1, help="Prompts of --batch-file decoded together."),
    max_new_tokens: int = typer.Option(256, min=1, help="Longest answer."),
    temperature: float = typer.Option(0.0, min=0, callback=finite, help="0 is greedy."),
    top_k: int = typer.Option(0, min=0, help="Sample from the k likeliest tokens; 0 from all."),
    top_p: float = typer.Option(
        1.0, min=0, max=1, callback=finite, help="Sample from the likeliest tokens of this share."
    ),
    min_p: float = typer.Option(
        None, min=0, max=1, callback=finite, help="Sample from tokens at least this likely relative to the likeliest."
    ),
    repetition_penalty: float = typer.Option(1.0, min=1e-3, callback=finite, help="Above 1 discourages repetition."),
    seed: int = typer.Option(None, min=0, help="Makes sampling repeatable."),
    num_draft_tokens: int = typer.Option(
        None, min=0, help="Drafts per stage; the drafter's trained length by default."
    ),
    confidence_threshold: float = typer.Option(
        None, min=0, max=1, callback=finite, help="Stop before the first draft whose confidence is lower."
    ),
    verification: str = typer.Option(None, help="ratio, block or match; all are exact."),
    loop_gate: str = typer.Option(None, help="Draft another stage from this log-probability on, e.g. -0.5, or 'auto'."),
    max_draft_stages: int = typer.Option(None, min=1, help="Most stages a round, with --loop-gate."),
    scheduler: str = typer.Option(None, help="auto or algorithm1: verify as many drafts as pay on this machine."),
    engine: str = typer.Option(None, help="own, or stock for transformers' assisted loop."),
    chat: bool = typer.Option(True, help="Render the prompt with the tokenizer's chat template."),
    thinking: bool = typer.Option(None, help="Passed to the chat template; its own default if neither is given."),
    system: str = typer.Option(None, help="A system message before the prompt."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
    quantize: str = typer.Option(None, help=f"Quantise the target while it is loaded: {', '.join(QUANTIZATIONS)}."),
    attn_implementation: str = typer.Option(None, help="Of the target: eager, sdpa, flash_attention_2, ..."),
    revision: str = typer.Option(None, help="Of the target on the Hub."),
    drafter_revision: str = typer.Option(None, help="Of the drafter on the Hub."),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run code from the target's repository."),
    stats: bool = typer.Option(True, help="Print speed and acceptance below the answer."),
):
    """Generate from one prompt, or from a file of prompts."""
    check_call(prompt, batch_file, out)
    prompts = read_prompts(batch_file) if batch_file else []
    given = dict(
        num_draft_tokens=num_draft_tokens, confidence_threshold=confidence_threshold, verification=verification,
        loop_gate=number_in(loop_gate), max_draft_stages=max_draft_stages, scheduler=scheduler, engine=engine, seed=seed,
    )  # fmt: skip
    given = {k: v for k, v in given.items() if v is not None}
    import torch

    from hf_dspark.modeling import SpeculationConfig

    SpeculationConfig(**given)  # a wrong knob is refused here, before anything is loaded
    loading = {"revision": revision, "trust_remote_code": trust_remote_code}
    loading |= {"attn_implementation": attn_implementation, "quantize": quantize}
    model, tokenizer = load_target(target, dtype, device, **loading)
    assistant = choose_drafter(drafter, model, drafter_revision)
    options = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "assistant_model": assistant}
    if repetition_penalty != 1.0:
        options["repetition_penalty"] = repetition_penalty
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        options |= {} if min_p is None else {"min_p": min_p}
    if assistant is not None:
        options["speculation"] = SpeculationConfig(**assistant.speculation.to_dict() | given)
        warn(prompt_warnings(assistant, tokenizer, chat, thinking))

    def ids_of(text: str) -> list[int]:
        messages = [{"role": "system", "content": system}] if system and chat else []
        return render(tokenizer, [*messages, {"role": "user", "content": text}], chat, thinking)

    if seed is not None:
        torch.manual_seed(seed)
    if batch_file is None:
        _one(model, tokenizer, ids_of(sys.stdin.read() if prompt == "-" else prompt), options, stats)
    else:
        settings = {
            "target": target,
            "drafter": drafter,
            "seed": seed,
            "chat": chat,
            "thinking": thinking,
            "system": system,
        }
        settings |= {k: v for k, v in options.items() if k not in ("assistant_model", "speculation")}
        settings |= {k: v for k, v in {**loading, "drafter_revision": drafter_revision}.items() if v}
        with interruptible(f"whole answers are in {out}; the same command continues."):
            _many(model, tokenizer, ids_of, prompts, out, batch_size, options, settings)


def check_call(prompt: str | None, batch_file: Path | None, out: Path | None) -> None:
    """Refuse arguments that don't go together.

    Raises:
        ValueError: with what to give instead.
    """
    if (prompt is None) == (batch_file is None):
        raise ValueError("Give either PROMPT or --batch-file, not both and not neither.")
    if prompt is not None and not prompt.strip():
        raise ValueError("PROMPT is empty, so there is nothing to answer: give a text, or '-' to read standard input.")
    if batch_file is not None and out is None:
        raise ValueError("--batch-file was given without --out, so there is nowhere to write: add --out answers.jsonl.")
    if batch_file is None and out is not None:
        raise ValueError(
            "--out is for the answers of --batch-file: leave it out, or give the prompt in a --batch-file."
        )
    check_output(out, "--out", overwrite=True)  # what an earlier call wrote there is gone on with
    if out is not None and out.exists() and out.samefile(batch_file):
        raise ValueError(f"--out {out} is the --batch-file itself: choose another --out.")


def choose_drafter(name: str | None, target, revision: str | None = None):
    """The drafter that was asked for, None for 'none', else copies of the text, which need no weights."""
    from hf_dspark import CopyDrafter

    if name == "none":
        return None
    return load_drafter(name, target, revision=revision) if name else CopyDrafter()


def number_in(text: str | None) -> float | str | None:
    """Example: `'-0.5'` -> `-0.5`; what is no number is left to others."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _one(model, tokenizer, ids, options, stats) -> None:
    import torch

    from .streaming import DraftPrinter

    printer, assistant = DraftPrinter(tokenizer, console), options["assistant_model"]
    model.generate(torch.tensor([ids], device=model.device), streamer=printer, **options)
    if not stats:
        return
    parts = (
        [f"{printer.tokens} tokens", f"{number(1 / printer.seconds_per_token, 1)} tok/s"]
        if printer.decode_tokens
        else []
    )
    if assistant is not None:
        found = assistant.last_speculation
        drafted = sum(map(sum, found.draft_lengths))
        parts.append(f"tau {number(found.tau)}")
        parts += [f"{percent(found.acceptance_rate)} of the drafts accepted" if drafted else "no drafts", *found.notes]
    say(", ".join(parts), "dim")


def _many(model, tokenizer, ids_of, prompts, out, batch_size, options, settings) -> None:
    """Answer `prompts` in order, `batch_size` at a time, each answer written as soon as it is there."""
    import torch

    from hf_dspark.evaluation import metrics

    assistant, file = options["assistant_model"], JsonLines(out)
    if any(not isinstance(r, dict) or r.get("settings") != json.loads(json.dumps(settings)) for r in file.done):
        raise ValueError(
            f"{out} holds answers made with other settings than this call's: delete it or choose another --out."
        )
    answered = {record["index"] for record in file.done}
    todo = [p for p in prompts if p.index not in answered]
    with progress() as bar:
        task = bar.add_task("answers", total=len(prompts), completed=len(prompts) - len(todo))
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            rows = [ids_of(p.turns[0]) for p in batch]
            inputs = pad_left(rows, tokenizer.pad_token_id or 0, model.device)
            if settings["seed"] is not None:  # noise of its own for every batch, the same after an interruption
                torch.manual_seed(settings["seed"] + batch[0].index)
                if assistant is not None:
                    options["speculation"] = replace(options["speculation"], seed=settings["seed"] + batch[0].index)
            output = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
            stops = stop_ids(model)
            responses = metrics.responses_of(assistant.last_speculation) if assistant else [[] for _ in batch]
            for p, tokens, rounds in zip(batch, output, responses, strict=True):
                tokens = cut(tokens, stops)
                record = {"index": p.index, "prompt": p.turns[0], "settings": settings}
                record |= {"text": tokenizer.decode(tokens, skip_special_tokens=True), "tokens": len(tokens)}
                file.append(record | ({"tau": metrics.tau(rounds)} if rounds else {}))
            bar.advance(task, len(batch))
    say(f"{len(todo)} answers written to {out}, {len(prompts) - len(todo)} were there.")


def pad_left(rows: list[list[int]], pad: int, device) -> dict:
    """`input_ids` and `attention_mask` [B, T] of prompts of different lengths."""
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def stop_ids(model) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def cut(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Up to and with the first stop token: what comes after it is padding."""
    return next((tokens[: i + 1] for i, t in enumerate(tokens) if t in stops), tokens)
