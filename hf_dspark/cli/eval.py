"""`hf-dspark eval`: acceptance and speed of plain decoding, prompt lookup and a drafter, side by side."""

import json
import math
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from hf_dspark.evaluation.prompts import read_prompts

from .shared import (
    EMBEDDED,
    check_drafter,
    check_output,
    check_target,
    console,
    finite,
    interruptible,
    load_drafter,
    load_target,
    number,
    percent,
    progress,
    prompt_warnings,
    say,
    table,
    warn,
)

app = typer.Typer(add_completion=False)


LEGEND = (
    "tau: tokens per target forward, bonus token included. drafts: accepted ones per round. rate: their share of the "
    "verified ones. tok/s: tokens per second, ms/token: drafting/verifying/rest, both with the prefill left out. x "
    "plain, x lookup: speed against plain decoding and prompt lookup, with 95 % intervals. same: answers equal to "
    "plain decoding's, token for token."
)
METHODS = (
    "own: the drafter in this library's loop; own+copy: with copies of the text where they pay; stock: in "
    "transformers' loop; copy: copies alone; lookup: transformers' prompt lookup. In brackets: the knobs that were set."
)


@app.command()
def evaluate(
    target: str = typer.Argument(
        ..., callback=check_target, help=f"Hub id or folder of the target; '{EMBEDDED}' is the demo's model."
    ),
    prompts: Annotated[
        list[Path], typer.Option(exists=True, dir_okay=False, help="jsonl of `turns`, `messages` or `prompt`; repeats.")
    ] = ...,
    drafter: str = typer.Option(None, callback=check_drafter, help="Hub id or folder of a drafter."),
    methods: str = typer.Option(
        "plain,lookup,own", help="Of plain, lookup, copy, stock, own and own+copy, with commas."
    ),
    setting: Annotated[
        list[str], typer.Option(help="Knobs for own, own+copy and stock, e.g. 'num_draft_tokens=3'; repeatable.")
    ] = (),
    temperature: Annotated[list[float], typer.Option(min=0, callback=finite, help="0 is greedy; repeatable.")] = (0.0,),
    top_k: int = typer.Option(0, min=0, help="When sampling; 0 is off."),
    top_p: float = typer.Option(1.0, min=0, max=1, callback=finite, help="When sampling; 1 is off."),
    limit: int = typer.Option(None, min=1, help="Only the first so many prompts of each set."),
    max_new_tokens: int = typer.Option(256, min=1, help="Longest answer."),
    repeats: int = typer.Option(1, min=1, help="How often everything is measured."),
    lookup_tokens: int = typer.Option(5, min=1, help="Drafts of prompt lookup."),
    turns: str = typer.Option("first", help="Of a conversation: first, or all."),
    chat: bool = typer.Option(True, help="Render prompts with the tokenizer's chat template."),
    thinking: bool = typer.Option(None, help="Passed to the chat template; its own default if neither is given."),
    seed: int = typer.Option(0, min=0, help="Of sampling and of the order in which methods take turns."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16 or float64."),
    device: str = typer.Option(None, help="cpu, cuda, mps, ...; the CPU by default."),
    out: Annotated[Path, typer.Option(help="Results and run record; OUT.partial.jsonl while it runs.")] = Path(
        "eval.json"
    ),
    plots: Annotated[Path, typer.Option(help="A folder for pictures.")] = None,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT and pictures that are there."),
    concurrency: str = typer.Option(None, help="Speed under load instead: users at once, e.g. 1,2,4,8,16,32."),
    arrival: str = typer.Option(
        None, help="Requests per second at random, e.g. 0.5,1,2; --concurrency bounds those at work."
    ),
):
    """Measure acceptance and speed of a drafter against other ways of generating the same answers."""
    kinds = [m.strip() for m in methods.split(",") if m.strip()]
    if drafter is None and {"own", "own+copy", "stock"} & set(kinds):
        raise ValueError(f"--methods {methods} needs a drafter: pass --drafter, or --methods plain,lookup,copy.")
    if turns not in ("first", "all"):
        raise ValueError(f"--turns {turns} is unknown: use first or all.")
    check_output(out, "--out", overwrite)
    check_output(plots, "--plots", overwrite, folder=True)
    if plots is not None:
        import_module("matplotlib")  # or hours of measuring would end without pictures
    texts = [p for path in prompts for p in read_prompts(path, limit)]
    settings = [parse_setting(s) for s in setting] or [{}]
    loads = parse_loads(concurrency, arrival)
    if loads and drafter is None:
        raise ValueError(
            "--concurrency and --arrival compare plain decoding with a drafter under load: pass --drafter."
        )

    from hf_dspark.evaluation.benchmark import Plan, make_methods, run, write_json
    from hf_dspark.evaluation.environment import environment, file_hash
    from hf_dspark.evaluation.timing import Busy

    plan = Plan(
        prompts=texts,
        methods=make_methods(kinds, settings, lookup_tokens),
        temperatures=list(temperature),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        seed=seed,
        turns=turns,
        chat=chat,
        thinking=thinking,
        sampling={"top_k": top_k, "top_p": top_p},
    )
    model, tokenizer = load_target(target, dtype, device)
    assistant = load_drafter(drafter, model) if drafter else None
    if assistant is not None:
        warn(prompt_warnings(assistant, tokenizer, chat, thinking))
    header = {"target": target, "drafter": drafter, "files": {p.name: file_hash(p) for p in prompts}}
    header["environment"] = environment(model, assistant)
    if loads:
        named = {text: knobs for text, knobs in zip(setting, settings)} or None
        return _load(model, tokenizer, assistant, plan, header, loads, named, out, plots)
    partial = out.with_name(out.name + ".partial.jsonl")
    with (
        interruptible(f"answers so far are in {partial}; the same command continues."),
        progress() as bar,
        Busy() as busy,
    ):
        task = bar.add_task("answers", total=None)
        result = run(
            model, tokenizer, assistant, plan, header, partial, lambda i, n: bar.update(task, completed=i, total=n)
        )
    write_json({"date": date.today().isoformat(), "processor_share": busy.share, **result}, out)
    partial.unlink()
    report(result, busy.warning(model.device), out, plots)


def parse_loads(concurrency: str | None, arrival: str | None) -> list:
    """Example: `("1,8", None)` -> one and eight users at once; `("8", "0.5")` -> half a request per second, eight at
    work."""
    from hf_dspark.evaluation.load import Load

    try:
        users = [int(n) for n in (concurrency or "").split(",") if n.strip()]
        rates = [float(r) for r in (arrival or "").split(",") if r.strip()]
    except ValueError:
        users, rates = [0], []
    if any(n < 1 for n in users) or any(not 0 < r < float("inf") for r in rates) or (rates and len(users) > 1):
        raise ValueError(
            f"--concurrency {concurrency} --arrival {arrival}: users at once are whole numbers from 1 on, and rates "
            "are positive; beside rates, one number of users: set e.g. --concurrency 1,2,4, or --concurrency 8 "
            "--arrival 0.5,1."
        )
    if rates:
        return [Load(users[0] if users else 8, rate) for rate in rates]
    return [Load(n) for n in users]


def _load(model, tokenizer, assistant, plan, header, loads, settings, out, plots) -> None:
    """Measure speed under load, and print and write what came out."""
    from hf_dspark.evaluation.benchmark import write_json
    from hf_dspark.evaluation.load import run_loads, ways
    from hf_dspark.evaluation.prompts import render
    from hf_dspark.evaluation.timing import Busy

    texts = [
        render(tokenizer, [{"role": "user", "content": p.turns[0]}], plan.chat, plan.thinking) for p in plan.prompts
    ]
    temperature = plan.temperatures[0]
    sampling = {"do_sample": True, "temperature": temperature, **plan.sampling} if temperature > 0 else {}
    with progress() as bar, Busy() as busy:
        task = bar.add_task("answers", total=None)
        rows = run_loads(
            model, ways(assistant, settings), texts, loads, plan.max_new_tokens, sampling, plan.seed,
            lambda i, n: bar.update(task, completed=i, total=n),
        )  # fmt: skip
    settings = {**header, "plan": plan.to_dict()}
    write_json({"date": date.today().isoformat(), "processor_share": busy.share, "run": settings, "loads": rows}, out)
    columns = ["load", "method", "tok/s", "tok/s of a user", "wait s", "tau", "verified"]
    names = ("load", "method", "tokens_per_second", "user_tokens_per_second")
    lines = [[*(r[n] for n in names), r["wait_seconds"]["median"], r["tau"], r["verified"]] for r in rows]
    console.print(table(f"{len(texts)} prompts, temperature {temperature:g}", columns, lines))
    say(f"verified: drafts per row and round. Everything measured is in {out}.", "dim")
    warn(busy.warning(model.device))
    if plots is not None:
        from hf_dspark.evaluation.plots import save_loads

        say(f"Plots: {', '.join(map(str, save_loads(rows, plots)))}", "dim")


def report(result: dict, warnings: list[str], out: Path, plots: Path | None) -> None:
    """Print tables and their legend, what was left out, and hints; draw pictures."""
    for method, why in result["refused"].items():
        warn([f"{method} was left out: {why}"])
    for group in dict.fromkeys((r["set"], r["temperature"]) for r in result["results"]):
        console.print(results_table([r for r in result["results"] if (r["set"], r["temperature"]) == group], *group))
    for line in source_lines(result["results"]):
        say(line, "dim")
    console.print(f"{LEGEND} {METHODS}", style="dim", markup=False)
    say(f"Everything measured is in {out}.", "dim")
    warn(warnings)
    for line in hints(result["results"]):
        say(f"Hint: {line}", "dim")
    if plots is not None:
        from hf_dspark.evaluation.plots import save_all

        say(f"Plots: {', '.join(map(str, save_all(result['results'], plots)))}", "dim")


def source_lines(results: list[dict]) -> list[str]:
    """Where the drafts of each method came from, one line for each that copied."""
    from hf_dspark.decoding.outputs import describe_sources

    kept = [r for r in results if {"copy", "memory"} & r.get("sources", {}).keys()]
    return [f"{r['set']}, {r['temperature']:g}, {r['method']}: {describe_sources(r['sources'])}." for r in kept]


def hints(results: list[dict], few: int = 10) -> list[str]:
    """What to make of a drafter that is slower than plain decoding, and of few answers."""
    ours = [r for r in results if r["method"].startswith("own") and "speedup_over_plain" in r]
    slow = {r["method"] for r in ours if r["speedup_over_plain"]["ratio"] < 1}
    lines = []
    if slow:
        lines.append(
            f"{', '.join(sorted(slow))} was slower than plain decoding (x plain below 1): drafting costs more time "
            "here than accepted drafts save. --setting scheduler=auto drafts only as much as pays; `hf-dspark inspect "
            "--target` tells whether the drafter fits."
        )
    answers = min((r["answers"] for r in results), default=few)
    if answers < few:
        lines.append(
            f"{answers} answer{'s' * (answers != 1)} of a method {'are' if answers != 1 else 'is'} too few to tell it "
            f"from another: the intervals in brackets are rough. Give {few} prompts or more, and --repeats."
        )
    return lines


def parse_setting(text: str) -> dict:
    """Example: `'num_draft_tokens=3, verification=block'` -> `{"num_draft_tokens": 3, "verification": "block"}`."""
    knobs = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--setting {text!r}: {part!r} is no knob=value, such as num_draft_tokens=3.")
        try:
            knobs[name] = json.loads(value)
        except ValueError:
            knobs[name] = value
    from hf_dspark.modeling import SpeculationConfig

    try:
        SpeculationConfig(**knobs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--setting {text!r}: {error}") from None
    return knobs


def results_table(results: list[dict], name: str, temperature: float):
    """One row per method, what it was and how fast; `LEGEND` explains the columns. At most 100 characters wide."""
    columns = ["method", "tau", "drafts", "rate", "tok/s", "ms/token", "x plain", "x lookup", "same"]
    rows = []
    for r in results:
        split = "/".join(f"{1e3 * s:.3g}" for s in r["split"].values()) if "split" in r else "-"
        rates = [r.get("accepted_per_round"), percent(r.get("acceptance_rate", math.nan))]
        ratios = [_ratio(r.get(f"speedup_over_{m}")) for m in ("plain", "lookup")]
        same = percent(r.get("same_text", math.nan))
        speed = number(r["tokens_per_second"], 1)
        method = r["method"].replace("[", "\n[", 1).replace(", ", "\n ")
        rows.append([method, r["tau"], *rates, speed, split, *ratios, same])
    return table(f"{name}, temperature {temperature:g}", columns, rows)


def _ratio(speedup: dict | None) -> str:
    """Example: `'12.3\\n(9.87-14.1)'`."""
    if not speedup:
        return "-"
    ratio, low, high = (number(speedup[k], 2 if speedup[k] < 10 else 1) for k in ("ratio", "low", "high"))
    return f"{ratio}\n({low}-{high})"
