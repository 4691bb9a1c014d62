"""Exact speculative decoding for Hugging Face `generate()`: load, train, calibrate and publish drafters."""

from pathlib import Path as _Path

# A checkout keeps hf_dspark.modeling in modeling/ beside this folder, an installed wheel in here.
_root = _Path(__file__).resolve().parent.parent
if (_root / "modeling" / "__init__.py").exists() and not (_root / "hf_dspark" / "modeling").exists():
    __path__.append(str(_root))

__version__ = "0.1.0"

__all__ = ["__version__"]
