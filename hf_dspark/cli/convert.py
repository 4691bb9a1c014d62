"""`hf-dspark convert`: a drafter from one published format to another."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.names import SMOLLM2

from .shared import (
    EMBEDDED,
    check_drafter,
    check_output,
    check_target,
    console,
    dtype_of,
    interruptible,
    load_drafter,
    load_target,
    say,
)

FORMATS = ("own", "speculators", "deepspec", "sglang", "zlab")

app = typer.Typer(add_completion=False)


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(callback=check_drafter, help="Hub id or folder of a drafter, in any format.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write.")],
    to: str = typer.Option(..., help="own, speculators (vLLM), deepspec (vLLM, DeepSpec), sglang, or zlab."),
    target: str = typer.Option(
        None,
        callback=check_target,
        help=f"Hub id or folder of the target, or '{EMBEDDED}': gives what the drafter borrows.",
    ),
    dtype: str = typer.Option("auto", help="Of the weights: auto keeps the drafter's; servers want bfloat16."),
    fact: Annotated[
        list[str], typer.Option("--set", help="A fact the file leaves open, 'norm_output=true'; repeatable.")
    ] = (),
    anyway: bool = typer.Option(
        False, "--anyway", help="Write a speculators file although vLLM has no runtime for the head."
    ),
    borrow: bool = typer.Option(
        False, "--borrow", help="With --to own: leave out embedding and head that are copies of the target's."
    ),
    ship_code: bool = typer.Option(False, "--ship-code", help="With --to own: put the model files beside the weights."),
    revision: str = typer.Option(None, help="Of the drafter on the Hub."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace config and weights in FOLDER; other files stay."
    ),
):
    """Convert a drafter, or say why the format or its server can't hold it."""
    if to not in FORMATS:
        raise ValueError(f"--to {to} is unknown: use one of {', '.join(FORMATS)}.")
    if (borrow or ship_code) and to != "own":
        raise ValueError(
            f"--borrow and --ship-code are for our own format, and --to is {to}: use --to own, or neither."
        )
    if borrow and target is None:
        raise ValueError(
            "--borrow was given without --target, and copies are found by comparison with it: add --target."
        )
    if folder.is_dir() and Path(source).is_dir() and folder.samefile(source):
        raise ValueError(
            f"FOLDER {folder} is the drafter itself, which would be read and replaced at once: choose another."
        )
    check_output(folder, "FOLDER", overwrite, folder=True)
    facts = dict(parse_fact(text) for text in fact)
    kind = dtype_of(dtype)

    from hf_dspark import hub

    with console.status("Loading ..."):
        model = load_target(target)[0] if target else None
        drafter = load_drafter(source, model, revision=revision, dtype="auto" if kind == "auto" else kind, **facts)
    if target and not drafter.config.target_name:
        drafter.config.target_name = SMOLLM2 if target == EMBEDDED else target
    if borrow:
        say(f"Borrowed from the target: {', '.join(hub.borrow(drafter)) or 'nothing, the copies differ'}")
    with interruptible(f"{folder} may be incomplete; give --overwrite next time."):
        write(drafter, folder, to, ship_code, anyway)
    say(f"Wrote {folder}")


def write(drafter, folder: Path, to: str, ship_code: bool, anyway: bool) -> None:
    """Replace config and weights of `folder`, once it is known that `to` can hold the drafter."""
    from tempfile import TemporaryDirectory

    from hf_dspark import hub

    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        new = Path(temporary)
        if to == "own":
            drafter.save_pretrained(new, ship_code=ship_code)
        else:
            hub.export(drafter, new, to, allow_unservable=anyway)
        folder.mkdir(exist_ok=True)
        for pattern in ("config.json", "*.safetensors", "*.bin", "*.index.json"):
            for old in folder.glob(pattern):
                old.unlink()
        for file in new.iterdir():
            file.replace(folder / file.name)


def parse_fact(text: str) -> tuple[str, object]:
    """Example: `'norm_output=true'` -> `("norm_output", True)`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r} is no fact=value, such as sample_from_anchor=true.")
    try:
        return name, json.loads(value)
    except ValueError:
        raise ValueError(
            f'--set {text!r}: {value!r} is no JSON value, such as true, 3, [1, 9] or "text" in quotes.'
        ) from None
