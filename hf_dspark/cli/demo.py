"""`hf-dspark demo`: the same text, faster, on SmolLM2-135M-Instruct."""

from typing import Annotated

import typer

from hf_dspark.evaluation.prompts import render

from .shared import (
    EMBEDDED,
    check_drafter,
    console,
    load_drafter,
    load_target,
    number,
    percent,
    say,
    shipped_drafter,
    table,
)

PROMPTS = (
    "A train travels 60 miles in 1.5 hours. How far does it travel in 4 hours at the same speed? Think step by step.",
    "Write a Python function that checks whether a string is a palindrome, with a docstring and an example.",
    "What are three things to do on a rainy day?",
)

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    drafter: str = typer.Option(
        None, callback=check_drafter, help="Folder or Hub id of a drafter for SmolLM2-135M-Instruct."
    ),
    prompt: Annotated[list[str], typer.Option(help="Prompts to answer; may be given several times.")] = PROMPTS,
    max_new_tokens: int = typer.Option(80, min=2, help="Longest answer."),
    dtype: str = typer.Option("bfloat16", help="bfloat16 is faster; in float32 the texts are equal token for token."),
):
    """Answer prompts with SmolLM2-135M-Instruct, plainly and with a drafter, and compare. About a minute on two
    cores."""
    if blank := [text for text in prompt if not text.strip()]:
        raise ValueError(f"--prompt {blank[0]!r} is empty, so there is nothing to answer: give a text.")
    import torch

    from hf_dspark.evaluation import metrics
    from hf_dspark.evaluation.timing import Clock

    from .streaming import DraftPrinter

    with console.status("Loading SmolLM2-135M-Instruct (the first time takes half a minute) ..."):
        target, tokenizer = load_target(EMBEDDED, dtype)
        model, name = choose_drafter(drafter, target)
    say(f"Drafts come from {name}.")
    console.print("Drafts that the target accepted are [green]green[/green]; the other tokens are its own.\n")
    rows, plain_seconds, draft_seconds, responses = [], [], [], []
    for i, text in enumerate(prompt):
        ids = torch.tensor([render(tokenizer, text)])
        if i == 0:  # the first call of each kind pays for set-up that no later one does
            for assistant in (None, model):
                target.generate(ids, max_new_tokens=4, do_sample=False, assistant_model=assistant)
        say(f"> {text}", "bold")
        with console.status("plain decoding ..."):
            clock, options = Clock(), {"max_new_tokens": max_new_tokens, "do_sample": False}
            plain = target.generate(ids, streamer=clock, **options)
        printer = DraftPrinter(tokenizer, console)
        ours = target.generate(ids, streamer=printer, assistant_model=model, **options)
        rounds = metrics.responses_of(model.last_speculation)
        responses += rounds
        plain_seconds.append(clock.seconds_per_token)
        draft_seconds.append(printer.seconds_per_token)
        same = same_tokens(*(text[0, ids.shape[1] :].tolist() for text in (plain, ours)))
        rows.append([str(i + 1), *_numbers(clock.seconds_per_token, printer.seconds_per_token, rounds), same])
        console.print()
    mean = [sum(s) / len(s) for s in (plain_seconds, draft_seconds)]
    rows.append(["all", *_numbers(*mean, responses), ""])
    columns = ["prompt", "plain tok/s", "drafter tok/s", "speed-up", "tau", "accepted", "tokens as in plain"]
    console.print(table(f"SmolLM2-135M-Instruct, {dtype}, greedy, {torch.get_num_threads()} threads", columns, rows))
    say("tau: tokens per target forward, bonus token included; accepted: share of the verified drafts.", "dim")
    if any(row[-1].startswith("only") for row in rows):
        say(
            f"{dtype} rounds differently for one token than for several, so near ties can fall either way, in plain "
            "decoding too. With --dtype float32 the texts are equal.",
            "dim",
        )


def choose_drafter(name: str | None, target):
    """The drafter of the demo and what to call it: the one that was asked for, else the one that a checkout ships, else
    drafts copied from the text, which need no weights.

    Raises:
        ValueError: there is none.
    """
    import hf_dspark

    if place := name or shipped_drafter():
        return load_drafter(place, target), str(place)
    if hasattr(hf_dspark, "CopyDrafter"):
        return hf_dspark.CopyDrafter(), "the text itself: what it repeats is drafted (no drafter was given)"
    raise ValueError(
        "No drafter was given, and the one for SmolLM2-135M-Instruct lies in model_cards/ of the source checkout, "
        "which an installed package doesn't carry: pass --drafter FOLDER_OR_HUB_ID."
    )


def _numbers(plain: float, ours: float, responses) -> list[str]:
    from hf_dspark.evaluation import metrics

    rounds = metrics.pooled(responses)
    speed = [number(1 / plain, 1), number(1 / ours, 1), f"{plain / ours:.2f}x"]
    return [*speed, number(metrics.tau(rounds)), percent(metrics.acceptance_rate(rounds))]


def same_tokens(plain: list[int], ours: list[int]) -> str:
    """How much of two answers is equal: 'all 80', or 'only the first 76 of 80'."""
    if plain == ours:
        return f"all {len(plain)}"
    same = next((i for i, (x, y) in enumerate(zip(plain, ours)) if x != y), min(len(plain), len(ours)))
    return f"only the first {same} of {len(plain)}"
