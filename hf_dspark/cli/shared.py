"""What the commands have in common: loading models, warning about prompts a drafter wasn't trained on, printing."""

import math
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

EMBEDDED = "smollm2"  # the target that comes with the demo extra
HEADS = "heads"  # as a drafter: the multi-token-prediction heads in the target's own checkpoint
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def dtype_of(name: str):
    if name not in DTYPES:
        raise ValueError(f"--dtype {name} is unknown: use one of {', '.join(DTYPES)}.")
    return name if name == "auto" else getattr(torch, name)


def load_target(name: str, dtype: str = "auto", device: str | None = None):
    """A target and its tokenizer; `smollm2` is the model of the demo extra."""
    if name == EMBEDDED:
        from hf_dspark.embedded import load_smollm2

        kind = dtype_of(dtype)
        disable_progress_bar()  # "Loading weights", for half a second
        model, tokenizer = load_smollm2(torch.float32 if kind == "auto" else kind)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype_of(dtype))
    return model.to(device) if device else model, tokenizer


def check_drafter(name: str | None) -> str | None:
    """The callback of every option that names a drafter: a path that leads nowhere is refused before anything is loaded."""
    from hf_dspark.hub.checkpoint import check_place

    if name not in (None, HEADS):
        check_place(name)
    return name


def load_drafter(name, target=None, **overrides):
    from hf_dspark.auto import AutoDrafter

    if name == HEADS and target is None:
        raise ValueError(f"The drafter {HEADS!r} is inside its target's checkpoint, and no target was given: pass --target.")
    try:
        if name == HEADS:
            return AutoDrafter.from_target(target, **overrides)
        return AutoDrafter.from_pretrained(name, target=target, **overrides)
    except TypeError as error:
        if overrides:  # an option's value, which its user should read about without a traceback
            raise ValueError(str(error)) from error
        raise


def prompt_warnings(drafter, tokenizer, chat: bool, thinking: bool | None) -> list[str]:
    """Ways in which prompts differ from those the drafter was trained on; each of them costs acceptance, not exactness.

    With `thinking=None` the chat template decides, so there is nothing to compare.
    """
    from hf_dspark.training.data import template_hash

    config, warnings = drafter.config, []
    if chat and None not in (thinking, config.enable_thinking) and thinking != config.enable_thinking:
        trained, flag = ("on", "--thinking") if config.enable_thinking else ("off", "--no-thinking")
        warnings.append(
            f"The drafter was trained with thinking {trained}, and this call renders prompts otherwise: fewer drafts will be "
            f"accepted. Pass {flag} to match it."
        )
    if config.template_hash is not None and not chat:
        warnings.append("The drafter was trained on chats, and this text is read as it stands: pass --chat to match it.")
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
    out = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        out.add_row(*[cell if isinstance(cell, str) else number(cell) for cell in row])
    return out


def number(x, digits: int = 2) -> str:
    """Example: 3 -> '3', 0.1234 -> '0.12', None and nan -> '-'."""
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return "-"
    return str(x) if isinstance(x, int) else f"{x:.{digits}f}"


def progress() -> Progress:
    parts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*parts, console=console, transient=True)


def shipped_drafter(cards: Path = Path(__file__).parents[2] / "model_cards") -> Path | None:
    """The drafter for the demo's model that a checkout has in model_cards/, DSpark before others; an installed package has
    none."""
    found = sorted(cards.glob("*smollm2*/config.json"), key=lambda path: ("dspark" not in path.parent.name, path))
    return found[0].parent if found else None
