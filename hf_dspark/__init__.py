"""Exact speculative decoding for Hugging Face `generate()`: load, train, calibrate and publish drafters."""

import sys
from importlib import import_module as _import_module
from importlib.util import spec_from_file_location as _spec_from_file_location
from pathlib import Path as _Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from .auto import AutoDrafter
    from .decoding.engine import EngineRequest, EngineResult, SpeculativeEngine
    from .decoding.hook import attach, install, uninstall
    from .decoding.outputs import SpeculationStats
    from .drafting.copy_drafter import CopyDrafter
    from .drafting.copying import CopyMemory
    from .modeling import (
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
    from .verification.probabilities import keyed_processors

_MODULES = {
    "auto": ["AutoDrafter"],
    "decoding.engine": ["EngineRequest", "EngineResult", "SpeculativeEngine"],
    "decoding.hook": ["attach", "install", "uninstall"],
    "decoding.outputs": ["SpeculationStats"],
    "drafting.copy_drafter": ["CopyDrafter"],
    "drafting.copying": ["CopyMemory"],
    "modeling": [
        "AssistantConfig",
        "AssistantDrafter",
        "DSparkConfig",
        "DSparkDrafter",
        "Eagle3Config",
        "Eagle3Drafter",
        "MTPConfig",
        "MTPDrafter",
        "SpeculationConfig",
    ],
    "verification.probabilities": ["keyed_processors"],
}


class _Checkout:
    """Finds hf_dspark.modeling in a checkout, which keeps it in modeling/ beside this folder; a wheel has it in
    here."""

    folder = _Path(__file__).resolve().parent.parent / "modeling"

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == f"{__name__}.modeling":
            return _spec_from_file_location(
                name, cls.folder / "__init__.py", submodule_search_locations=[str(cls.folder)]
            )
        return None


if (_Checkout.folder / "__init__.py").exists() and not _Path(__file__).with_name("modeling").exists():
    sys.meta_path.insert(0, _Checkout)  # before an editable install of another checkout


def _is_command() -> bool:
    """Whether this process is the `hf-dspark` command, whose help must not wait seconds for torch and transformers."""
    return _Path(sys.argv[0]).stem == "hf-dspark" or sys.orig_argv[1:3] == ["-m", f"{__name__}.cli.main"]


def _complete() -> None:
    """Import every public name, register our models with transformers' Auto classes and install the hook.

    Importing this package does all of that: who loads a drafter through `AutoModel`, or as remote code, touches no name
    of ours that could do it later.
    """
    for module, names in _MODULES.items():
        found = _import_module(f"{__name__}.{module}")
        globals().update({name: getattr(found, name) for name in names})
    globals()["install"]()


def __getattr__(name):
    if name in __all__:
        _complete()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not _is_command():
    _complete()
