"""A drafter's model card, filled from what its folder and its evaluation recorded."""

import hashlib
import json
import math
import re
from pathlib import Path

import yaml

from hf_dspark.modeling import AssistantConfig, DSparkConfig, Eagle3Config, MTPConfig
from hf_dspark.names import is_hub_id

from .checkpoint import Checkpoint

BEGIN = "<!-- hf-dspark card: from here to the end mark is rewritten by `hf-dspark card`; text outside is yours -->"
END = "<!-- hf-dspark card: end -->"
WEIGHTS = "<!-- weights: {} -->"
STALE = "> **Out of date.** This card was written for other weights than those beside it: run `hf-dspark card` again.\n"
FRONT = re.compile(r"\A---\n(.*?)\n---\n?", re.DOTALL)
MEASURED = re.compile(r"^## Measured\n.*?(?=^## |^<!-- hf-dspark card: end)", re.DOTALL | re.MULTILINE)
LOADED = re.compile(r'AutoDrafter\.from_pretrained\("([^"/]+/[^"/]+)"')
UNKNOWN = "not recorded"
# By model type, and not by transformers' AutoConfig, which doesn't know ours in a command that imports as little as it can.
FAMILIES = {cls.model_type: cls for cls in (AssistantConfig, DSparkConfig, Eagle3Config, MTPConfig)}


def write_card(
    folder, evaluations=(), license: str | None = None, base_model: str | None = None, repo_id: str | None = None
) -> Path:
    """Write `README.md` of a drafter's folder; text outside the two marks and metadata a human set survive.

    Args:
        folder (`str` or `PathLike`): a drafter in our own format. Its `run.json`, if there, may hold `target`, `license`,
            `language`, `datasets` (Hub ids), `data` (a sentence), `examples`, `tokens`, `steps`, `hours`, `machine`, `command`,
            `versions` (a mapping) and `limits` (a list of sentences); a `trainer_state.json` fills in steps and hours.
        evaluations (sequence of paths): results of `hf-dspark eval`. Without any, an earlier card's numbers stay, unless the
            weights are others now.
        license (`str`, *optional*): an SPDX id; wins over the record's and the header's.
        base_model (`str`, *optional*): the target's id on the Hub; wins likewise. A recorded target that is a local path is
            left out of the card.
        repo_id (`str`, *optional*): the drafter's id on the Hub, for the lines that load it. Defaults to the one that an
            earlier card names, else to a placeholder.

    Returns:
        `Path`: the card.

    Raises:
        ValueError: the folder holds a checkpoint of another format, or a file of an evaluation can't be read.
    """
    folder = Path(folder)
    checkpoint = Checkpoint.open(folder)
    config, record = checkpoint.config, read_record(folder)
    if not config.get("model_type", "").startswith("hf_"):
        raise ValueError(
            f"{folder} holds a checkpoint of another format, whose card is its publisher's: convert it first with `hf-dspark "
            "convert SRC DST --to own`."
        )
    results = [read_results(path) for path in evaluations]
    parameters = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    path = folder / "README.md"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    recorded = (known_target(path), record.get("target"), config.get("target_name"))
    target = base_model or next(filter(is_hub_id, recorded), None)
    facts = describe(config, record, target, parameters, size)
    repo_id = repo_id or known_repo(old) or f"OWNER/{folder.name}"
    name = repo_id.split("/")[1]
    numbers = measured(results) if results else kept(old, weights_hash(folder))
    mark = WEIGHTS.format(weights_hash(folder))
    parts = [head(name, facts), usage(facts, repo_id), numbers, made(record, facts), limits(record, facts), mark]
    given = {key: value for key, value in (("license", license), ("base_model", target)) if value}
    path.write_text(merge(old, metadata(facts, record), "\n\n".join(parts), given), encoding="utf-8")
    return path


def kept(card: str, weights: str) -> str:
    """What an earlier card measured; of other weights only that they were others."""
    found = MEASURED.search(card)
    if found is None or "|" not in found[0]:
        return measured([])
    mark = re.search(WEIGHTS.format(r"(\w+)"), card)
    if mark and mark[1] != weights:
        return (
            "## Measured\n\nNothing since the weights were changed: run `hf-dspark eval`, then `hf-dspark card --eval`."
        )
    return found[0].strip()


def mark_stale(folder) -> bool:
    """Say in a card of ours, if `folder` has one, that it was written for other weights; whether it was."""
    path = Path(folder) / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if BEGIN not in text or WEIGHTS.format(weights_hash(Path(folder))) in text:
        return False
    if STALE not in text:
        path.write_text(text.replace(BEGIN, f"{BEGIN}\n{STALE}\n"), encoding="utf-8")
    return True


def weights_hash(folder: Path) -> str:
    """16 hex digits of the folder's weight files."""
    sha = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                sha.update(chunk)
    return sha.hexdigest()[:16]


def known_target(path: Path) -> str | None:
    """The base model that a card names, if that is an id on the Hub."""
    front = FRONT.match(path.read_text(encoding="utf-8")) if path.exists() else None
    name = ((yaml.safe_load(front[1]) if front else None) or {}).get("base_model")
    return name if isinstance(name, str) and is_hub_id(name) else None


def known_repo(card: str) -> str | None:
    """The drafter's own id, from the lines of an earlier card that load it."""
    found = LOADED.search(card)
    return found[1] if found and not found[1].startswith("OWNER/") else None


def read_results(path) -> dict:
    """Results of `hf-dspark eval`.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        if {"run", "results"} <= results.keys():
            return results
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{path} holds no results of `hf-dspark eval`: give the file that its --out named.")


def read_record(folder: Path) -> dict:
    """`run.json`, completed from the trainer's state."""
    path, state_path = folder / "run.json", folder / "trainer_state.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if state_path.exists():
        state = json.loads(state_path.read_text(encoding="utf-8"))
        record.setdefault("steps", state.get("global_step"))
        seconds = [entry["train_runtime"] for entry in state.get("log_history", ()) if "train_runtime" in entry]
        if seconds:
            record.setdefault("hours", sum(seconds) / 3600)
    return record


def describe(config: dict, record: dict, target: str | None, parameters: int, size: int) -> dict:
    """The few facts every part of the card speaks about."""
    known = FAMILIES[config["model_type"]](**config)
    head = getattr(known, "correction_head", "none")
    thinking = config.get("enable_thinking")
    return {
        "family": getattr(known, "family", config["model_type"]),
        "head": head,
        "target": target,
        "drafts": known.max_block,
        "parameters": parameters,
        "size": size,
        "layers": config.get("num_hidden_layers"),
        "vocabulary": (config.get("draft_vocab_size"), config.get("vocab_size")),
        "confidence": bool(config.get("confidence_head")),
        # all of them 1: calibration found too few labels and changed nothing
        "calibrated": any(t != 1 for t in config.get("confidence_temperatures") or ()),
        "thinking": UNKNOWN if thinking is None else "on" if thinking else "off",
        "template": config.get("template_hash"),
        "trained_length": config.get("trained_length"),
        "borrows": [{"embed_tokens": "embedding", "lm_head": "head"}[name] for name in known.borrows],
    }


def head(name: str, facts: dict) -> str:
    target = facts["target"] or "its target"
    link = f"[{target}](https://huggingface.co/{target})" if facts["target"] else target
    length = f"{facts['trained_length']} tokens" if facts["trained_length"] else UNKNOWN
    article = "An" if facts["family"][0] in "AEM" else "A"
    return f"""# {name}

{article} {facts["family"]} drafter for {link}. It proposes up to {facts["drafts"]} tokens per stage, which the target \
verifies. The generated text follows the target's own distribution.

> **Scope.** Drafts for {target} only (other models and fine-tunes accept less). Thinking in the training data: \
{facts["thinking"]}. Longest training sequence: {length}. In float32 greedy output equals plain decoding, in bfloat16 up to \
kernel rounding."""


def usage(facts: dict, repo_id: str) -> str:
    target = facts["target"] or "TARGET"
    return f"""## Use

```bash
pip install hf-dspark
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_dspark import AutoDrafter

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{target}")
drafter = AutoDrafter.from_pretrained("{repo_id}", target=target, revision="main")  # pin a commit in production
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)[0]))
```"""


def measured(results: list[dict]) -> str:
    """One table per evaluation: tokens per round at each temperature and speed against plain decoding, with the machine."""
    if not results:
        return "## Measured\n\nNothing yet: `hf-dspark eval` makes the numbers, and `hf-dspark card --eval` puts them here."
    return "## Measured\n\n" + "\n\n".join(_table(result) for result in results)


def _table(result):
    run, rows = result["run"], []
    environment, plan = run.get("environment", {}), run.get("plan", {})
    temperatures = plan.get("temperatures") or sorted({r["temperature"] for r in result["results"]})
    methods = [m for m in dict.fromkeys(r["method"] for r in result["results"]) if m != "plain"]
    found = {(r["set"], r["method"], r["temperature"]): r for r in result["results"]}
    for source in dict.fromkeys(r["set"] for r in result["results"]):
        for method in methods:
            cells = [found.get((source, method, t), {}) for t in temperatures]
            if any(cells):
                row = [source, method]
                row += [
                    text
                    for cell in cells
                    for text in (_number(cell.get("tau")), _speed(cell.get("speedup_over_plain")))
                ]
                rows.append(row)
    header = ["prompts", "method"] + [text for t in temperatures for text in (f"tau, T={t:g}", f"x plain, T={t:g}")]
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    sets = ", ".join(f"{count} of {name}" for name, count in (plan.get("prompts") or {}).get("sets", {}).items())
    versions = ", ".join(f"{name} {v}" for name, v in (environment.get("versions") or {}).items() if v)
    where = (
        f"{environment.get('cpu') or environment.get('machine') or UNKNOWN}, {environment.get('threads', '?')} threads"
    )
    if str(environment.get("device", "")).startswith("cuda"):
        where = environment.get("machine", UNKNOWN)
    thinking = {None: "the template's default", True: "on", False: "off"}[plan.get("thinking")]
    note = f"Measured {result.get('date', '')} on {where}, {environment.get('dtype', '?')}; prompts: {sets or UNKNOWN}, up to "
    note += f"{plan.get('max_new_tokens', '?')} new tokens, batch 1, thinking {thinking}; {versions}."
    meaning = (
        "tau: tokens per target forward, bonus token included. x plain: wall-clock ratio to plain decoding of the same "
    )
    meaning += "prompts, prefill left out, with its 95 % interval. own: this drafter in hf_dspark's loop; stock: in "
    meaning += "transformers' loop; lookup: transformers' prompt lookup, without a drafter. In brackets: the knobs set."
    return f"{table}\n\n{meaning}\n\n{note}"


def _number(x) -> str:
    return "-" if x is None else f"{x:.2f}"


def _speed(speedup) -> str:
    return f"{speedup['ratio']:.2f} ({speedup['low']:.2f}-{speedup['high']:.2f})" if speedup else "-"


def made(record: dict, facts: dict) -> str:
    drafted, whole = facts["vocabulary"]
    correction = {"none": "none", "domino": "Domino's GRU"}.get(facts["head"], f"{facts['head']} (sequential)")
    rows = {
        "Data": record.get("data", UNKNOWN),
        "Examples, tokens": f"{_count(record.get('examples'))}, {_count(record.get('tokens'))}",
        "Steps, hours": f"{_count(record.get('steps'))}, {_number(record['hours']) if record.get('hours') else UNKNOWN}",
        "Machine": record.get("machine", UNKNOWN),
        "Size": f"{facts['parameters'] / 1e6:.1f} M parameters, {facts['size'] / 1e6:.1f} MB, {facts['layers']} layers",
        "Borrowed from the target": " and ".join(facts["borrows"]) or "nothing",
        "Drafted vocabulary": f"{_count(drafted)} of {_count(whole)} tokens",
        "Correction head": correction,
        "Confidence head": f"yes, {'calibrated' if facts['calibrated'] else 'not calibrated'}"
        if facts["confidence"]
        else "no",
        "Thinking": facts["thinking"],
        "Chat template": f"hash {facts['template']}" if facts["template"] else UNKNOWN,
    }
    if record.get("command"):
        rows["Command"] = f"`{record['command']}`"
    if record.get("versions"):
        rows["Versions"] = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "## How it was made\n\n| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _count(x) -> str:
    return UNKNOWN if x is None else f"{x:,}"


def limits(record: dict, facts: dict) -> str:
    lines = [
        "Speed depends on the machine, the batch and the text; `hf-dspark eval` measures yours.",
        "Text unlike the training data is accepted less, and so is sampling at high temperature. Neither changes the output.",
    ]
    if facts["thinking"] != UNKNOWN:
        other = "off" if facts["thinking"] == "on" else "on"
        lines.append(
            f"Prompts with thinking {other} are accepted less: it was trained with thinking {facts['thinking']}."
        )
    if facts["trained_length"]:
        lines.append(f"Past {facts['trained_length']} tokens it drafts outside what it was trained on.")
    lines += record.get("limits", [])
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def metadata(facts: dict, record: dict) -> dict:
    """The YAML header's fields, without those nobody recorded."""
    fields = {
        "license": record.get("license"),
        "base_model": facts["target"],
        "library_name": "hf-dspark",
        "pipeline_tag": "text-generation",
        "language": record.get("language"),
        "datasets": record.get("datasets"),
        "tags": ["speculative-decoding", "drafter", facts["family"].lower()],
    }
    return {key: value for key, value in fields.items() if value}


def merge(old: str, fields: dict, body: str, given: dict | None = None) -> str:
    """`old` with the part between the marks replaced (put first where there are none) and `fields` added to its header.

    What the header says already stays, but for what was `given` now.
    """
    front = FRONT.match(old)
    theirs = (yaml.safe_load(front[1]) if front else None) or {}
    rest = old[front.end() :] if front else old
    if isinstance(theirs.get("base_model"), str) and not is_hub_id(theirs["base_model"]):
        del theirs["base_model"]  # a local path, by an earlier version
    fields = {**fields, **{key: value for key, value in theirs.items() if key != "tags"}, **(given or {})}
    fields["tags"] = list(dict.fromkeys([*(theirs.get("tags") or ()), *fields.get("tags", ())]))
    begin, end = rest.find(BEGIN), rest.find(END)
    if begin >= 0 and end > begin:
        before, after = rest[:begin], rest[end + len(END) :]
    else:
        before, after = "", f"\n\n{rest.strip()}\n" if rest.strip() else "\n"
    header = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n{before or chr(10)}{BEGIN}\n{body}\n{END}{after}"
