"""Training drafters: data, losses and `DrafterTrainer`."""

from .arguments import DrafterTrainingArguments
from .data import BlockCollator, ChatDataset, template_hash
from .initialization import init_from_drafter, init_from_target, new_drafter
from .losses import Objective
from .trainer import DrafterGroup, DrafterTrainer

__all__ = [
    "BlockCollator",
    "ChatDataset",
    "DrafterGroup",
    "DrafterTrainer",
    "DrafterTrainingArguments",
    "Objective",
    "init_from_drafter",
    "init_from_target",
    "new_drafter",
    "template_hash",
]
