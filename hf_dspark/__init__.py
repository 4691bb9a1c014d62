"""Exact speculative decoding for Hugging Face `generate()`: load, train, calibrate and publish drafters."""

from pathlib import Path as _Path

# A checkout keeps hf_dspark.modeling in modeling/ beside this folder, an installed wheel in here.
_root = _Path(__file__).resolve().parent.parent
if (_root / "modeling" / "__init__.py").exists() and not (_root / "hf_dspark" / "modeling").exists():
    __path__.append(str(_root))

from .auto import AutoDrafter  # noqa: E402
from .decoding.engine import EngineRequest, EngineResult, SpeculativeEngine  # noqa: E402
from .decoding.hook import attach, install, uninstall  # noqa: E402
from .decoding.outputs import SpeculationStats  # noqa: E402
from .drafting.copy_drafter import CopyDrafter  # noqa: E402
from .drafting.copying import CopyMemory  # noqa: E402
from .modeling import (  # noqa: E402
    AssistantConfig,
    AssistantDrafter,
    DSparkConfig,
    DSparkDrafter,
    Eagle3Config,
    Eagle3Drafter,
    MTPConfig,
    MTPDrafter,
    SpeculationConfig,
)
from .verification.probabilities import keyed_processors  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "AssistantConfig",
    "AssistantDrafter",
    "AutoDrafter",
    "CopyDrafter",
    "CopyMemory",
    "DSparkConfig",
    "DSparkDrafter",
    "Eagle3Config",
    "Eagle3Drafter",
    "EngineRequest",
    "EngineResult",
    "MTPConfig",
    "MTPDrafter",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeEngine",
    "__version__",
    "attach",
    "install",
    "keyed_processors",
    "uninstall",
]

install()
