"""Prints docs/reference/cli.md: the help of every `hf-dspark` command. `make docs` runs it."""

import re
from importlib import import_module

import typer

from hf_dspark.cli.main import COMMANDS
from hf_dspark.cli.train_options import make_parser

HEAD = """# The command line

`hf-dspark COMMAND --help` prints the same text. `hf-dspark --debug COMMAND ...` shows tracebacks instead of short errors.
`hf-dspark --version` prints the versions of this library, torch and transformers.
"""


def cell(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| Option | Default | Meaning |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {default} | {cell(text)} |" for name, default, text in rows)])


def shown(value) -> str:
    if value is None or callable(value) or value in ("", "==SUPPRESS==", (), [], {}):
        return ""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return (
        f"`{text}`" if len(text) < 60 else "three prompts" if isinstance(value, list | tuple) else f"`{text[:57]}...`"
    )


def parameter(item) -> tuple[str, str, str]:
    if item.param_type_name == "argument":
        return item.name.upper(), "", getattr(item, "help", None) or ""
    return ", ".join([*item.opts, *item.secondary_opts]), shown(item.default), item.help or ""


def section(title: str, command, level: int = 2) -> str:
    ctx = command.context_class(command, info_name=title)
    parts = [f"{'#' * level} {title}", command.help or ""]
    if nested := getattr(command, "commands", {}):
        parts += [section(f"{title} {name}", item, level + 1) for name, item in nested.items()]
    else:
        usage = re.sub(
            r"[{\[]([a-z]+)[}\]]", lambda m: m[0].upper().strip("{}"), " ".join(command.collect_usage_pieces(ctx))
        )
        rows = [parameter(item) for item in command.params]
        parts += [f"```\n{title} {usage}\n```", table(rows)]
    return "\n\n".join(part for part in parts if part)


def row(action) -> tuple[str, str, str]:
    names = ", ".join(name for name in action.option_strings if "_" not in name)
    return names or action.dest.upper(), shown(action.default), (action.help or "").replace("%%", "%")


def training(title: str) -> str:
    parser = make_parser()
    parts = [f"## {title}", parser.description, f"```\n{parser.usage}\n```"]
    for group in reversed(parser._action_groups):
        rows = [row(action) for action in group._group_actions]
        if rows:
            parts += [f"### {title}: {group.title}", table(rows)]
    return "\n\n".join([*parts, cell(parser.epilog)])


def main() -> None:
    parts = [HEAD]
    for name in COMMANDS:
        title = f"hf-dspark {name}"
        app = import_module(f"hf_dspark.cli.{name}").app
        parts.append(training(title) if name == "train" else section(title, typer.main.get_command(app)))
    print("\n\n".join(parts))  # noqa: T201


if __name__ == "__main__":
    main()
