"""Files of a drafter checkpoint, local or on the Hub: the config, the tensors' shapes, and only then their values."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from hf_dspark.names import check_place

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass
class Checkpoint:
    """A drafter's folder. Nothing but `config.json` is fetched or opened before `files` is asked for.

    `fetch(filename, required)` gives a local path, or `None` where the file is neither there nor required.
    """

    name: str
    fetch: Callable[..., str | None]
    config: dict = field(default_factory=dict)
    commit: str | None = None

    @classmethod
    def open(cls, repo_or_path, subfolder="", **hub) -> "Checkpoint":
        """`hub`: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

        Raises:
            OSError: no such folder or repo, no `config.json` in it, or the Hub can't be reached.
        """
        name = str(repo_or_path)
        check_place(name, subfolder)

        def fetch(filename, required=False):
            started = time.time()
            path = cached_file(
                name, filename, subfolder=subfolder, _raise_exceptions_for_missing_entries=required, **hub
            )
            if path is not None and not Path(name).is_dir():
                check_download(path, started)
            return path

        path = fetch("config.json", required=True)
        return cls(name, fetch, read_config(path), extract_commit_hash(path, None))

    @cached_property
    def _index(self) -> tuple[str, "dict[str, str] | _File"]:
        """The file that lists the tensors: of safetensors before pickles, the only one, or the map from names to
        shards."""
        for filename in WEIGHTS:
            path = self.fetch(filename)
            if path is not None and filename.endswith(".json"):
                return filename, json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
            if path is not None:
                return filename, _open(path)
        raise OSError(f"{self.name} has a config.json but no weights: it needs one of {', '.join(WEIGHTS)}.")

    @property
    def names(self) -> list[str]:
        """Names of all tensors. Of a sharded checkpoint no shard is fetched."""
        index = self._index[1]
        return list(index) if isinstance(index, dict) else list(index.names())

    def files_of(self, wanted: Callable[[str], bool]) -> dict[str, "_File"]:
        """Name of each wanted tensor -> the open file it lies in. Shards without any are not fetched."""
        filename, index = self._index
        if not isinstance(index, dict):
            return {name: index for name in index.names() if wanted(name)}
        weight_map = {name: shard for name, shard in index.items() if wanted(name)}
        shards = {shard: _open(self.fetch(shard, required=True)) for shard in sorted(set(weight_map.values()))}
        lost = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in shards[shard].names()]
        if lost:
            raise ValueError(
                f"{self.name}: {filename} promises tensors its shards don't hold: {', '.join(lost)}. Download the "
                "checkpoint again."
            )
        return {name: shards[shard] for name, shard in weight_map.items()}

    @cached_property
    def files(self) -> dict[str, "_File"]:
        """Tensor name -> the open file it lies in."""
        return self.files_of(lambda name: True)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape, read from the headers."""
        return {name: file.shape(name) for name, file in self.files.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.files[name].read(name)


def read_config(path: str | Path) -> dict:
    """A model's `config.json`.

    Raises:
        ValueError: it holds no JSON object.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} can't be read as JSON ({error}): the file is damaged; get it again.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, and a config is a JSON object: get the file again.")
    return config


def check_download(path: str, started: float) -> None:
    """Compare a file of the Hub's cache that arrived since `started` with its SHA-256, which is its blob's name.

    huggingface_hub checks sizes only. Small files are named by another hash and are not looked at.
    """
    blob = Path(path).resolve()
    if len(blob.name) != 64 or blob.stat().st_mtime < started - 2:
        return
    digest = hashlib.sha256()
    with blob.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    if digest.hexdigest() != blob.name:
        blob.unlink()
        raise OSError(
            f"{Path(path).name} arrived with the wrong checksum ({digest.hexdigest()[:12]}, expected {blob.name[:12]}), so its "
            "weights can't be trusted. It was deleted: load the drafter again to download it again."
        )


class _SafeTensors:
    def __init__(self, path):
        self.handle = safe_open(path, framework="pt")
        self.names = partial(set, self.handle.keys())

    def shape(self, name):
        return tuple(self.handle.get_slice(name).get_shape())

    def read(self, name):
        return self.handle.get_tensor(name)


class _Pickle:
    def __init__(self, path):
        self.tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.names = self.tensors.keys

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read(self, name):
        return self.tensors[name]


_File = _SafeTensors | _Pickle


def _open(path: str) -> _File:
    try:
        return _SafeTensors(path) if path.endswith(".safetensors") else _Pickle(path)
    except Exception as error:
        raise ValueError(
            f"{path} can't be read as weights ({type(error).__name__}: {error}): the file is damaged or cut short. "
            "Download it again (force_download=True)."
        ) from error
