"""The `hf-dspark` command. Each sub-command is a module beside this one with a typer `app`, imported when it is called."""

import os
from importlib import import_module

import typer

# name: (what it does, the extra it may need)
COMMANDS = {
    "demo": ("Answer a few prompts with and without a drafter, on a model that comes with the package.", "demo"),
    "generate": ("Generate from one prompt, or from a file of prompts.", None),
    "inspect": ("Say what a drafter is, whether it fits a target, and whether its output is exact.", None),
    "eval": ("Measure acceptance and speed against other ways of generating.", "plots"),
    "calibrate": ("Fit a drafter's confidence to what its target accepts.", "plots"),
    "profile": ("Measure what drafting and verifying cost on this machine.", None),
    "train": ("Train a drafter for a target.", "train"),
    "data": ("Make and look at training data.", "train"),
    "convert": ("Convert a drafter between published formats.", None),
    "card": ("Write a drafter's model card.", None),
}
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Exact speculative decoding for Hugging Face models.")


@app.callback()
def options(ctx: typer.Context, debug: bool = typer.Option(False, help="Show tracebacks instead of short errors.")):
    ctx.obj = debug or bool(os.environ.get("HF_DSPARK_DEBUG"))


def _add(name: str, text: str, extra: str | None) -> None:
    @app.command(name, help=text, context_settings=PASS_ON, add_help_option=False)
    def call(ctx: typer.Context):
        try:
            module = import_module(f"hf_dspark.cli.{name}")
            typer.main.get_command(module.app)(args=ctx.args, prog_name=f"hf-dspark {name}")
        except ImportError as error:
            missing = (error.name or "").split(".")[0]
            hint = f'pip install "hf-dspark[{extra}]"' if extra else f"pip install {missing}"
            # ours always import: what is missing then is a package, or the message says it better already
            named = missing and missing != "hf_dspark"
            _fail(ctx, error, f"{error}. `hf-dspark {name}` needs {missing}: {hint}" if named else str(error))
        except (ValueError, OSError, NotImplementedError) as error:
            _fail(ctx, error, str(error))


def _fail(ctx: typer.Context, error: Exception, message: str) -> None:
    if ctx.obj:
        raise error
    typer.secho(f"Error: {message}", fg="red", err=True)
    raise typer.Exit(1)


for _name, (_text, _extra) in COMMANDS.items():
    _add(_name, _text, _extra)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
