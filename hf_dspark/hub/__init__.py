"""Published checkpoints: importers, exporters, cards."""
