"""Acceptance and speed of several ways of generating the same answers, measured side by side.

Every prompt is answered by all methods, one after the other in random order, so that whatever else the machine does
falls on all of them alike; speed-ups are ratios over the same prompts. Results are written as they come, and a second
run goes on.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch

from hf_dspark.drafting.copy_drafter import CopyDrafter
from hf_dspark.modeling import SpeculationConfig

from . import metrics
from .environment import digest
from .metrics import Round
from .prompts import JsonLines, Prompt, render
from .record import gate_data, record, threshold_sweep
from .timing import Clock

KINDS = ("plain", "lookup", "copy", "stock", "own", "own+copy")
DRAFTED = ("stock", "own", "own+copy")  # kinds that need a drafter


@dataclass(frozen=True)
class Method:
    """A way of generating. `kind`: `"plain"`; `"lookup"` (transformers' prompt lookup, `{"tokens": n}`); `"copy"`
    ([`CopyDrafter`]); `"stock"` and `"own"` (the drafter in transformers' loop and in ours), whose `knobs` change the
    drafter's stored ones; `"own+copy"` (as `"own"`, with `copy="auto"`)."""

    kind: str
    knobs: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"method {self.kind!r} is unknown: choose from {', '.join(KINDS)}.")

    @property
    def label(self) -> str:
        """Example: `own[num_draft_tokens=3]`."""
        return self.kind + (f"[{', '.join(f'{k}={v}' for k, v in self.knobs.items())}]" if self.knobs else "")

    def options(self, drafter) -> dict:
        """Arguments for `generate`."""
        if self.kind == "plain":
            return {}
        if self.kind == "lookup":
            return {"prompt_lookup_num_tokens": self.knobs.get("tokens", 5)}
        if self.kind == "copy":
            return {"assistant_model": copier()}
        copies = {"own": {}, "own+copy": {"copy": "auto"}, "stock": {"copy": None}}[self.kind]
        engine = "stock" if self.kind == "stock" else "own"
        knobs = {**drafter.speculation.to_dict(), **copies, **self.knobs, "engine": engine}
        return {"assistant_model": drafter, "speculation": SpeculationConfig(**knobs)}


@cache
def copier() -> CopyDrafter:
    """The one that all copying methods share, so that what it measured and learnt stays from answer to answer."""
    return CopyDrafter()


def make_methods(kinds: Sequence[str], settings: Sequence[dict] = ({},), lookup_tokens: int = 5) -> list[Method]:
    """One method per kind; those with a drafter once per setting."""
    out = []
    for kind in kinds:
        if kind == "lookup":
            out.append(Method(kind, {"tokens": lookup_tokens}))
        else:
            out += [Method(kind, s) for s in (settings if kind in DRAFTED else ({},))]
    return out


@dataclass
class Plan:
    """What is measured. Temperature 0 is greedy; `turns` "first" answers the first message of a conversation, "all"
    answers each in turn on top of the method's own earlier answers."""

    prompts: list[Prompt]
    methods: list[Method]
    temperatures: Sequence[float] = (0.0,)
    max_new_tokens: int = 256
    repeats: int = 1
    seed: int = 0
    turns: str = "first"
    chat: bool = True
    thinking: bool | None = None
    sampling: dict = field(default_factory=dict)  # top_k, top_p, ...

    def to_dict(self) -> dict:
        """The settings, the prompts as counts and a hash."""
        prompts = [asdict(p) for p in self.prompts]
        sets = {s: sum(p.source == s for p in self.prompts) for s in dict.fromkeys(p.source for p in self.prompts)}
        return {
            **{k: v for k, v in self.__dict__.items() if k not in ("prompts", "methods")},
            "temperatures": list(self.temperatures),
            "methods": [asdict(m) for m in self.methods],
            "prompts": {"sets": sets, "hash": digest(prompts)},
        }

    def runs(self) -> Iterator[tuple[int, Prompt, float, Method]]:
        """Everything to do, in an order that a second run repeats."""
        for repeat in range(self.repeats):
            for prompt in self.prompts:
                for temperature in self.temperatures:
                    order = random.Random(f"{self.seed}/{repeat}/{prompt.source}/{prompt.index}/{temperature}")
                    for method in order.sample(self.methods, len(self.methods)):
                        yield repeat, prompt, temperature, method


def run(
    target, tokenizer, drafter, plan: Plan, header: dict, partial: str | Path, progress: Callable | None = None
) -> dict:
    """Measure everything in `plan`.

    Args:
        drafter: bound to `target`, or None if no method needs one.
        header: the run record (see `environment`); with the plan it tells whose results `partial` holds.
        partial: jsonl that grows by one line per generated answer. progress: called with (done, total).

    Returns:
        JSON-able: `run` (header and plan), `refused` {method: why}, `results` (one entry per set, temperature and
        method, see `summarise`) and `records`.
    """
    settings = {**header, "plan": plan.to_dict()}
    file = JsonLines(partial, settings)
    done = {_key(r): r for r in file.done}
    refused = _warm_up(target, tokenizer, drafter, plan)
    runs = [r for r in plan.runs() if r[3].label not in refused]
    for i, (repeat, prompt, temperature, method) in enumerate(runs):
        place = {"repeat": repeat, "source": prompt.source, "prompt": prompt.index, "temperature": temperature}
        place["method"] = method.label
        if _key(place) not in done:
            result = {**place, **answer(target, tokenizer, drafter, plan, prompt, temperature, method)}
            done[_key(result)] = file.append(result)
        if progress is not None:
            progress(i + 1, len(runs))
    records = [done[_key(r)] for r in done.values()]
    block = drafter.config.max_block if drafter is not None else None
    return {"run": settings, "refused": refused, "results": summarise(records, plan, block), "records": records}


def _key(record: dict) -> tuple:
    return tuple(record[k] for k in ("repeat", "source", "prompt", "temperature", "method"))


def _warm_up(target, tokenizer, drafter, plan: Plan) -> dict[str, str]:
    """Let every method do its first-call work unmeasured, and find those that refuse this target or these settings."""
    refused, short = {}, Plan(**{**plan.__dict__, "max_new_tokens": min(8, plan.max_new_tokens), "turns": "first"})
    for method in plan.methods:
        try:
            answer(target, tokenizer, drafter, short, plan.prompts[0], max(plan.temperatures), method)
        except (ValueError, NotImplementedError) as error:
            refused[method.label] = str(error)
    if len(refused) == len(plan.methods):
        raise ValueError(f"Every method refused this target or these settings: {refused}.")
    return refused


def answer(target, tokenizer, drafter, plan: Plan, prompt: Prompt, temperature: float, method: Method) -> dict:
    """Answer one prompt and say what it took: seconds, tokens, and per response the rounds."""
    messages, out = [], []
    for turn in prompt.turns if plan.turns == "all" else prompt.turns[:1]:
        messages.append({"role": "user", "content": turn})
        ids = render(tokenizer, messages, plan.chat, plan.thinking)
        torch.manual_seed(plan.seed + prompt.index)
        out.append(_generate(target, drafter, plan, ids, temperature, method))
        messages.append(
            {"role": "assistant", "content": tokenizer.decode(out[-1].pop("ids"), skip_special_tokens=True)}
        )
    totals = {k: sum(o[k] for o in out) for k in out[0] if isinstance(out[0][k], int | float)}
    kept = ("emitted", "rounds", "round_seconds", "gate", "sweep", "text")
    lists = {k: [o[k] for o in out] for k in kept if k in out[0]}
    return {**totals, **lists}


def _generate(target, drafter, plan, ids, temperature, method) -> dict:
    clock, options = Clock(), method.options(drafter)
    sampling = {"temperature": temperature, "top_k": 0, **plan.sampling} if temperature > 0 else {}
    inputs = torch.tensor([ids], device=target.device)
    ours = options.get("assistant_model")
    with record(ours) if ours is not None and method.kind != "stock" else _Nothing() as recorder:
        began = time.perf_counter()
        output = target.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=plan.max_new_tokens, streamer=clock,
            do_sample=temperature > 0, **sampling, **options,
        )  # fmt: skip
        seconds = time.perf_counter() - began
    new = output[0, len(ids) :].tolist()
    result = {
        "seconds": seconds,
        "decode_seconds": clock.decode_seconds,
        "decode_tokens": clock.decode_tokens,
        "prompt_tokens": len(ids),
        "tokens": len(new),
        "emitted": clock.puts[1:],
        "text": digest(new),
        "ids": new,
    }
    if ours is not None:
        stats = ours.last_speculation
        (result["rounds"],) = metrics.responses_of(stats)
        result |= {
            k: getattr(stats, k) for k in ("draft_seconds", "verify_seconds", "overhead_seconds", "prefill_seconds")
        }
    if recorder is not None:
        result["round_seconds"] = [r.seconds for r in recorder.rounds]
        result |= {"sweep": sweep} if (sweep := threshold_sweep(recorder.rounds)) else {}
        if method.knobs.get("loop_gate", ours.speculation.loop_gate) is not None:
            result["gate"] = [[stage, *data] for stage, data in sorted(gate_data(recorder.rounds).items())]
    return result


class _Nothing:
    def __enter__(self):
        return None

    def __exit__(self, *exc):
        return False


# ---------------------------------------------------------------------- results


def summarise(records: list[dict], plan: Plan, block: int | None) -> list[dict]:
    """One entry per set ("all" of them last), temperature and method: the metrics, `tokens_per_second` (prefill left
    out), `seconds_per_token` split into draft, verify and overhead, and speed-ups over plain decoding and prompt lookup
    with their intervals. `same_text`: share of greedy answers equal to plain decoding's, token for token."""
    sources = list(dict.fromkeys(r["source"] for r in records))
    groups = [*sources, "all"] if len(sources) > 1 else sources
    out = []
    for source in groups:
        for temperature in plan.temperatures:
            chosen = [r for r in records if source in ("all", r["source"]) and r["temperature"] == temperature]
            by_method = {m.label: [r for r in chosen if r["method"] == m.label] for m in plan.methods}
            by_method = {label: rs for label, rs in by_method.items() if rs}
            for method in plan.methods:
                if method.label in by_method:
                    entry = {"set": source, "temperature": temperature, "method": method.label}
                    out.append(entry | _summary(by_method, method, plan, block))
    return out


def _summary(by_method: dict[str, list[dict]], method: Method, plan: Plan, block: int | None) -> dict:
    records = by_method[method.label]
    tokens = sum(r["decode_tokens"] for r in records)
    out = {"answers": len(records), "tokens": sum(r["tokens"] for r in records)}
    out["tokens_per_second"] = tokens / sum(r["decode_seconds"] for r in records) if tokens else math.nan
    if "rounds" in records[0]:
        responses = [[Round(*r) for r in rounds] for record in records for rounds in record["rounds"]]
        out |= metrics.summary(responses, block)
        parts = ("draft_seconds", "verify_seconds", "overhead_seconds")
        out["split"] = {p: sum(r[p] for r in records) / max(tokens, 1) for p in parts}
        if sweeps := [s for r in records for s in r.get("sweep", ())]:
            out["threshold_sweep"] = [_threshold(points, out["rounds"]) for points in zip(*sweeps)]
    else:
        emitted = [e for r in records for e in r["emitted"]]
        out["tau"] = sum(map(sum, emitted)) / max(1, sum(map(len, emitted)))
        each = [sum(e) / len(e) for e in emitted if e]
        out["tau_macro"] = sum(each) / len(each) if each else math.nan
    for label in ("plain", next((m.label for m in plan.methods if m.kind == "lookup"), "lookup")):
        if label in by_method and label != method.label:
            out[f"speedup_over_{label.split('[')[0]}"] = _speedup(by_method[label], records)
    if "plain" in by_method and method.kind != "plain" and records[0]["temperature"] == 0:
        plain = {_place(r): r["text"] for r in by_method["plain"]}
        same = [plain[_place(r)] == r["text"] for r in records if _place(r) in plain]
        out["same_text"] = sum(same) / len(same) if same else math.nan
    return out | _looping(by_method, method, records)


def _threshold(points, rounds: int) -> dict:
    """Drafts accepted and rejected a round at one threshold, and the share accepted, from (threshold, verified,
    accepted)s."""
    verified, accepted = sum(p[1] for p in points), sum(p[2] for p in points)
    rate = accepted / verified if verified else math.nan
    return {
        "threshold": points[0][0],
        "accepted": accepted / rounds,
        "rejected": (verified - accepted) / rounds,
        "rate": rate,
    }


def _place(record: dict) -> tuple:
    return record["repeat"], record["source"], record["prompt"]


def _speedup(baseline: list[dict], records: list[dict]) -> dict:
    times = {_place(r): r["decode_seconds"] / r["decode_tokens"] for r in baseline if r["decode_tokens"]}
    pairs = [(times[_place(r)], r["decode_seconds"] / r["decode_tokens"]) for r in records
             if r["decode_tokens"] and _place(r) in times]  # fmt: skip
    return metrics.speedup([a for a, _ in pairs], [b for _, b in pairs])


def _looping(by_method, method: Method, records: list[dict]) -> dict:
    """Diagnostics of looped drafting: by number of stages, the gate's quality per stage, verifications saved."""
    gates = [stage for r in records for response in r.get("gate", ()) for stage in response]
    if not gates:
        return {}
    rounds = [Round(*x) for r in records for response in r["rounds"] for x in response]
    seconds = [s for r in records for response in r["round_seconds"] for s in response]
    out: dict = {"by_stages": metrics.by_stages(rounds, seconds), "gate": {}}
    for stage in sorted({g[0] for g in gates}):
        scores, full, passed = ([x for g in gates if g[0] == stage for x in g[i]] for i in (1, 2, 3))
        out["gate"][stage] = {**metrics.gate_quality(scores, full, passed), "scores": scores, "full": full}
    single = next((r for m, r in by_method.items() if m == _without_gate(method).label), None)
    if single:
        plain = [Round(*x) for r in single for response in r["rounds"] for x in response]
        out["verifications_saved"] = metrics.verifications_saved(rounds, plain)
    return out


def _without_gate(method: Method) -> Method:
    return Method(method.kind, {k: v for k, v in method.knobs.items() if k not in ("loop_gate", "max_draft_stages")})


def write_json(value, path: str | Path) -> None:
    """As strict JSON: what isn't a number is null."""

    def strict(x):
        if isinstance(x, dict):
            return {k: strict(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [strict(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    Path(path).write_text(json.dumps(strict(value), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
