"""The knobs of a speculative `generate()` call, shared by every drafter."""

from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real

VERIFICATIONS = ("ratio", "block", "match")
ENGINES = ("own", "stock")
SCHEDULERS = (None, "auto", "algorithm1")
TREES = (None, "ddtree", "dartree", "eagle2", "jetspec", "auto")


def _check_whole(name, value, lowest, remedy):
    """Refuse what is no whole number of at least `lowest`; None passes where it is the default."""
    default = SpeculationConfig.__dataclass_fields__[name].default
    if value is None and default is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(
            f"{name}={value!r} is a {type(value).__name__}, and only whole numbers make sense: set {remedy}."
        )
    if lowest is not None and value < lowest:
        kind = "negative" if value < 0 else "too small"
        raise ValueError(f"{name}={value} is {kind}, and the least is {lowest}: set {remedy}.")


def _check_number(name, value, lowest, highest, remedy):
    """Refuse what is no number, nan, or outside [lowest, highest]."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise ValueError(f"{name}={value!r} is no number: set {remedy}.")
    if lowest is not None and not lowest <= value <= highest:
        raise ValueError(f"{name}={value!r} is outside [{lowest:g}, {highest:g}]: set {remedy}.")


@dataclass
class SpeculationConfig:
    """How to draft and verify: stored in a drafter's `config.json`, or given to a call as `generate(speculation=...)`.

    Args:
        num_draft_tokens (`int`, *optional*): drafts per stage. `None` means the length the drafter was trained for;
            block drafters have no more slots than that and draft at most as many.
        confidence_threshold (`float`, defaults to 0.0): stop before the first draft whose confidence is below it. 0
            disables.
        verification (`str`, defaults to `"ratio"`): `"ratio"` (speculative sampling, arXiv 2211.17192), `"block"`
            (block verification, arXiv 2403.10444) or `"match"` (sample the target and compare). All three give the
            target's distribution; with `do_sample=False` all three are greedy decoding. `"match"` with a `seed` also
            gives the same tokens as keyed sampling without a drafter.
        seed (`int`, *optional*): key of the counter-based noise. `None` draws one from torch's generator, so
            that transformers' `set_seed` decides.
        loop_gate (`float` or `"auto"`, *optional*): DLoop. Draft another stage while the latest stage's summed
            log-probability is at least this. `"auto"` uses the measured break-even point. `None` drafts one stage.
        max_draft_stages (`int`, defaults to 8): upper bound on stages per round when `loop_gate` is set.
        scheduler (`str`, *optional*): `"auto"` verifies only as many drafts as pay on this machine, `"algorithm1"`
            those that DSpark's Algorithm 1 admits by measured costs (arXiv 2607.05147). `None` verifies all.
        copy (`int` or `"auto"`, *optional*): draft what followed the longest earlier match of the text's last tokens,
            instead of asking the drafter: up to `copy` tokens wherever two tokens or more match, or, `"auto"`, where it
            is expected to gain more tokens per second, from one matching token on. `None` never copies. Copies have no
            confidence, so `confidence_threshold` doesn't cut them.
        tree (`str`, *optional*): verify a tree of drafts instead of a chain: `"ddtree"` (arXiv 2604.12989), `"dartree"`
            or `"jetspec"` (arXiv 2606.18394) with block drafters, `"eagle2"` (arXiv 2406.16858) with recursive ones,
            `"auto"` a tree or a chain, whatever gives more tokens per second. Sampled trees under `"ratio"` have
            children drawn without replacement.
        tree_budget (`int`, *optional*): nodes of a stage's tree. `None` lets the measured costs decide, up to 32.
        engine (`str`, defaults to `"own"`): `"own"` is this library's loop, `"stock"` transformers' assisted loop
            (batch 1).
        trust_target (`bool`, defaults to `False`): skip the target's self-check. A target fails it whose logits depend
            on other tokens of the same forward; the text may then differ from plain decoding's. Belongs to a call,
            never stored.

    Raises:
        TypeError: a field that doesn't exist.
        ValueError: a value of the wrong kind or range, or fields that exclude each other.
    """

    num_draft_tokens: int | None = None
    confidence_threshold: float = 0.0
    verification: str = "ratio"
    seed: int | None = None
    loop_gate: float | str | None = None
    max_draft_stages: int = 8
    scheduler: str | None = None
    copy: int | str | None = None
    tree: str | None = None
    tree_budget: int | None = None
    engine: str = "own"
    trust_target: bool = False

    def __new__(cls, *args, **knobs):
        known = [f.name for f in fields(cls)]
        for name in knobs:
            if name not in known:
                close = get_close_matches(name, known, 3, 0.5)
                hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(known)}."
                raise TypeError(f"SpeculationConfig got {name!r}, which is no setting of this version: {hint}")
        return super().__new__(cls)

    def __post_init__(self):
        for name, lowest, remedy in (
            (
                "num_draft_tokens",
                0,
                "a positive number, 0 for plain decoding, or None for the drafter's trained length",
            ),
            ("max_draft_stages", 1, "at least 1"),
            ("tree_budget", 1, "a number of nodes, or None to let the measured costs decide"),
            ("seed", None, "a whole number, or None to follow set_seed"),
        ):
            _check_whole(name, getattr(self, name), lowest, remedy)
        _check_number(
            "confidence_threshold", self.confidence_threshold, 0.0, 1.0, "a probability in [0, 1], 0 to disable"
        )
        if self.loop_gate not in (None, "auto"):
            _check_number("loop_gate", self.loop_gate, None, None, "a log-probability such as -0.5, 'auto' or None")
        for name, value, allowed in (
            ("verification", self.verification, VERIFICATIONS),
            ("engine", self.engine, ENGINES),
            ("scheduler", self.scheduler, SCHEDULERS),
            ("tree", self.tree, TREES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown: set one of {allowed}.")
        if self.copy not in (None, "auto"):
            _check_whole("copy", self.copy, 1, "'auto', a number of tokens, or None for no copies")
        if self.tree_budget is not None and self.tree is None:
            raise ValueError(
                f"tree_budget={self.tree_budget} was set without a tree: set tree, for example tree='auto'."
            )
        if self.tree is not None and self.engine == "stock":
            raise ValueError(
                f"tree={self.tree!r} was set with engine='stock', whose loop verifies chains only: set engine='own' or "
                "tree=None."
            )
        if self.tree is not None and self.verification == "block":
            raise ValueError(
                "verification='block' judges chains only: set verification='ratio' or 'match' with a tree."
            )

    @property
    def measures(self) -> bool:
        """Whether anything is decided from measured costs."""
        return self.tree is not None or self.scheduler is not None or "auto" in (self.loop_gate, self.copy)

    def to_dict(self) -> dict:
        """What is stored with a drafter: every knob but those that belong to a call, the seed and `trust_target`."""
        return {k: v for k, v in asdict(self).items() if k not in ("seed", "trust_target")}

    @classmethod
    def from_dict(cls, values: dict | None) -> "SpeculationConfig":
        """Knobs of a newer version that this one doesn't know are dropped, as transformers' configs do; so is
        `trust_target`, as a drafter can't vouch for a target."""
        known = {f.name for f in fields(cls)} - {"trust_target"}
        return cls(**{k: v for k, v in (values or {}).items() if k in known})
