"""`hf-dspark convert`: a drafter from one published format to another."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .shared import EMBEDDED, check_drafter, dtype_of, load_drafter, load_target, say

app = typer.Typer(add_completion=False)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(callback=check_drafter, help="Hub id or folder of a drafter, in any format.")],
    folder: Annotated[Path, typer.Argument(help="Where to write.")],
    to: str = typer.Option(..., help="own, speculators (vLLM), deepspec (vLLM, DeepSpec), sglang, or zlab."),
    target: str = typer.Option(None, help=f"Hub id or folder of the target, or '{EMBEDDED}': gives what the drafter borrows."),
    dtype: str = typer.Option("auto", help="Of the weights: auto keeps the drafter's; servers want bfloat16."),
    fact: Annotated[list[str], typer.Option("--set", help="A fact the file leaves open, 'norm_output=true'; repeatable.")] = (),
    anyway: bool = typer.Option(False, help="Write a speculators file although vLLM has no runtime for the head."),
    borrow: bool = typer.Option(False, help="With --to own: leave out embedding and head that are copies of the target's."),
    ship_code: bool = typer.Option(False, help="With --to own: put the model files beside the weights."),
    revision: str = typer.Option(None, help="Of the drafter on the Hub."),
):
    """Convert a drafter, or say why the format or its server can't hold it."""
    from hf_dspark import hub

    if (borrow or ship_code) and to != "own":
        raise ValueError(f"--borrow and --ship-code are for our own format, and --to is {to}: use --to own, or neither.")
    facts = {}
    for text in fact:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text!r} is no fact=value, such as sample_from_anchor=true.")
        facts[name] = json.loads(value)
    kind = dtype_of(dtype)
    model = load_target(target)[0] if target else None
    drafter = load_drafter(source, model, revision=revision, dtype="auto" if kind == "auto" else kind, **facts)
    if target and not drafter.config.target_name and target != EMBEDDED:
        drafter.config.target_name = target
    if to == "own":
        if borrow:
            say(f"Borrowed from the target: {', '.join(hub.borrow(drafter)) or 'nothing, the copies differ'}")
        drafter.save_pretrained(folder, ship_code=ship_code)
    else:
        hub.export(drafter, folder, to, allow_unservable=anyway)
    say(f"Wrote {folder}")
