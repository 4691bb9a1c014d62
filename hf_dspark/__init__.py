"""Exact speculative decoding for Hugging Face `generate()`: load, train, calibrate and publish drafters."""

from pathlib import Path as _Path

# In a checkout the drafters live in modeling/ beside this folder; an installed wheel has them in here. Same import name.
_root = _Path(__file__).resolve().parent.parent
if (_root / "modeling" / "__init__.py").exists() and not (_root / "hf_dspark" / "modeling").exists():
    __path__.append(str(_root))

__version__ = "0.1.0"

__all__ = ["__version__"]
