"""`hf-dspark profile`: what drafting and verifying cost on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.evaluation.profiling import cached_profile
from hf_dspark.evaluation.timing import Busy

from .shared import EMBEDDED, check_drafter, console, load_drafter, load_target, number, progress, say, table, warn

app = typer.Typer(add_completion=False)


@app.command()
def profile(
    drafter: str = typer.Argument(..., callback=check_drafter, help="Hub id or folder of a drafter."),
    target: str = typer.Option(..., help=f"Hub id or folder of its target; '{EMBEDDED}' is the demo's model."),
    rows: str = typer.Option("1,4", help="Batch sizes."),
    widths: str = typer.Option("1,2,4,8,16", help="Tokens per row in a forward; 1 is plain decoding."),
    contexts: str = typer.Option("256", help="Tokens in the cache."),
    repeats: int = typer.Option(9, help="Timed calls per point; medians are kept."),
    out: Annotated[Path, typer.Option(help="Where the table goes; by default where scheduler='auto' looks for it.")] = None,
    again: bool = typer.Option(False, help="Measure even if there is a table."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
):
    """Measure drafting and verifying for a target and a drafter; what is set to 'auto' starts from these numbers."""
    model, _ = load_target(target, dtype, device)
    assistant = load_drafter(drafter, model)
    grid = {"rows": numbers(rows), "widths": numbers(widths), "contexts": numbers(contexts), "repeats": repeats}
    with progress() as bar, Busy() as busy:
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
    if bar.tasks[task].total is not None:  # it was measured, not read
        warn(busy.warning(model.device))
    say(f"{costs.key['dtype']}, {costs.key['threads']} threads, {costs.key['machine']}; stored in {path}.", "dim")


def numbers(text: str) -> tuple[int, ...]:
    """Example: `'1,4'` -> `(1, 4)`."""
    try:
        values = tuple(int(x) for x in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ValueError(f"{text!r} is no list of positive numbers: write them with commas, such as 1,2,4.")
    return values
