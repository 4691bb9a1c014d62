"""`hf-dspark data`: training answers from the target itself, and a look at what a file of them would teach."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hf_dspark.evaluation.prompts import JsonLines, read_prompts
from hf_dspark.training.data import ChatDataset, example_from, numbered_rows, template_hash
from hf_dspark.training.generation import GenerateAnswers, Request, Sampling, ServerAnswers

from .shared import EMBEDDED, check_drafter, console, load_drafter, load_target, number, progress, say, table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make training data, and look at it.")


@app.command()
def generate(
    target: str = typer.Argument(
        ..., help=f"Hub id or folder; '{EMBEDDED}' is the demo's model. With --server its name there."
    ),
    prompts: Annotated[
        list[Path], typer.Option(exists=True, help="jsonl of `turns`, `messages` or `prompt`; repeats.")
    ] = ...,
    out: Annotated[
        Path, typer.Option(help="One line per answer; the same command continues an interrupted run.")
    ] = ...,
    drafter: str = typer.Option(None, callback=check_drafter, help="Hub id or folder of a drafter, to speed it up."),
    temperature: Annotated[list[float], typer.Option(help="Taken in turn; 0 is greedy; repeatable.")] = (0.0, 0.7, 1.0),
    max_new_tokens: int = typer.Option(512, help="Longest answer."),
    batch_size: int = typer.Option(8, help="Prompts answered together."),
    server: str = typer.Option(None, help="Base URL of an OpenAI-style server, instead of running the target here."),
    server_key: str = typer.Option(None, envvar="OPENAI_API_KEY", help="Its key."),
    parallel: int = typer.Option(16, help="Requests to the server at once."),
    thinking: bool = typer.Option(None, help="Passed to the chat template; its own default if neither is given."),
    limit: int = typer.Option(None, help="Only the first so many prompts of each file."),
    seed: int = typer.Option(0, help="Of sampling."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
):
    """Let the target answer prompts: what a drafter has to learn is the target's own text."""
    sampling = Sampling(tuple(temperature), max_new_tokens, seed, thinking)
    settings = {"target": target, "server": server, "prompts": [str(p) for p in prompts], **sampling.to_dict()}
    if server:
        answers = ServerAnswers(server, target, sampling, parallel, server_key)
    else:
        model, tokenizer = load_target(target, dtype, device)
        settings["template_hash"] = template_hash(tokenizer)
        assistant = load_drafter(drafter, model) if drafter else None
        answers = GenerateAnswers(model, tokenizer, sampling, assistant, batch_size)
    beside = out.with_suffix(".settings.json")
    check_settings(out, beside, settings)
    lines = JsonLines(out)
    beside.write_text(json.dumps(settings, indent=1))

    asked = [p for path in prompts for p in read_prompts(path, limit)]
    answered = {(row["prompt_id"], row["turn"]): row["messages"] for row in lines.done}
    with progress() as bar:
        task = bar.add_task("answering", total=sum(len(p.turns) for p in asked), completed=len(answered))
        for turn in range(max((len(p.turns) for p in asked), default=0)):
            requests = []
            for i, prompt in enumerate(asked):
                if turn < len(prompt.turns) and (i, turn) not in answered:
                    before = answered[i, turn - 1] if turn else []
                    messages = (*before, {"role": "user", "content": prompt.turns[turn]})
                    requests.append(Request(i, turn, messages, prompt.source))
            try:
                for row in answers(requests):
                    lines.append(row)
                    answered[row["prompt_id"], row["turn"]] = row["messages"]
                    bar.advance(task)
            except KeyboardInterrupt:
                say(f"Stopped after {len(answered)} answers. The same command continues from there.")
                raise typer.Exit(130) from None
    say(f"{len(answered)} answers in {out}, settings in {beside}.")


def check_settings(out: Path, beside: Path, settings: dict) -> None:
    """Go on with `out` only if it was made with the same settings; what differs is named."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file in it.")
    if not beside.exists():
        if out.exists() and out.stat().st_size:
            raise ValueError(
                f"{out} exists, and no {beside.name} beside it says how it was made, so it can't be gone on with: give "
                "another --out."
            )
        return
    found = json.loads(beside.read_text())
    keys = [key for key in {**found, **settings} if found.get(key) != settings.get(key)]
    if keys:
        listing = "; ".join(f"{key}: {found.get(key)} there, {settings.get(key)} here" for key in keys)
        raise ValueError(f"{out} was made with other settings ({listing}): give the same settings, or another --out.")


@app.command()
def preview(
    data: Annotated[Path, typer.Argument(exists=True, help="jsonl of training rows.")],
    target: str = typer.Argument(..., help=f"Whose tokenizer reads them; '{EMBEDDED}' is the demo's model."),
    count: int = typer.Option(3, help="Rows to show."),
    thinking: bool = typer.Option(None, help="Passed to the chat template, for rows without input_ids."),
):
    """Show rows as the model reads them; what is supervised is green."""
    tokenizer = load_tokenizer(target)
    rows = read_rows(data)[:count]
    for i, row in enumerate(rows):
        example = example_from(row, tokenizer, thinking)
        text = Text()
        for ids, supervised in spans(example):
            text.append(tokenizer.decode(ids), style="bold green" if supervised else "dim")
        console.rule(
            f"row {i}: {sum(x != -100 for x in example['labels'])} of {len(example['labels'])} tokens supervised"
        )
        console.print(text, soft_wrap=True)


@app.command()
def stats(
    data: Annotated[Path, typer.Argument(exists=True, help="jsonl of training rows.")],
    target: str = typer.Option(None, help="Whose tokenizer renders rows without input_ids."),
    thinking: bool = typer.Option(None, help="Passed to the chat template, for rows without input_ids."),
):
    """Count rows and tokens by source, and how much of the answers a reduced vocabulary would cover."""
    rows = read_rows(data)
    tokenizer = load_tokenizer(target) if target else None
    dataset = ChatDataset(rows, tokenizer, max_length=1 << 30, enable_thinking=thinking)
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(str(row.get("source", data.stem)), []).append(i)
    lengths = [(len(e["input_ids"]), sum(x != -100 for x in e["labels"])) for e in dataset.examples]

    def line(name, chosen):
        total, supervised = (sum(lengths[i][k] for i in chosen) for k in (0, 1))
        finished = [rows[i]["finished"] for i in chosen if "finished" in rows[i]]
        share = sum(finished) / len(finished) if finished else None
        return [name, len(chosen), total, supervised, max(lengths[i][0] for i in chosen), share]

    body = [line(name, chosen) for name, chosen in sorted(groups.items())]
    body += [line("all", range(len(rows)))] if len(groups) > 1 else []
    console.print(table(str(data), ["source", "rows", "tokens", "supervised", "longest", "finished"], body))
    counts = Counter(x for e in dataset.examples for x in e["labels"] if x != -100).most_common()
    sizes = [size for size in (1024, 4096, 8192, 16384, 32768) if size < len(counts)]
    cover = [[size, number(sum(n for _, n in counts[:size]) / dataset.supervised, 4)] for size in [*sizes, len(counts)]]
    console.print(table("share of supervised tokens", ["most frequent ids", "covered"], cover))


def read_rows(path: Path) -> list[dict]:
    return [row for _, row in numbered_rows(path)]


def load_tokenizer(target: str):
    if target == EMBEDDED:
        return load_target(target)[1]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def spans(example: dict):
    """Runs of ids that are all supervised or all not."""
    ids, start = example["input_ids"], 0
    flags = [x != -100 for x in example["labels"]]
    for i in range(1, len(ids) + 1):
        if i == len(ids) or flags[i] != flags[start]:
            yield ids[start:i], flags[start]
            start = i
