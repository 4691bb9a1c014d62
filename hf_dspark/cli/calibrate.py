"""`hf-dspark calibrate`: a confidence that means what it says."""

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.evaluation.prompts import read_prompts, render

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
    progress,
    prompt_warnings,
    say,
    table,
    warn,
)

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    drafter: str = typer.Argument(..., callback=check_drafter, help="Hub id or folder of a drafter."),
    target: str = typer.Option(
        ..., callback=check_target, help=f"Hub id or folder of its target; '{EMBEDDED}' is the demo's model."
    ),
    prompts: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="jsonl of prompts that the drafter wasn't trained on.")
    ] = ...,
    limit: int = typer.Option(None, min=1, help="Only the first so many prompts."),
    max_new_tokens: int = typer.Option(128, min=1, help="Longest answer."),
    temperature: float = typer.Option(
        1.0, min=0, callback=finite, help="Of the answers; confidence heads are trained on 1, 0 is greedy."
    ),
    batch_size: int = typer.Option(8, min=1, help="Prompts answered together."),
    min_labels: int = typer.Option(500, min=1, help="Labels a position needs for a temperature of its own."),
    out: Annotated[
        Path, typer.Option(help="Folder for the calibrated drafter; by default DRAFTER's own config.")
    ] = None,
    report: Annotated[Path, typer.Option(help="JSON with everything measured.")] = None,
    plot: Annotated[Path, typer.Option(help="PNG of the reliability diagram.")] = None,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace --out, --report and --plot that are there."),
    chat: bool = typer.Option(True, help="Render prompts with the tokenizer's chat template."),
    thinking: bool = typer.Option(None, help="Passed to the chat template; its own default if neither is given."),
    seed: int = typer.Option(0, min=0, help="Of sampling."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
):
    """Fit a drafter's confidence to what its target really accepts, and store that with the drafter."""
    check_output(out, "--out", overwrite, folder=True)
    check_output(report, "--report", overwrite)
    check_output(plot, "--plot", overwrite)
    if plot is not None:
        import_module("matplotlib")
    in_place = check_place(drafter) if out is None else None
    texts = [p.turns[0] for p in read_prompts(prompts, limit)]

    from hf_dspark.evaluation import calibration

    model, tokenizer = load_target(target, dtype, device)
    assistant = load_drafter(drafter, model)
    warn(prompt_warnings(assistant, tokenizer, chat, thinking))
    ids = [render(tokenizer, text, chat, thinking) for text in texts]
    with interruptible(f"{in_place or out} is as it was."), progress() as bar:
        task = bar.add_task("answers", total=len(ids))
        logs = calibration.collect(
            model, assistant, ids, max_new_tokens, temperature, batch_size, seed,
            progress=lambda i, n: bar.update(task, completed=i),
        )  # fmt: skip
    found = calibration.fit(assistant, logs, min_labels)
    console.print(report_table(found))
    console.print(LEGEND, style="dim", markup=False)
    say(f"{found.rounds} rounds of {len(ids)} answers at temperature {temperature:g}, tau {found.tau:.2f}.")
    run = {
        "target": target,
        "drafter": drafter,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    keep_measured(found, run | {"prompts": len(ids)}, prompts, (model, assistant), report, plot)
    check_labels(found, min_labels)
    calibration.apply(assistant, found)
    if in_place is not None:
        store(in_place, {k: getattr(assistant.config, k) for k in ("confidence_temperatures", "survival_model")})
    else:
        assistant.save_pretrained(out)
    say(f"Stored in {in_place or out / 'config.json'}.")
    if (card := (in_place.parent if in_place else out) / "README.md").exists():
        say(f"{card} was written before: `hf-dspark card {card.parent}` brings it up to date.", "dim")


def keep_measured(found, run: dict, prompts: Path, models: tuple, report: Path | None, plot: Path | None) -> None:
    """Write the report and the diagram, where they are wanted."""
    from hf_dspark.evaluation.benchmark import write_json
    from hf_dspark.evaluation.environment import environment, file_hash

    if report is not None:
        run |= {"prompts_hash": file_hash(prompts), "environment": environment(*models)}
        write_json({"run": run, **asdict(found)}, report)
    if plot is not None:
        from hf_dspark.evaluation.plots import reliability

        reliability(found.reliability.get("before"), found.reliability["after"]).savefig(plot, dpi=150)


def check_labels(found, min_labels: int) -> None:
    """Say which positions got no temperature of their own.

    Raises:
        ValueError: none got one, so that storing them would call a drafter calibrated that isn't.
    """
    if found.temperatures is None:
        return
    counts = found.after["count"]
    few = [k + 1 for k, n in enumerate(counts) if n < min_labels]
    if len(few) == len(counts):
        raise ValueError(
            f"Nothing was calibrated and nothing stored: each position needs {min_labels} labels, and the best had "
            f"{int(max(counts))}. Give more prompts or longer answers (--max-new-tokens), or a lower --min-labels."
        )
    say(f"Temperatures: {', '.join(f'{t:.3f}' for t in found.temperatures)}")
    if few:
        warn(
            [f"positions {few} had fewer than {min_labels} labels and keep temperature 1: give more or longer answers."]
        )


def check_place(drafter: str) -> Path:
    """The config of a local folder in our own format, whose weights need not be touched."""
    from hf_dspark.hub.checkpoint import read_config

    path = Path(drafter) / "config.json"
    if path.exists() and str(read_config(path).get("model_type", "")).startswith("hf_"):
        return path
    raise ValueError(
        f"{drafter} is no local folder in this library's own format, so its config can't be changed in place: add "
        "--out FOLDER, which gets the calibrated drafter in that format."
    )


def store(path: Path, values: dict) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


LEGEND = (
    "ECE: expected calibration error, 0 is best. AUROC: how well confidence tells accepted drafts from rejected ones; "
    "1 is best, 0.5 is chance. Brier: mean squared error, 0 is best. held out: fitted on half of the answers, measured "
    "on the other."
)


def report_table(found):
    """Expected calibration error in percent, AUROC and Brier score of "drafts 1..k are all accepted", by k."""
    stages = [("before", found.before), ("after", found.after), ("held out", found.held_out)]
    known = [(name, r) for name, r in stages if r is not None]
    columns = [
        "draft",
        "labels",
        *(f"ECE % {name}" for name, _ in known),
        *(f"{m} {known[-1][0]}" for m in ("AUROC", "Brier")),
    ]
    rows = []
    for k in range(len(found.after["count"])):
        rows.append(
            _row(str(k + 1), found.after["count"][k], [(r["ece"][k], r["auroc"][k], r["brier"][k]) for _, r in known])
        )
    means = [tuple(r[f"mean_{m}"] for m in ("ece", "auroc", "brier")) for _, r in known]
    rows.append(_row("all", sum(found.after["count"]), means))
    return table("Confidence that drafts 1..k are all accepted", columns, rows)


def _row(name: str, count: int, values: list[tuple]) -> list[str]:
    return [name, str(count), *(number(100 * v[0]) for v in values), number(values[-1][1], 3), number(values[-1][2], 3)]
