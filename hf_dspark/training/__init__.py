"""Training drafters: data, losses and `DrafterTrainer`."""

from .arguments import DrafterTrainingArguments
from .callbacks import DecodeCheck, plot_history
from .data import BlockCollator, ChatDataset, template_hash
from .heads import init_mtp, new_mtp
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
    "init_mtp",
    "new_drafter",
    "new_eagle3",
    "new_mtp",
    "plot_history",
    "template_hash",
]
