"""The knobs of a speculative `generate()` call, shared by every drafter."""

from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches

VERIFICATIONS = ("ratio", "block", "match")
ENGINES = ("own", "stock")
TREES = (None, "ddtree", "dartree", "eagle2", "jetspec", "auto")


@dataclass
class SpeculationConfig:
    """How to draft and verify: stored in a drafter's `config.json`, or given to a call as `generate(speculation=...)`.

    Args:
        num_draft_tokens (`int`, *optional*): drafts per stage. `None` means the length the drafter was trained for; block
            drafters have no more slots than that and draft at most as many.
        confidence_threshold (`float`, defaults to 0.0): stop before the first draft whose confidence is below it. 0
            disables.
        verification (`str`, defaults to `"ratio"`): `"ratio"` (speculative sampling, arXiv 2211.17192), `"block"`
            (block verification, arXiv 2403.10444) or `"match"` (sample the target and compare). All three give the
            target's distribution; with `do_sample=False` all three are greedy decoding. `"match"` with a `seed` also
            gives the very tokens of keyed sampling without a drafter.
        seed (`int`, *optional*): key of the counter-based noise. `None` draws one from torch's generator, so
            `set_seed` rules.
        loop_gate (`float` or `"auto"`, *optional*): DLoop. Draft another stage while the latest stage's summed
            log-probability is at least this. `"auto"` uses the measured break-even point. `None` drafts one stage.
        max_draft_stages (`int`, defaults to 8): upper bound on stages per round when `loop_gate` is set.
        scheduler (`str`, *optional*): `"auto"` verifies only as many drafts as pay on this machine. `None` verifies
            all.
        copy (`int` or `"auto"`, *optional*): draft what followed the longest earlier match of the text's last tokens, instead of
            asking the drafter: up to `copy` tokens wherever two tokens or more match, or, `"auto"`, where it is expected to gain
            more tokens per second. `None` never copies.
        tree (`str`, *optional*): verify a tree of drafts instead of a chain: `"ddtree"` (arXiv 2604.12989), `"dartree"` or
            `"jetspec"` (arXiv 2606.18394) with block drafters, `"eagle2"` (arXiv 2406.16858) with recursive ones, `"auto"` a tree or
            a chain, whatever gives more tokens per second. Sampled trees under `"ratio"` have children drawn without replacement.
        tree_budget (`int`, *optional*): nodes of a stage's tree. `None` lets the measured costs decide, up to 32.
        engine (`str`, defaults to `"own"`): `"own"` is this library's loop, `"stock"` transformers' assisted loop
            (batch 1).
        trust_target (`bool`, defaults to `False`): skip the target's self-check. A target fails it whose logits depend on
            other tokens of the same forward; the text is then not plain decoding's. Belongs to a call, never stored.
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
                raise TypeError(f"SpeculationConfig got {name!r}, which is no knob of this version: {hint}")
        return super().__new__(cls)

    def __post_init__(self):
        if self.num_draft_tokens is not None and self.num_draft_tokens < 0:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} is negative, and a block can't have fewer than 0 drafts: "
                "set a positive number, 0 for plain decoding, or None for the drafter's trained length."
            )
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} is no probability: set a number in [0, 1], 0 to disable."
            )
        for name, value, allowed in (
            ("verification", self.verification, VERIFICATIONS),
            ("engine", self.engine, ENGINES),
            ("scheduler", self.scheduler, (None, "auto")),
            ("tree", self.tree, TREES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown: set one of {allowed}.")
        if isinstance(self.loop_gate, str) and self.loop_gate != "auto":
            raise ValueError(f"loop_gate={self.loop_gate!r} is unknown: set a log-probability such as -0.5, 'auto' or None.")
        if self.copy not in (None, "auto") and (type(self.copy) is not int or self.copy < 1):
            raise ValueError(f"copy={self.copy!r} is no number of tokens: set 'auto', at least 1, or None for no copies.")
        if self.tree_budget is not None and (type(self.tree_budget) is not int or self.tree_budget < 1):
            raise ValueError(f"tree_budget={self.tree_budget!r} is no number of nodes: set at least 1, or None.")
        if self.tree_budget is not None and self.tree is None:
            raise ValueError(f"tree_budget={self.tree_budget} was set without a tree: set tree, for example tree='auto'.")
        if self.tree is not None and self.engine == "stock":
            raise ValueError(
                f"tree={self.tree!r} was set with engine='stock', whose loop verifies chains only: set engine='own' or tree=None."
            )
        if self.tree is not None and self.verification == "block":
            raise ValueError("verification='block' judges chains only: set verification='ratio' or 'match' with a tree.")
        if self.max_draft_stages < 1:
            raise ValueError(f"max_draft_stages={self.max_draft_stages} drafts nothing: set at least 1.")

    @property
    def measures(self) -> bool:
        """Whether anything is decided from measured costs."""
        return self.tree is not None or "auto" in (self.scheduler, self.loop_gate, self.copy)

    def to_dict(self) -> dict:
        """What is stored with a drafter: every knob but those that belong to a call, the seed and `trust_target`."""
        return {k: v for k, v in asdict(self).items() if k not in ("seed", "trust_target")}

    @classmethod
    def from_dict(cls, values: dict | None) -> "SpeculationConfig":
        """Knobs of a newer version that this one doesn't know are dropped, as transformers' configs do; so is `trust_target`,
        as a drafter can't vouch for a target."""
        known = {f.name for f in fields(cls)} - {"trust_target"}
        return cls(**{k: v for k, v in (values or {}).items() if k in known})
