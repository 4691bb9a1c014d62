"""Training drafters: data, losses and `DrafterTrainer`."""

from .arguments import DrafterTrainingArguments
from .callbacks import DecodeCheck, plot_history
from .data import BlockCollator, ChatDataset, template_hash
from .initialization import init_from_drafter, init_from_target, new_drafter, new_eagle3
from .losses import Objective
from .trainer import DrafterGroup, DrafterTrainer

__all__ = [
    "BlockCollator",
    "ChatDataset",
    "DecodeCheck",
    "DrafterGroup",
    "DrafterTrainer",
    "DrafterTrainingArguments",
    "Objective",
    "init_from_drafter",
    "init_from_target",
    "new_drafter",
    "new_eagle3",
    "plot_history",
    "template_hash",
]
