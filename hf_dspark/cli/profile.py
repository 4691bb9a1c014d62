"""`hf-dspark profile`: what drafting and verifying cost on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .shared import (
    EMBEDDED,
    check_drafter,
    check_output,
    check_target,
    console,
    interruptible,
    load_drafter,
    load_target,
    number,
    progress,
    say,
    table,
    warn,
)

app = typer.Typer(add_completion=False)


@app.command()
def profile(
    drafter: str = typer.Argument(..., callback=check_drafter, help="Hub id or folder of a drafter."),
    target: str = typer.Option(
        ..., callback=check_target, help=f"Hub id or folder of its target; '{EMBEDDED}' is the demo's model."
    ),
    rows: str = typer.Option("1,4", help="Batch sizes."),
    widths: str = typer.Option("1,2,4,8,16", help="Tokens per row in a forward; 1 is plain decoding."),
    contexts: str = typer.Option("256", help="Tokens in the cache."),
    repeats: int = typer.Option(9, min=1, help="Timed calls per point; medians are kept."),
    out: Annotated[
        Path, typer.Option(help="Where the table goes; by default where scheduler='auto' looks for it.")
    ] = None,
    again: bool = typer.Option(False, "--again", help="Measure even if there is a table, and replace it."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
):
    """Measure drafting and verifying for a target and a drafter; what is set to 'auto' starts from these numbers."""
    grid = {"rows": numbers(rows), "widths": numbers(widths), "contexts": numbers(contexts), "repeats": repeats}
    check_output(out, "--out", overwrite=True)  # a table that is there is read
    check_table(out)
    from hf_dspark.evaluation.profiling import cached_profile
    from hf_dspark.evaluation.timing import Busy

    model, _ = load_target(target, dtype, device)
    assistant = load_drafter(drafter, model)
    with interruptible("no table was written."), progress() as bar, Busy() as busy:
        task = bar.add_task("points", total=None)
        costs, path = cached_profile(
            model, assistant, out, again, **grid, progress=lambda i, n: bar.update(task, completed=i, total=n)
        )
    columns = ["rows", "context", *(f"{w} tokens" for w in costs.widths), "draft"]
    body = []
    for i, r in enumerate(costs.rows):
        for j, c in enumerate(costs.contexts):
            times = [*costs.verify[i][j], costs.draft[i][j]]
            body.append([str(r), str(c), *(number(1e3 * t, 1) for t in times)])
    console.print(table("Milliseconds per forward, by tokens per row, and per drafting stage", columns, body))
    plain, block = costs.verify_seconds(1), assistant.config.max_block
    needed = (costs.draft_seconds() + costs.verify_seconds(1 + block)) / plain
    say(f"One row with {block} drafts pays from tau {needed:.2f} on (a round costs {needed:.2f} plain steps).")
    measured = bar.tasks[task].total is not None
    warn(busy.warning(model.device) if measured else [])
    place = f"stored in {path}" if measured else f"read from {path}; --again measures again"
    say(f"{costs.key['dtype']}, {costs.key['threads']} threads, {costs.key['machine']}; {place}.", "dim")


def check_table(path: Path | None) -> None:
    """Refuse to take, or to replace, a file that is no table of costs.

    Raises:
        ValueError: it is something else.
    """
    if path is None or not path.exists():
        return
    try:
        ours = {"rows", "widths", "verify"} <= json.loads(path.read_text(encoding="utf-8")).keys()
    except (ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"--out {path} exists and is no table of costs: choose another --out.")


def numbers(text: str) -> tuple[int, ...]:
    """Example: `'1,4'` -> `(1, 4)`."""
    try:
        values = tuple(int(x) for x in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ValueError(f"{text!r} is no list of positive numbers: write them with commas, such as 1,2,4.")
    return values
