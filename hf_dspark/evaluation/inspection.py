"""What a drafter is, and whether a target's texts agree with the way it is read: `describe`, `diagnose`."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_dspark.decoding.target import FeatureTap

ROPE_BASES = (1e4, 1e5, 5e5, 1e6, 1e7)
SENSE = 0.2  # share of right first drafts from which on a drafter understands its target


def describe(drafter) -> dict:
    """Facts about a drafter, JSON-able: its kind, what it reads and drafts, how it was trained, and for every tensor
    its shape, bytes and where it came from."""
    config, sources = drafter.config, getattr(drafter, "sources", {})
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        size = tensor.numel() * tensor.element_size()
        tensors[name] = {"shape": list(tensor.shape), "bytes": size, "source": sources.get(name, "not recorded")}
    for name, source in sources.items():
        tensors.setdefault(name, {"shape": None, "bytes": 0, "source": source})
    facts = {
        "kind": type(drafter).__name__,
        "correction_head": getattr(config, "correction_head", None),
        "confidence_head": bool(config.confidence_head),
        "confidence_temperatures": config.confidence_temperatures,
        "drafts_per_stage": config.max_block,
        "sample_from_anchor": getattr(config, "sample_from_anchor", None),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "target_layer_ids": config.target_layer_ids,
        "rope": config.rope_parameters,
        "vocabulary": [config.draft_vocab_size, config.vocab_size],
        "trained_length": config.trained_length,
        "enable_thinking": config.enable_thinking,
        "template_hash": config.template_hash,
        "target_name": config.target_name,
        "speculation": drafter.speculation.to_dict(),
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "bytes": sum(t["bytes"] for t in tensors.values()),
    }
    return {**facts, "tensors": tensors}


# ---------------------------------------------------------------------- reading the drafter in other ways


@dataclass
class Reading:
    """One way of reading the drafter, named after what was `changed`.

    At each of N anchors: `accepted` [N] drafts that agree with the target's greedy text, `chances` [N, K] the
    probability the drafter gave to the text's tokens (0 where its vocabulary lacks them). `sharpness`: mean probability
    of its own drafts.
    """

    name: str
    changed: dict
    accepted: torch.Tensor
    chances: torch.Tensor
    sharpness: float

    @property
    def tau(self) -> float:
        """Tokens per round if rounds began at the anchors."""
        return 1 + self.accepted.float().mean().item()

    @property
    def first(self) -> float:
        """Share of anchors whose first draft is right."""
        return (self.accepted > 0).float().mean().item()

    @property
    def expected(self) -> float:
        """tau expected if drafts were drawn from the drafter: as `tau`, but smooth, so that small differences show."""
        return 1 + expected_drafts(self.chances).mean().item()


@dataclass
class Diagnosis:
    """What was found: `verdict` in a word, `advice` in words.

    Verdicts: `"fits"`; what has to be read otherwise, `"slots"`, `"layers"`, `"rope"`, `"head"`, `"embedding"` or
    `"correction"`, joined by `+` if there are several; `"target"`, `"undertrained"` or `"untrained"` where no reading
    makes sense of the drafter.
    `readings` holds all that was tried, as loaded first; `changes` what differs in the best one.
    """

    verdict: str
    advice: str
    readings: list[Reading] = field(default_factory=list)
    changes: dict = field(default_factory=dict)


@dataclass
class Text:
    """A prompt with the target's greedy answer, `ids` [T], the tapped layers' outputs [1, T, D], and the `anchors`
    [N]."""

    ids: torch.Tensor
    layers: dict[int, torch.Tensor]
    anchors: torch.Tensor


@torch.no_grad()
def greedy_texts(
    target, prompts: Sequence[Sequence[int]], layer_ids, new_tokens: int, block: int, most: int
) -> list[Text]:
    """The answers longer than a `block`, each with up to `most` anchors spread evenly."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=target.device)
        ids = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        if ids.shape[1] - block <= len(prompt):
            continue
        anchors = torch.arange(len(prompt), ids.shape[1] - block)
        anchors = anchors[torch.linspace(0, len(anchors) - 1, min(most, len(anchors))).round().long()]
        with FeatureTap(target, list(layer_ids)) as tap:
            target(input_ids=ids)
            texts.append(Text(ids[0], {i: tap.captured[i] for i in layer_ids}, anchors))
    return texts


@torch.no_grad()
def judge(drafter, text: Text, layer_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the drafts at the text's anchors: how many are right [N], the probability of the text's own tokens [N, K], and
    the mean probability of the drafts [N].

    Uses the decoding protocol, each anchor a row of its own: what is seen is what decoding would do.
    """
    K, anchors = drafter.config.max_block, text.anchors
    N, width = len(anchors), int(anchors.max())  # features from the last anchor on are nobody's context
    features = torch.cat([text.layers[i] for i in layer_ids], -1)[:, :width].expand(N, -1, -1).to(drafter.device)
    cache = drafter.new_cache(torch.zeros(N, dtype=torch.long))
    valid = torch.arange(width) < anchors[:, None]
    seed = drafter.extend(cache, features, text.ids[1 : width + 1].expand(N, -1), valid)
    tokens = text.ids[(anchors[:, None] + torch.arange(K + 1)).to(text.ids.device)]
    known, state = drafter.target_ids(), drafter.start(cache, tokens[:, 0], seed, None, K)
    right, chances, best = [], [], []
    for k in range(K):
        logits, _, state = drafter.step(
            cache, state, tokens[:, k]
        )  # the true tokens: a wrong draft ends its row anyway
        q, wanted = logits.softmax(-1), tokens[:, k + 1].to(logits.device).contiguous()
        place = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
        right.append(known[q.argmax(-1)] == wanted)
        chances.append(q.gather(-1, place[:, None])[:, 0] * (known[place] == wanted))
        best.append(q.amax(-1))
    accepted = torch.stack(right, 1).long().cumprod(1).sum(1)
    return accepted.cpu(), torch.stack(chances, 1).float().cpu(), torch.stack(best, 1).mean(1).float().cpu()


def variant(drafter, **changes):
    """The drafter read in another way: same weights (shared, not copied), other facts in its config; never save it.

    `head=True` / `embedding=True` take the target's instead of its own, `correction=False` leaves the correction head
    out.
    """
    bound = {id(x): x for x in drafter._bound.values()}
    memo = bound | {id(t): t for t in [*drafter.parameters(), *drafter.buffers()]}
    other = copy.deepcopy(drafter, memo)
    config = other.config
    for name, value in changes.items():
        if name == "rope_theta":
            config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
            other.rotary_emb = type(other.rotary_emb)(config).to(other.device)
        elif name in ("head", "embedding"):
            setattr(config, f"own_{name}", False)
        elif name == "correction":
            other.correction, config.confidence_head = None, False
        else:
            setattr(config, name, value)
    return other


def diagnose(
    target,
    drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int = 64,
    anchors: int = 64,
    record: dict | None = None,
) -> Diagnosis:
    """Find out whether `drafter`, bound to `target`, is read as it was trained, and if not, what is wrong.

    Drafts along the target's greedy answers to a few `prompts` (token ids), as loaded and in other ways: the other slot
    convention, layer ids one lower or higher, other RoPE bases, the target's head or embedding in place of its own,
    without the correction head. A drafter predicts the text best as it was trained, so a reading expected to get
    clearly more drafts right at the same places is the better one.

    Args:
        new_tokens: length of the answers. anchors: places per answer where drafts are made.
        record: the drafter's run record (`run.json`), if there is one: its `target`, `steps` and `examples`.

    Raises:
        ValueError: all answers are shorter than a block.
    """
    layers = target.config.get_text_config().num_hidden_layers
    base = drafter.config.target_layer_ids
    shifts = [s for s in (0, 1, -1) if all(-1 <= i + s <= layers + drafter.config.last_tap for i in base)]
    needed = sorted({i + s for i in base for s in shifts})
    block = max(drafter.config.max_block, getattr(drafter.config, "block_size", 0))
    texts = greedy_texts(target, prompts, needed, new_tokens, block, anchors)
    if not texts:
        raise ValueError(
            f"None of the {len(prompts)} answers is longer than a block of {block}, so no draft can be judged: give "
            "prompts with longer answers, or allow more tokens."
        )
    search = _Search(drafter, texts, _target_theta(target))
    search.slots_and_layers(shifts)
    search.others()
    return search.verdict(target.config.name_or_path, record or {})


def _target_theta(target) -> float | None:
    rope = getattr(target.config.get_text_config(), "rope_parameters", None)
    return rope.get("rope_theta") if isinstance(rope, dict) else None


class _Search:
    """Tries readings, keeping the best one so far as the start of the next."""

    def __init__(self, drafter, texts: list[Text], theta: float | None):
        self.drafter, self.texts, self.theta = drafter, texts, theta
        self.readings = [self.read({})]
        self.best = self.readings[0]

    def read(self, changed: dict) -> Reading:
        config = self.drafter.config
        layer_ids = changed.get("target_layer_ids", config.target_layer_ids)
        other = variant(self.drafter, **{k: v for k, v in changed.items() if k != "target_layer_ids"})
        accepted, chances, best = zip(*[judge(other, text, layer_ids) for text in self.texts], strict=True)
        return Reading(
            _name(changed, config), changed, torch.cat(accepted), torch.cat(chances), torch.cat(best).mean().item()
        )

    def slots_and_layers(self, shifts: list[int]) -> None:
        """All combinations of the two, as they may be wrong together."""
        config, changes = self.drafter.config, []
        anchor = getattr(config, "sample_from_anchor", None)
        for flip in [None] if anchor is None or config.block_size < 2 else [None, not anchor]:
            slots = {} if flip is None else {"sample_from_anchor": flip}
            changes += [
                slots | ({"target_layer_ids": [i + s for i in config.target_layer_ids]} if s else {}) for s in shifts
            ]
        self.keep([c for c in changes if c])

    def others(self) -> None:
        """One kind of change after the other, each on top of the best so far."""
        config = self.drafter.config
        bases = {*ROPE_BASES, *([self.theta] if self.theta else [])} - {config.rope_parameters.get("rope_theta")}
        if config.layouts != "heads":  # their blocks are the target's, and so are its rotary embeddings
            self.keep([{"rope_theta": b} for b in sorted(bases)])
        swaps = [{what: True} for what in ("head", "embedding") if getattr(config, f"own_{what}")]
        self.keep(swaps + ([{"correction": False}] if getattr(self.drafter, "correction", None) is not None else []))

    def keep(self, changes: list[dict]) -> None:
        tried = [self.read({**self.best.changed, **c}) for c in changes]
        self.readings += tried
        better = [r for r in tried if clearly_better(r.chances, self.best.chances)]
        if better:
            K = min(r.chances.shape[1] for r in better)
            self.best = max(better, key=lambda r: expected_drafts(r.chances[:, :K]).mean())

    def verdict(self, target_name: str, record: dict) -> Diagnosis:
        loaded, best, config = self.readings[0], self.best, self.drafter.config
        if best.changed and best.first >= SENSE:
            kinds = {"sample_from_anchor": "slots", "target_layer_ids": "layers", "rope_theta": "rope"}
            verdict = "+".join(kinds.get(k, k) for k in best.changed)
            gain = f"tau {loaded.tau:.2f} as loaded, {best.tau:.2f} so"
            advice = f"Read otherwise, the drafter predicts the target's text better ({gain}): {_advice(best.changed, config)}"
            return Diagnosis(verdict, advice, self.readings, best.changed)
        if loaded.first >= SENSE:
            advice = f"As loaded, the drafter fits: no other reading predicts the target's text better (tau {loaded.tau:.2f})."
            return Diagnosis("fits", advice, self.readings)
        sure = f"No reading helps (mean probability of its drafts {loaded.sharpness:.2f})"
        if untouched(self.drafter):
            advice = (
                f"{sure}, and all norm weights are exactly 1, as before training: train it, or get the trained file."
            )
            return Diagnosis("untrained", advice, self.readings)
        made_for = record.get("target") or config.target_name
        trained = f"its run record says {record['steps']:,} steps" if record.get("steps") is not None else ""
        trained += f" on {record['examples']:,} examples" if trained and record.get("examples") is not None else ""
        if made_for and made_for == target_name:
            advice = (
                f"{sure}, although it was trained for this very target: too little, or on texts unlike these"
                f"{f' ({trained})' if trained else ''}. Train it longer, or on more data, or try other prompts."
            )
            return Diagnosis("undertrained", advice, self.readings)
        advice = (
            f"{sure}: it was trained for another target{f' ({made_for}, by its record)' if made_for else ''}, or too "
            f"little{f' ({trained})' if trained else ''}. Load the target it was trained for, or train it longer."
        )
        return Diagnosis("target", advice, self.readings)


def untouched(drafter) -> bool:
    """Whether no norm weight has moved from where initialisation puts it, which training always does."""
    norms = [p for name, p in drafter.named_parameters() if "norm" in name]
    return bool(norms) and all(bool((p == 1).all()) for p in norms)


def expected_drafts(chances: torch.Tensor) -> torch.Tensor:
    """Drafts [N] expected to be right before the first wrong one, from the chances [N, K] of each.

    Example: chances 0.5, 0.5 give 0.5 + 0.25.
    """
    return chances.cumprod(1).sum(1)


def clearly_better(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether chances `a` [N, K] beat `b` [N, K'] of the same places by more than chance: by 3 standard errors of the
    expected drafts, and by 0.04 of a draft. Only positions that both have count."""
    K = min(a.shape[1], b.shape[1])
    gain = expected_drafts(a[:, :K]) - expected_drafts(b[:, :K])
    return len(gain) > 1 and gain.mean().item() > max(0.04, 3 * gain.std().item() / math.sqrt(len(gain)))


def _name(changed: dict, config) -> str:
    """What a reading is called in a table."""
    names = []
    for key, value in changed.items():
        if key == "sample_from_anchor":
            names.append("slot k drafts anchor + k + 1" if value else "slot k drafts anchor + k")
        elif key == "target_layer_ids":
            names.append(f"layer ids {value[0] - config.target_layer_ids[0]:+d}")
        elif key == "rope_theta":
            names.append(f"RoPE base {value:g}")
        else:
            names.append(f"the target's {key}" if value else f"no {key} head")
    return ", ".join(names) or "as loaded"


def _advice(changed: dict, config) -> str:
    said = []
    for key, value in changed.items():
        if key == "sample_from_anchor":
            said.append(f"pass sample_from_anchor={value}, as its slots are read one off")
        elif key == "target_layer_ids" and config.last_tap == 0:
            said.append("pass tap_final_norm=False, as it reads the state before the target's final norm")
        elif key == "target_layer_ids":
            off = "high" if config.target_layer_ids[0] > value[0] else "low"
            said.append(f"pass target_layer_ids={value}, as its layer ids are one too {off}")
        elif key == "rope_theta":
            now = config.rope_parameters.get("rope_theta")
            said.append(f"set rope_theta to {value:g} in rope_parameters, as {now:g} is not its base")
        elif key == "correction":
            said.append("its correction head does harm, as if those weights were another drafter's: get the file again")
        else:
            said.append(
                f"pass own_{key}=False to borrow the target's {key}, as its own isn't the one it was trained with"
            )
    return "; ".join(said) + "."
