"""Fixtures made by running the public reference implementations: tiny targets, drafters in their published format,
outputs.

`load_fixture(name)` gives the target (one object per session, never change it), a fresh drafter bound to it,
`expected.json` and the recorded tensors. Layer ids, block conventions and field meanings are those of the format each
fixture comes from.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_dspark.auto import AutoDrafter

ROOT = Path(__file__).parent / "fixtures"
DEEPSPEC = ["deepspec-dflash", "deepspec-dspark-vanilla", "deepspec-dspark-rnn", "deepspec-dspark-gemma4-keqv"]
SPECFORGE = ["specforge-dspark-vanilla", "specforge-domino-shift"]
SPECULATORS = ["speculators-dflash-reduced", "speculators-dspark-gated-bonus", "speculators-dspark-vanilla-anchor"]
BLOCKS = [*DEEPSPEC, "zlab-dflash-b8", *SPECFORGE, *SPECULATORS]
EAGLE3 = ["deepspec-eagle3", "safeailab-eagle3-llama", "speculators-eagle3-llama", "speculators-eagle3-v31"]
LOOPED = ["dloop-dflash-s2", "dloop-dspark-vanilla-s2", "dloop-dspark-rnn-s3"]


class Fixture(NamedTuple):
    target: torch.nn.Module
    drafter: torch.nn.Module
    expected: dict
    tensors: dict[str, torch.Tensor]


def expected_of(name: str) -> dict:
    return json.loads((ROOT / name / "expected.json").read_text())


def models_of(name: str) -> str:
    """Name of the fixture that holds the models; the looped ones share another's."""
    return expected_of(name).get("drafter_of", name)


def drafter_folder(name: str) -> Path:
    return ROOT / models_of(name) / "drafter"


@cache
def load_target(name: str):
    return AutoModelForCausalLM.from_pretrained(ROOT / models_of(name) / "target", dtype=torch.float32).eval()


@cache
def load_tensors(name: str) -> dict[str, torch.Tensor]:
    path = ROOT / name / "expected.safetensors"
    return load_file(path) if path.exists() else {}


def load_drafter(name: str, **kwargs):
    return AutoDrafter.from_pretrained(drafter_folder(name), target=load_target(models_of(name)), **kwargs).eval()


def load_fixture(name: str) -> Fixture:
    return Fixture(load_target(models_of(name)), load_drafter(name), expected_of(name), load_tensors(name))


@torch.no_grad()
def target_features(target, ids: list[int] | torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
    """Tapped states [1, T, m*D] of a sequence: 0-based outputs of decoder layers, -1 the embeddings."""
    states = target(torch.as_tensor(ids).view(1, -1), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in layer_ids], -1)


def edited_drafter(folder: Path, name: str, config: dict | None = None, tensors=None) -> Path:
    """A copy of a fixture's drafter, with `config` entries replaced (`...` deletes) and `tensors(dict)` run.

    A dotted key reaches into a nested block. Keys and tensors must exist to be deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads((drafter_folder(name) / "config.json").read_text())
    for key, value in (config or {}).items():
        *blocks, last = key.split(".")
        place = content
        for block in blocks:
            place = place[block]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    (folder / "config.json").write_text(json.dumps(content))
    weights = load_file(drafter_folder(name) / "model.safetensors")
    if tensors is not None:
        weights = tensors(weights) or weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
