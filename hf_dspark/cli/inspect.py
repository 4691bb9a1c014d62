"""`hf-dspark inspect`: what a drafter is, whether it fits a target, whether its output is exact."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.evaluation.prompts import read_prompts, render

from .shared import (
    EMBEDDED,
    check_drafter,
    check_target,
    console,
    load_drafter,
    load_target,
    number,
    progress,
    say,
    table,
)

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost? Think step by step.",
)

LEGEND = (
    "read as: the drafter as its file says, and in other ways that a wrong file would call for. tau: tokens per target "
    "forward, bonus token included. tau if drawn: the same, expected where drafts are sampled."
)

app = typer.Typer(add_completion=False)


@app.command()
def inspect(
    drafter: str = typer.Argument(
        ..., callback=check_drafter, help="Hub id or folder of a drafter, in any published format."
    ),
    target: str = typer.Option(
        None,
        callback=check_target,
        help=f"Hub id or folder of a target to try it on; '{EMBEDDED}' is the demo's model.",
    ),
    check: bool = typer.Option(
        False, "--check", help="Compare greedy texts with and without the drafter; needs --target."
    ),
    prompts: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="jsonl of prompts; three of our own by default.")
    ] = None,
    limit: int = typer.Option(3, min=1, help="Prompts to use."),
    max_new_tokens: int = typer.Option(64, min=1, help="Length of the texts it is tried on."),
    override: Annotated[list[str], typer.Option(help="FIELD=VALUE of the config, e.g. sample_from_anchor=true.")] = (),
    chat: bool = typer.Option(True, help="Render prompts with the tokenizer's chat template."),
    thinking: bool = typer.Option(None, help="Passed to the chat template; its own default if neither is given."),
    tensors: bool = typer.Option(True, help="List the tensors."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
):
    """Say what a drafter is; with --target whether it fits, and if not why; with --check whether its output is
    exact."""
    if check and target is None:
        raise ValueError("--check was given without --target, and texts need a target: add --target.")
    if prompts is not None and target is None:
        raise ValueError("--prompts was given without --target, which answers them: add --target.")
    changes = dict(parse_override(o) for o in override)
    texts = [p.turns[0] for p in read_prompts(prompts, limit)] if prompts else PROMPTS[:limit]

    from hf_dspark.decoding.outputs import describe_sources
    from hf_dspark.evaluation.exactness import check_exactness
    from hf_dspark.evaluation.inspection import describe, diagnose
    from hf_dspark.hub.card import read_record

    model, tokenizer = load_target(target, dtype, device) if target else (None, None)
    assistant = load_drafter(drafter, model, **changes)
    _print_facts(drafter, describe(assistant), tensors)
    if target is None:
        return
    ids = [render(tokenizer, text, chat, thinking) for text in texts]
    with console.status("Drafting along the target's greedy answers ..."):
        found = diagnose(model, assistant, ids, max_new_tokens, record=read_record(Path(drafter)))
    rows = [[r.name, r.tau, f"{r.first:.0%}", r.expected] for r in found.readings]
    columns = ["read as", "tau", "first draft right", "tau if drawn"]
    console.print(table("Drafting along the target's greedy answers", columns, rows))
    console.print(LEGEND, style="dim", markup=False)
    say(found.advice, "green" if found.verdict == "fits" else "bold red")
    if check:
        with progress() as bar:
            task = bar.add_task("comparing texts", total=len(ids))
            report = check_exactness(
                model, assistant, ids, max_new_tokens, progress=lambda i: bar.update(task, completed=i)
            )
        _print_exactness(report, tokenizer)
        say(f"Rounds of the last text: {describe_sources(assistant.last_speculation.by_source)}.", "dim")
    if found.verdict != "fits" or (check and (report.verdict == "different" or not report.self_check.passed)):
        raise typer.Exit(1)


def parse_override(text: str) -> tuple[str, object]:
    """Example: `'target_layer_ids=[1, 9]'` -> `("target_layer_ids", [1, 9])`."""
    name, equals, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        if equals and value:
            return name, value
        raise ValueError(f"--override {text!r} is no FIELD=VALUE, such as sample_from_anchor=true.") from None


def _print_facts(source: str, facts: dict, tensors: bool) -> None:
    shown = {k: v for k, v in facts.items() if k not in ("tensors", "parameters", "bytes") and v is not None}
    shown["size"] = (
        f"{facts['parameters'] / 1e6:.1f} M parameters, {facts['bytes'] / 2**20:.1f} MiB in {facts['dtype']}"
    )
    shown["vocabulary"] = "{} of the target's {} tokens".format(*facts["vocabulary"])
    for name, value in shown.items():
        console.print(f"[bold]{name.replace('_', ' ')}[/bold]: ", end="")
        say(json.dumps(value) if isinstance(value, dict | list) else str(value))
    unknown = [k for k in ("trained_length", "enable_thinking", "template_hash", "target_name") if facts[k] is None]
    if unknown:
        say(f"The file doesn't say: {', '.join(unknown)}.", "dim")
    if tensors:
        rows = []
        for name, t in facts["tensors"].items():
            where = t["source"].removeprefix(source).removeprefix(": ") or "the same name"
            rows.append([name, "x".join(map(str, t["shape"] or ())) or "-", number(t["bytes"] / 2**20), where])
        console.print(table(f"Tensors, from {source}", ["tensor", "shape", "MiB", "there"], rows))


def _print_exactness(report, tokenizer) -> None:
    if not report.self_check.passed:
        say(f"The target fails the self-check: {report.self_check}. generate() refuses it (trust_target).", "bold red")
    for i, d in enumerate(report.divergences):
        if d is not None:
            words = [repr(tokenizer.decode([t])) if t is not None else "the end" for t in (d.plain, d.ours)]
            kind = "a near tie" if d.near_tie else "no tie: a difference"
            where = (
                f"Prompt {i + 1}: first difference at token {d.index}, plain {words[0]}, with the drafter {words[1]}"
            )
            say(f"{where}; logit gap {d.gap:.4f} ({d.relative:.2%} of the logit), {kind}.")
    if report.verdict == "exact":
        say(f"Exact: all {report.tokens} tokens equal plain decoding's, in {report.dtype}.", "green")
    elif report.verdict == "near ties":
        say(f"Equal up to near ties, which {report.dtype} rounds either way; in float32 the texts are equal.", "green")
    else:
        say("Different: this is no rounding. Please report it with the target and the drafter.", "bold red")
