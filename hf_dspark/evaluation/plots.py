"""Pictures of what `benchmark` and calibration found. Needs matplotlib, which nothing else imports."""

from collections.abc import Callable
from pathlib import Path


def _figure(width: float = 6.0, height: float = 4.0):
    try:
        from matplotlib.figure import Figure  # no pyplot: it keeps global state and may look for a screen
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib, which isn\'t installed: `pip install "hf-dspark[plots]"`, or leave plots out.',
            name="matplotlib",
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def conditional_acceptance(results: list[dict]):
    """Acceptance of draft k given that all before it were accepted, a line per method and temperature."""
    figure, axes = _figure()
    for r in _overall(results):
        if shares := r.get("conditional_acceptance"):
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=_label(r))
    axes.set(xlabel="draft position", ylabel="conditional acceptance", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return figure


def tau_by_set(results: list[dict]):
    """Tokens per round for each prompt set, a bar per method and temperature."""
    figure, axes = _figure()
    labels, sets = list(dict.fromkeys(map(_label, results))), list(dict.fromkeys(r["set"] for r in results))
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        taus = {r["set"]: r["tau"] for r in results if _label(r) == label}
        axes.bar(
            [x + (i + 0.5) * width - 0.4 for x in range(len(sets))],
            [taus.get(s) or 0 for s in sets],
            width,
            label=label,
        )
    axes.set(ylabel="tau (tokens per round)", xticks=range(len(sets)), xticklabels=sets)
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return figure


def time_split(results: list[dict]):
    """Milliseconds per token spent on drafting, verifying and the rest."""
    figure, axes = _figure()
    chosen = [r for r in _overall(results) if "split" in r]
    below = [0.0] * len(chosen)
    for part in ("draft_seconds", "verify_seconds", "overhead_seconds"):
        heights = [1e3 * r["split"][part] for r in chosen]
        axes.bar(range(len(chosen)), heights, bottom=below, label=part.removesuffix("_seconds"))
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set(ylabel="ms per token", xticks=range(len(chosen)))
    axes.set_xticklabels([_label(r) for r in chosen], rotation=20, ha="right")
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return figure


def stages(results: list[dict]):
    """Share of tokens by the number of drafting stages of their round."""
    figure, axes = _figure()
    for r in _looped(results):
        table = r["by_stages"]
        axes.plot(list(table), [row["token_share"] for row in table.values()], marker="o", label=_label(r))
    axes.set(xlabel="stages of the round", ylabel="share of tokens", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return figure


def gate_scores(results: list[dict]):
    """First-stage gate scores of blocks that were accepted whole and of the others."""
    figure, axes = _figure()
    for r in _looped(results):
        first = r["gate"][min(r["gate"])]
        for name, wanted in (("whole", True), ("not whole", False)):
            scores = [s for s, full in zip(first["scores"], first["full"], strict=True) if bool(full) == wanted]
            axes.hist(scores, bins=30, histtype="step", label=f"{_label(r)}, {name}")
    axes.set(xlabel="summed log-probability of the block", ylabel="blocks")
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return figure


def reliability(before: dict | None, after: dict | None = None):
    """Predicted and observed chance that drafts 1..k are all accepted, all k together; from `reliability_bins`."""
    figure, axes = _figure(4.5, 4.5)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for name, bins in (("before", before), ("after", after)):
        if bins is not None:
            points = [(p, y) for p, y, n in zip(bins["prediction"], bins["label"], bins["count"], strict=True) if n]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="predicted acceptance", ylabel="observed acceptance", xlim=(0, 1), ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return figure


def threshold_sweep(results: list[dict]):
    """Drafts accepted and rejected a round, and the acceptance rate, if verification stopped at a confidence threshold
    (DSpark, figure 5)."""
    figure, axes = _figure()
    rate = axes.twinx()
    for i, r in enumerate(_swept(results)):
        sweep = r["threshold_sweep"]
        thresholds = [p["threshold"] for p in sweep]
        axes.plot(thresholds, [p["accepted"] for p in sweep], color=f"C{i}", label=f"{_label(r)}: accepted")
        axes.plot(thresholds, [p["rejected"] for p in sweep], color=f"C{i}", linestyle=":", label="rejected")
        rate.plot(
            thresholds, [p["rate"] for p in sweep], color=f"C{i}", linestyle="--", label="acceptance rate (right)"
        )
    axes.set(xlabel="confidence threshold", ylabel="drafts per round")
    rate.set(ylabel="acceptance rate", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=2, fontsize="x-small")
    return figure


def batch_sizes(rows: list[dict]):
    """Against the batch size: drafts verified per row and round (bars), and tokens per second (lines).

    `rows`: dicts with "rows" (the batch size), "budget" (the drafts), and "speeds" {name: tokens per second}.
    """
    figure, axes = _figure()
    places, speed = range(len(rows)), axes.twinx()
    axes.bar(places, [r["budget"] for r in rows], color="lightgray", label="drafts verified")
    for name in rows[0]["speeds"]:
        speed.plot(places, [r["speeds"][name] for r in rows], marker="o", label=name)
    axes.set(xlabel="batch size", ylabel="drafts verified per row and round", xticks=places)
    axes.set_xticklabels([r["rows"] for r in rows])
    speed.set(ylabel="tokens per second")
    figure.legend(loc="outside upper center", ncols=4, fontsize="small")
    return figure


def load_frontier(rows: list[dict]):
    """Tokens per second of all users against those of one, a line per method and a point per load; from
    `load.run_loads`."""
    figure, axes = _figure()
    for name in dict.fromkeys(r["method"] for r in rows):
        mine = [r for r in rows if r["method"] == name]
        x, y = [r["user_tokens_per_second"] for r in mine], [r["tokens_per_second"] for r in mine]
        axes.plot(x, y, marker="o", label=name)
        for r, at in zip(mine, zip(x, y)):
            axes.annotate(r["load"], at, fontsize="x-small")
    axes.set(xlabel="tokens per second of a user", ylabel="tokens per second in all")
    figure.legend(loc="outside upper center", ncols=4, fontsize="small")
    return figure


def load_drafts(rows: list[dict]):
    """Drafts verified per row and round, and tau (right), by load; from `load.run_loads`."""
    figure, axes = _figure()
    loads, right = list(dict.fromkeys(r["load"] for r in rows)), axes.twinx()
    for i, name in enumerate(dict.fromkeys(r["method"] for r in rows)):
        mine = {r["load"]: r for r in rows if r["method"] == name}
        axes.plot(loads, [mine[n]["verified"] for n in loads], color=f"C{i}", marker="o", label=name)
        right.plot(loads, [mine[n]["tau"] for n in loads], color=f"C{i}", linestyle="--")
    axes.set(xlabel="load", ylabel="drafts verified per row and round")
    right.set(ylabel="tau (dashed)")
    figure.legend(loc="outside upper center", ncols=4, fontsize="small")
    return figure


def save_loads(rows: list[dict], folder: str | Path) -> list[Path]:
    """Both plots of `load.run_loads` as PNG."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in (("load_frontier", load_frontier), ("load_drafts", load_drafts)):
        paths.append(folder / f"{name}.png")
        draw(rows).savefig(paths[-1], dpi=150)
    return paths


def save_all(results: list[dict], folder: str | Path) -> list[Path]:
    """Every plot that the results have data for, as PNG."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Callable] = {"tau": tau_by_set}
    if any("split" in r for r in _overall(results)):
        wanted |= {"time_split": time_split, "conditional_acceptance": conditional_acceptance}
    if _looped(results):
        wanted |= {"stages": stages, "gate": gate_scores}
    if _swept(results):
        wanted["threshold_sweep"] = threshold_sweep
    paths = []
    for name, draw in wanted.items():
        paths.append(folder / f"{name}.png")
        draw(results).savefig(paths[-1], dpi=150)
    return paths


def _overall(results: list[dict]) -> list[dict]:
    sets = {r["set"] for r in results}
    return [r for r in results if r["set"] == "all" or len(sets) == 1]


def _looped(results: list[dict]) -> list[dict]:
    return [r for r in _overall(results) if r.get("by_stages")]


def _swept(results: list[dict]) -> list[dict]:
    return [r for r in _overall(results) if r.get("threshold_sweep")]


def _label(r: dict) -> str:
    return f"{r['method']}, T = {r['temperature']:g}"
