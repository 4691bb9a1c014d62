"""Published checkpoints: importers, exporters, cards."""

from .export import export

__all__ = ["export"]
