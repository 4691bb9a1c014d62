"""The options of `hf-dspark train`: its own, and one for each field of `DrafterTrainingArguments`."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

import typer
import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from hf_dspark.training import DrafterTrainingArguments

from .shared import EMBEDDED

METHODS = {
    "dspark": dict(correction_head="markov", confidence_head=True),
    "dflash": dict(correction_head="none", confidence_head=False),
    "gated": dict(correction_head="gated", confidence_head=True),
    "rnn": dict(correction_head="rnn", confidence_head=True),
    "eagle3": {},
    "mtp": {},
    "domino": dict(correction_head="domino", confidence_head=False, pure_draft_prefix_len=1),
}
# Where this command's defaults differ from transformers'.
DEFAULTS = dict(
    output_dir=None, per_device_train_batch_size=4, num_train_epochs=1.0, learning_rate=6e-4, lr_scheduler_type="cosine",
    warmup_steps=0.04, weight_decay=0.0, seed=0, logging_steps=10, save_steps=500, save_total_limit=2, report_to="none",
)  # fmt: skip
SHORT = {
    "--output": "--output-dir", "--batch-size": "--per-device-train-batch-size", "--epochs": "--num-train-epochs",
    "--accumulate": "--gradient-accumulation-steps", "--ce": "--ce-weight", "--distill": "--distill-weight",
    "--confidence": "--confidence-weight",
}  # fmt: skip


class Parser(HfArgumentParser):
    """Errors are usage errors of the command, in one line."""

    def format_help(self):
        return super().format_help().replace("usage:", "Usage:", 1)  # as the other commands have it

    def error(self, message):
        raise typer.BadParameter(f"{message}. `hf-dspark train --help` lists the options.")


def existing(path: str) -> Path:
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"File '{path}' does not exist")
    return Path(path)


def make_parser() -> Parser:
    """The parser of the whole command."""
    short = ", ".join(f"{name} for {full}" for name, full in SHORT.items())
    parser = Parser(
        DrafterTrainingArguments,
        prog="hf-dspark train",
        usage="hf-dspark train TARGET --data FILE --output DIR [options]",
        description="Train a drafter for a target, or several on one target's features; under `accelerate launch` on many "
        "devices. TARGET comes first. Every field of the training arguments is an option.",
        epilog=f"Short names: {short}.",
        allow_abbrev=False,
    )
    parser.set_defaults(**DEFAULTS)
    own = parser.add_argument_group("the drafter, its data and this command")
    switch = dict(type=string_to_bool, nargs="?", const=True)
    own.add_argument("target", nargs="?", help=f"Hub id or folder of the target; '{EMBEDDED}' is the demo's model.")
    own.add_argument("--config", type=existing, help="YAML file of options by name; the command line wins.")
    own.add_argument("--data", type=existing, help="jsonl from `hf-dspark data generate`.")
    own.add_argument("--eval-data", type=existing, help="Held-out jsonl.")
    own.add_argument("--eval-rows", type=int, default=64, help="Rows of --eval-data to use.")
    own.add_argument(
        "--method", action="append", choices=METHODS, help="dspark by default; repeats: trained side by side."
    )
    own.add_argument("--mask-token-id", type=int, help="An id that never occurs in text; needed for a new drafter.")
    own.add_argument("--block-size", type=int, default=7, help="Drafts of a block.")
    own.add_argument("--layers", type=int, default=1, help="Layers of the drafter.")
    own.add_argument("--markov-rank", type=int, default=256, help="Rank of the correction head.")
    own.add_argument(
        "--draft-vocab-size", type=int, help="Draft only the most frequent ids of the data; all by default."
    )
    own.add_argument("--layer-ids", help="Tapped target layers with commas; five spread evenly by default.")
    own.add_argument("--init-from", help="'target' for its last layers, or a drafter to take what fits from.")
    own.add_argument("--thinking", **switch, help="How the data's chats were rendered; kept in the drafter's config.")
    own.add_argument("--no-thinking", dest="thinking", action="store_const", const=False, help="They show no thinking.")
    own.add_argument(
        "--decode-prompts", type=int, default=8, help="Prompts of --eval-data that each evaluation decodes."
    )
    own.add_argument("--decode-tokens", type=int, default=64, help="Tokens of each.")
    own.add_argument(
        "--resume", **switch, default=False, help="Continue from the last checkpoint in the output folder."
    )
    own.add_argument("--overwrite", **switch, default=False, help="Replace the run in the output folder.")
    own.add_argument("--dtype", default="auto", help="Of the target: auto, float32, bfloat16, float16 or float64.")
    own.add_argument("--device", help="cpu; else what accelerate chooses.")
    return parser


def parse(tokens: list[str]) -> tuple[argparse.Namespace, DrafterTrainingArguments]:
    """This command's own options and the training arguments.

    Raises:
        typer.BadParameter: an option that isn't known or can't be read, or a needed one that is missing.
        ValueError: training arguments that don't fit together.
    """
    parser, tokens = make_parser(), [_full(token) for token in tokens]
    head = tokens[:1] if tokens and not tokens[0].startswith("-") else []
    given = parser.parse_args(tokens)
    if given.config:
        method = given.method
        given = parser.parse_args([*head, *_from_yaml(parser, given.config, bool(head)), *tokens[len(head) :]])
        given.method = method or given.method
    names = {"TARGET": given.target, "--data": given.data, "--output": given.output_dir}
    if missing := [name for name, value in names.items() if value is None]:
        parser.error(f"{', '.join(missing)} must be given")
    given.method = list(dict.fromkeys(given.method or ["dspark"]))
    values = {f.name: vars(given).pop(f.name) for f in fields(DrafterTrainingArguments) if f.init}
    if given.eval_data and values["eval_steps"] and values["eval_strategy"] == "no":
        values["eval_strategy"] = "steps"
    values["use_cpu"] = values["use_cpu"] or given.device == "cpu"
    arguments = DrafterTrainingArguments(**values)
    if given.device and given.device.split(":")[0] != arguments.device.type:
        parser.error(
            f"--device {given.device} was given, and accelerate found {arguments.device.type}: give cpu, or nothing "
            "(choose among GPUs with CUDA_VISIBLE_DEVICES)"
        )
    return given, arguments


def _full(token: str) -> str:
    name, equals, value = token.partition("=")
    return SHORT.get(name, name) + equals + value


def _from_yaml(parser, path: Path, has_target: bool) -> list[str]:
    """A YAML file's options as a command line."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        parser.error(f"--config {path} is no YAML: {error}")
    if not isinstance(values, dict):
        parser.error(f"--config {path} holds a {type(values).__name__}: give one option a line, as `name: value`")
    target = values.pop("target", None)
    tokens = [] if has_target or target is None else [str(target)]
    for key, value in values.items():
        option = _full("--" + str(key).replace("_", "-"))
        if key == "method" and isinstance(value, list):
            tokens += [token for item in value for token in (option, item)]
        elif isinstance(value, list):
            tokens += [option, *map(str, value)]
        elif value is not None:
            tokens.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
    return tokens
