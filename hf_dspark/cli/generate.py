"""`hf-dspark generate`: one prompt on the screen, or a file of prompts into a file of answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_dspark.drafting.copy_drafter import CopyDrafter
from hf_dspark.evaluation import metrics
from hf_dspark.evaluation.prompts import JsonLines, read_prompts, render
from hf_dspark.modeling import SpeculationConfig

from .shared import EMBEDDED, check_drafter, console, load_drafter, load_target, number, progress, prompt_warnings, say, warn
from .streaming import DraftPrinter

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    target: str = typer.Argument(..., help=f"Hub id or folder of the target; '{EMBEDDED}' is the demo's model."),
    prompt: str = typer.Argument(None, help="The prompt; '-' reads standard input."),
    drafter: str = typer.Option(None, callback=check_drafter, help="Folder or Hub id of a drafter, or 'none'; else copies."),
    batch_file: Annotated[Path, typer.Option(exists=True, help="jsonl of `prompt`, `turns` or `messages`, not PROMPT.")] = None,
    out: Annotated[Path, typer.Option(help="Where the answers go, as they come; a second call goes on.")] = None,
    batch_size: int = typer.Option(1, help="Prompts of --batch-file decoded together."),
    max_new_tokens: int = typer.Option(256, help="Longest answer."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_k: int = typer.Option(0, help="Sample from the k likeliest tokens; 0 from all."),
    top_p: float = typer.Option(1.0, help="Sample from the likeliest tokens that make up this probability."),
    min_p: float = typer.Option(None, help="Sample from tokens at least this likely relative to the likeliest."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1 discourages repetition."),
    seed: int = typer.Option(None, help="Makes sampling repeatable."),
    num_draft_tokens: int = typer.Option(None, help="Drafts per stage; the drafter's trained length by default."),
    confidence_threshold: float = typer.Option(None, help="Verify no draft behind one less certain than this."),
    verification: str = typer.Option(None, help="ratio, block or match; all are exact."),
    loop_gate: str = typer.Option(None, help="Draft another stage from this log-probability on, e.g. -0.5, or 'auto'."),
    max_draft_stages: int = typer.Option(None, help="Most stages a round, with --loop-gate."),
    scheduler: str = typer.Option(None, help="'auto' verifies as many drafts as pay on this machine."),
    engine: str = typer.Option(None, help="own, or stock for transformers' assisted loop."),
    chat: bool = typer.Option(True, help="Render the prompt with the tokenizer's chat template."),
    thinking: bool = typer.Option(None, help="Passed to the chat template; its own default if neither is given."),
    system: str = typer.Option(None, help="A system message before the prompt."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
    stats: bool = typer.Option(True, help="Print speed and acceptance below the answer."),
):
    """Generate from one prompt, or from a file of prompts."""
    if (prompt is None) == (batch_file is None):
        raise ValueError("Give either PROMPT or --batch-file, not both and not neither.")
    if batch_file is not None and out is None:
        raise ValueError("--batch-file was given without --out, so there is nowhere to write: add --out answers.jsonl.")
    given = dict(
        num_draft_tokens=num_draft_tokens, confidence_threshold=confidence_threshold, verification=verification,
        loop_gate=number_in(loop_gate), max_draft_stages=max_draft_stages, scheduler=scheduler, engine=engine, seed=seed,
    )  # fmt: skip
    given = {k: v for k, v in given.items() if v is not None}
    SpeculationConfig(**given)  # a wrong knob is refused here, before anything is loaded
    model, tokenizer = load_target(target, dtype, device)
    assistant = choose_drafter(drafter, model)
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
        settings = {"target": target, "drafter": drafter, "seed": seed, "chat": chat, "thinking": thinking, "system": system}
        settings |= {k: v for k, v in options.items() if k not in ("assistant_model", "speculation")}
        _many(model, tokenizer, ids_of, batch_file, out, batch_size, options, settings)


def choose_drafter(name: str | None, target):
    """The drafter that was asked for, None for 'none', else copies of the text, which need no weights."""
    if name == "none":
        return None
    return load_drafter(name, target) if name else CopyDrafter()


def number_in(text: str | None) -> float | str | None:
    """Example: `'-0.5'` -> `-0.5`; what is no number is left to others."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _one(model, tokenizer, ids, options, stats) -> None:
    printer, assistant = DraftPrinter(tokenizer, console), options["assistant_model"]
    model.generate(torch.tensor([ids], device=model.device), streamer=printer, **options)
    if not stats:
        return
    parts = [f"{printer.tokens} tokens", f"{number(1 / printer.seconds_per_token, 1)} tok/s"] if printer.decode_tokens else []
    if assistant is not None:
        done = assistant.last_speculation
        parts += [f"tau {done.tau:.2f}", f"{done.acceptance_rate:.0%} of the drafts accepted", *done.notes]
    say(", ".join(parts), "dim")


def _many(model, tokenizer, ids_of, batch_file, out, batch_size, options, settings) -> None:
    """Answer `batch_file` in order, `batch_size` at a time, each answer written as soon as it is there."""
    prompts, assistant = read_prompts(batch_file), options["assistant_model"]
    file = JsonLines(out)
    done = {record["index"] for record in file.done}
    if any(record.get("settings") != json.loads(json.dumps(settings)) for record in file.done):
        raise ValueError(f"{out} holds answers made with other settings than this call's: delete it or choose another --out.")
    todo = [p for p in prompts if p.index not in done]
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


def pad_left(rows: list[list[int]], pad: int, device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [B, T] of prompts of different lengths."""
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
