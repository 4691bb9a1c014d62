"""Published checkpoints: importers, exporters, cards."""

from .card import write_card
from .export import borrow, export

__all__ = ["borrow", "export", "write_card"]
