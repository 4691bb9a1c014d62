"""Training arguments of drafters, on top of transformers' own."""

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

from .accepted import check_arguments
from .losses import Objective


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what is particular to drafters; see [`Objective`] for the loss of blocks.

    Recursive drafters are trained by training-time test whatever the weights say: forward KL to the target's
    distribution (its soft cross entropy up to a constant), draft k weighing step_decay^k. By default that is 0.8 for
    EAGLE-3 (arXiv 2503.01840, section 3.2) and 0.6 for multi-token prediction (FastMTP, arXiv 2509.18362).

    `loop_exposure=N` turns on loop-aware training from `loop_start` (a share of all steps) on: chains of S stages with
    S - 1 ~ U{1..N}, one S per optimizer step, half the loss on the first and half on the last stage (DLoop, section 4).
    """

    num_anchors: int = field(default=512, metadata={"help": "Blocks drawn per document."})
    pack: bool = field(default=False, metadata={"help": "Put several documents into a row of max_length tokens."})
    max_length: int = field(default=4096, metadata={"help": "Tokens of a packed row."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy of the true tokens."})
    distill_weight: float = field(default=0.9, metadata={"help": "Weight of KL or TV to the target's distribution."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's loss."})
    kl_until: float = field(
        default=0.75, metadata={"help": "Share of the run over which KL turns into TV; 0: TV at once."}
    )
    position_decay: float | None = field(default=4.0, metadata={"help": "Draft k weighs exp(-k / position_decay)."})
    step_decay: float | None = field(
        default=None, metadata={"help": "Recursive drafters: draft k weighs step_decay ** k."}
    )
    base_until: float = field(
        default=1.0, metadata={"help": "For Domino: share of the run over which the base's loss fades."}
    )
    detach_confidence: bool = field(default=True, metadata={"help": "The confidence loss trains its head only."})
    loop_exposure: int = field(default=0, metadata={"help": "N of loop-aware training, 3 is typical, 0 is off."})
    loop_start: float = field(default=0.0, metadata={"help": "Share of the run before loop-aware training begins."})
    detach_chain: bool = field(default=False, metadata={"help": "No gradient from later stages into earlier ones."})
    loss_chunk: int = field(default=2048, metadata={"help": "Drafts whose logits exist at once."})
    feature_cache: str | None = field(
        default=None, metadata={"help": "Folder for the target's outputs of every example."}
    )
    feature_cache_gb: float = field(default=20.0, metadata={"help": "The cache stops growing there."})

    skip_estimate: bool = field(default=False, metadata={"help": "Don't measure a step to foretell memory and time."})

    def __post_init__(self):
        check_arguments(vars(self))  # before transformers fills in what follows from other fields
        super().__post_init__()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # there is nothing to pin for
        self.remove_unused_columns = False  # rows carry ids that key their anchors
        # Heads are used outside the wrapped forward, where a search for unused parameters would miss them.
        self.ddp_find_unused_parameters = False
        self.label_names = ["labels"]

    def objective(self, drafter) -> Objective:
        """What is minimised for `drafter`, by its family."""
        if drafter.config.recursive:
            decay = drafter.config.step_decay if self.step_decay is None else self.step_decay
            return Objective(ce=0.0, distill=1.0, confidence=0.0, kl_until=math.inf, decay=-1 / math.log(decay))
        return Objective(
            ce=self.ce_weight,
            distill=self.distill_weight,
            confidence=self.confidence_weight,
            kl_until=self.kl_until,
            decay=self.position_decay,
            detach_confidence=self.detach_confidence,
            base_until=self.base_until if drafter.config.correction_head == "domino" else 0.0,
        )
