"""`hf-dspark card`: a drafter's README.md from what its folder and its evaluation recorded."""

from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.names import check_place, is_hub_id

from .shared import say, warn

app = typer.Typer(add_completion=False)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="A drafter in our own format; its run.json is read if there.")],
    eval: Annotated[
        list[Path], typer.Option(exists=True, dir_okay=False, help="Results of `hf-dspark eval`; repeatable.")
    ] = (),
    license: str = typer.Option(None, help="SPDX id, such as apache-2.0."),
    base_model: str = typer.Option(
        None, help="Hub id of the target, where the drafter was trained from a local folder."
    ),
    repo_id: str = typer.Option(None, help="Hub id that the drafter will have, for the lines that load it."),
):
    """Write or refresh the card; what a human wrote outside the marks stays."""
    check_place(str(folder))
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder here, and a card is written into one: download the drafter first.")
    for option, name in (("--base-model", base_model), ("--repo-id", repo_id)):
        if name is not None and not is_hub_id(name):
            raise ValueError(f"{option} {name} is no id on the Hub: give owner/name.")
    from hf_dspark.hub.card import known_target, write_card

    there = (folder / "README.md").exists()
    path = write_card(folder, eval, license, base_model, repo_id)
    say(f"{'Refreshed' if there else 'Wrote'} {path}" + (", keeping what stands outside the marks." if there else ""))
    if known_target(path) is None:
        warn(["the card names no base model, as no Hub id of the target was recorded: add --base-model owner/name."])
    if repo_id is None and "OWNER/" in path.read_text(encoding="utf-8"):
        say(
            "Its lines of code load OWNER/NAME: add --repo-id with the id that the drafter will have on the Hub.", "dim"
        )
