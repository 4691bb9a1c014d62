"""The run record: what a measurement was made with, so that somebody else can make it again."""

import hashlib
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hf_dspark.scheduling.cost import machine_key


def environment(target, drafter=None) -> dict:
    """Versions, machine, threads, dtype, and hashes of both models' configs and of the drafter's own weights."""
    record = {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "transformers")},
        },
        **machine_key(target.config.name_or_path or type(target).__name__, target.dtype, str(target.device)),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "device": str(target.device),
        "attention": target.config._attn_implementation,
        "target_config": digest(target.config.to_dict()),
        "target_revision": getattr(target.config, "_commit_hash", None),
    }
    # Not imported: this library's version lives in its public names, which nothing below the commands may read.
    record["versions"]["hf_dspark"] = getattr(sys.modules.get("hf_dspark"), "__version__", None)
    if drafter is not None:
        config = drafter.config
        record |= {
            "drafter_config": digest(config.to_dict()),
            "drafter_weights": weights_hash(drafter),
            "drafter_revision": getattr(config, "_commit_hash", None),
            "drafter_knobs": drafter.speculation.to_dict(),
        }
    return record


def digest(value) -> str:
    """16 hex digits for anything JSON can write (what it can't is written as its `str`)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def file_hash(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def weights_hash(model) -> str:
    """Of the model's own tensors by name, whatever the file they came from was called."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if (
        info.exists()
    ) else []  # fmt: skip
    return names[0] if names else platform.processor() or platform.machine()
