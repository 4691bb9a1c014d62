"""`hf-dspark card`: a drafter's README.md from what its folder and its evaluation recorded."""

from pathlib import Path
from typing import Annotated

import typer

from .shared import say

app = typer.Typer(add_completion=False)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="A drafter in our own format; its run.json is read if there.")],
    eval: Annotated[list[Path], typer.Option(help="Results of `hf-dspark eval`; repeatable.")] = (),
    license: str = typer.Option(None, help="SPDX id, such as apache-2.0."),
):
    """Write or refresh the card; what a human wrote outside the marks stays."""
    from hf_dspark.hub import write_card

    say(f"Wrote {write_card(folder, eval, license)}")
