"""The `hf-dspark` command. Each sub-command is a module beside this one with a typer `app`, imported when it is
called."""

import os
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import typer

import hf_dspark


class Command(NamedTuple):
    """What a sub-command does, the extra it may need, and what is left when it is interrupted."""

    text: str
    extra: str | None = None
    interrupted: str = "nothing was written."


COMMANDS = {
    "demo": Command("Answer a few prompts with and without a drafter, on SmolLM2-135M-Instruct.", "demo"),
    "generate": Command("Generate from one prompt, or from a file of prompts."),
    "inspect": Command("Say what a drafter is, whether it fits a target, and whether its output is exact."),
    "eval": Command("Measure acceptance and speed against other ways of generating.", "plots"),
    "calibrate": Command("Fit a drafter's confidence to what its target accepts.", "plots"),
    "profile": Command("Measure what drafting and verifying cost on this machine."),
    "train": Command("Train a drafter for a target.", "train", "add --resume to continue from the last checkpoint."),
    "data": Command("Make and look at training data.", "train", "the same command continues where this one stopped."),
    "convert": Command("Convert a drafter between published formats."),
    "card": Command("Write a drafter's model card."),
}
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Exact speculative decoding for Hugging Face models."
)


def print_version(wanted: bool) -> None:
    if wanted:
        installed = [f"hf-dspark {hf_dspark.__version__}"]
        for name in ("torch", "transformers"):
            try:
                installed.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                installed.append(f"{name} is missing")
        typer.echo(", ".join(installed))
        raise typer.Exit()


@app.callback()
def options(
    ctx: typer.Context,
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks instead of short errors."),
    version: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Show the version and exit."
    ),
):
    ctx.obj = debug or bool(os.environ.get("HF_DSPARK_DEBUG"))


def _add(name: str, command: Command) -> None:
    @app.command(name, help=command.text, context_settings=PASS_ON, add_help_option=False)
    def call(ctx: typer.Context):
        try:
            code = _run(name, ctx.args)
        except (KeyboardInterrupt, typer.Abort) as stop:
            typer.secho(f"Stopped: {str(stop) or command.interrupted}", fg="yellow", err=True)
            raise typer.Exit(130) from None
        except ImportError as error:
            missing = (error.name or "").split(".")[0]
            hint = f'pip install "hf-dspark[{command.extra}]"' if command.extra else f"pip install {missing}"
            # ours always import: what is missing then is a package, or the message says it better already
            named = missing and missing != "hf_dspark"
            _fail(ctx, error, f"{error}. `hf-dspark {name}` needs {missing}: {hint}" if named else str(error))
        except (ValueError, OSError, NotImplementedError) as error:
            _fail(ctx, error, str(error))
        except (RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
            if isinstance(error, typer.Exit):  # click's own way out is a RuntimeError
                raise
            _fail(ctx, error, f"{type(error).__name__}: {error} (`hf-dspark --debug {name} ...` shows where)")
        raise typer.Exit(code or 0)


def _run(name: str, arguments: list[str]) -> int | None:
    """Run a sub-command; returns its exit code. Usage errors are raised, and shown by `app`.

    Raises:
        KeyboardInterrupt, typer.Abort: it was interrupted; the message, if any, says what is left.
    """
    module = import_module(f"hf_dspark.cli.{name}")
    code = typer.main.get_command(module.app)(args=arguments, prog_name=f"hf-dspark {name}", standalone_mode=False)
    if code == 130:  # typer's own answer to an interrupt, where the command had none
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _fail(ctx: typer.Context, error: Exception, message: str) -> None:
    if ctx.obj:
        raise error
    typer.secho(f"Error: {as_options(' '.join(message.split()))}", fg="red", err=True)
    raise typer.Exit(1)


def as_options(message: str) -> str:
    """Example: `'... is missing: pass target=..., or bind the drafter first.'` -> `'... is missing: add --target.'`"""
    return re.sub(r"pass target=\.\.\.(, or (bind the drafter first|set it))?", "add --target", message)


for _name, _command in COMMANDS.items():
    _add(_name, _command)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
