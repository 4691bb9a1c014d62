"""What the commands have in common: where results may go, warnings about prompts a drafter wasn't trained on,
printing."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hf_dspark.names import EMBEDDED

from .loading import check_drafter, check_target, dtype_of, finite, load_drafter, load_target, shipped_drafter

__all__ = [
    "EMBEDDED",
    "check_drafter",
    "check_output",
    "check_target",
    "console",
    "dtype_of",
    "finite",
    "interruptible",
    "load_drafter",
    "load_target",
    "number",
    "percent",
    "progress",
    "prompt_warnings",
    "say",
    "shipped_drafter",
    "table",
    "warn",
]

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def check_output(path: Path | None, option: str, overwrite: bool = False, folder: bool = False) -> None:
    """Refuse a place for results that exists already, or that can't exist. Meant to be called before anything is
    loaded.

    Args:
        path (`Path`): where results will go; None passes.
        option (`str`): how the command line calls it, for the message.
        overwrite (`bool`): the value of `--overwrite`, which allows to replace what is there.
        folder (`bool`): whether the command writes a folder rather than a file. An empty folder is no result.

    Raises:
        ValueError: something is there, or is of the wrong kind, or a file stands where a folder of the path should be.
    """
    if path is None:
        return
    above = next((p for p in path.parents if p.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(
            f"{option} {path} can't be written, as {above} is a file and no folder: choose another {option}."
        )
    if path.exists() and path.is_dir() != folder:
        there, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise ValueError(f"{option} {path} is a {there}, and a {wanted} is written: choose another {option}.")
    if not overwrite and (any(path.iterdir()) if folder and path.is_dir() else path.exists()):
        raise ValueError(f"{option} {path} exists already: choose another {option}, or add --overwrite to replace it.")


@contextmanager
def interruptible(left: str) -> Iterator[None]:
    """An interrupt within says what is `left` and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort(left) from None


def prompt_warnings(drafter, tokenizer, chat: bool, thinking: bool | None) -> list[str]:
    """Ways in which prompts differ from those the drafter was trained on; each of them costs acceptance, not exactness.

    With `thinking=None` the chat template decides, so there is nothing to compare.
    """
    from hf_dspark.training.data import template_hash

    config, warnings = drafter.config, []
    if chat and None not in (thinking, config.enable_thinking) and thinking != config.enable_thinking:
        trained, flag = ("on", "--thinking") if config.enable_thinking else ("off", "--no-thinking")
        warnings.append(
            f"The drafter was trained with thinking {trained}, and this call renders prompts otherwise: fewer drafts "
            f"will be accepted. Pass {flag} to match it."
        )
    if config.template_hash is not None and not chat:
        warnings.append("The drafter was trained on chats, and this text is used without a template: pass --chat.")
    elif config.template_hash is not None and config.template_hash != template_hash(tokenizer):
        warnings.append(
            f"The drafter was trained with another chat template (hash {config.template_hash}, this tokenizer's is "
            f"{template_hash(tokenizer)}): fewer drafts may be accepted. Use the tokenizer it was trained with."
        )
    return warnings


def say(text: str = "", style: str | None = None) -> None:
    """A line, wrapped by the terminal alone."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def warn(lines: Iterable[str]) -> None:
    for line in lines:
        say(f"Warning: {line}", "yellow")


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable]) -> Table:
    """A table of text and numbers; brackets are brackets, not rich's markup."""
    out = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i == 0)
    for row in rows:
        out.add_row(*[Text(cell if isinstance(cell, str) else number(cell)) for cell in row])
    return out


def number(x, digits: int = 2) -> str:
    """Example: 3 -> '3', 0.1234 -> '0.12', None and nan -> '-'."""
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return "-"
    return str(x) if isinstance(x, int) else f"{x:.{digits}f}"


def percent(x: float) -> str:
    """Example: 0.256 -> '26%', nan -> '-'."""
    return "-" if math.isnan(x) else f"{x:.0%}"


def progress() -> Progress:
    parts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*parts, console=console, transient=True)
