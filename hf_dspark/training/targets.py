"""What training reads from the frozen target: features, final states and their normaliser, computed online or
cached."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from ..decoding.target import FeatureTap

logger = logging.get_logger(__name__)


@dataclass
class TargetOutputs:
    """One forward of the target over rows [B, T].

    Attributes:
        features: [B, T, m*Dt] tapped states. hidden: [B, T, Dt] states after the final norm.
        log_normalizer, top: [B, T] log-sum-exp of the logits over the whole vocabulary and most likely token, of the
            positions whose next token is supervised; 0 elsewhere.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    log_normalizer: torch.Tensor
    top: torch.Tensor


class FrozenTarget:
    """The target as training sees it: one pass without gradient, and logits of the drafted ids on demand.

    Raises:
        ValueError: if logits aren't head(final states), up to a soft cap, so that they can't be had in chunks.
    """

    def __init__(self, model, layer_ids: list[int], chunk: int = 256):
        self.model, self.layer_ids, self.chunk = model.eval().requires_grad_(False), list(layer_ids), chunk
        self.head = model.get_output_embeddings()
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self.rows = {}
        self._check()

    @torch.no_grad()
    def _check(self):
        ids = torch.arange(1, 5, device=self.model.device)[None]
        theirs = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state).float()
        if not torch.allclose(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max())):
            raise ValueError(
                f"The logits of {type(self.model).__name__} aren't its output head on its last states, so the loss "
                "can't compute them in chunks: use a target without a transformation between the two."
            )

    def _capped(self, logits):
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] logits of final states, at least float32."""
        weight = getattr(self.head, "weight", None)
        if weight is not None and weight.is_floating_point():
            hidden = hidden.to(weight.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return self._capped(self.head(hidden))

    def logits_of(self, drafter):
        """A function from final states [..., Dt] to the logits [..., Vd] of the ids `drafter` drafts."""
        if not hasattr(drafter, "d2t"):
            return lambda hidden: self.logits(hidden)[..., : drafter.config.vocab_size]
        ids = drafter.target_ids()
        if type(self.head) is not torch.nn.Linear:
            return lambda hidden: self.logits(hidden).index_select(-1, ids)
        if id(drafter) not in self.rows:  # the map never changes in training
            self.rows[id(drafter)] = self.head.weight.detach()[ids.to(self.head.weight.device)]
        rows = self.rows[id(drafter)]

        def logits(hidden):
            with torch.autocast(hidden.device.type, enabled=False):
                return self._capped(torch.nn.functional.linear(hidden.to(rows.dtype), rows))

        return logits

    def check_packing(self) -> None:
        """Run a document alone and behind another, in a row of two.

        Raises:
            ValueError: its states differ by more than rounding.
        """
        ids = torch.arange(1, 25, device=self.model.device)[None] % self.model.config.get_text_config().vocab_size
        position_ids = torch.cat([torch.arange(n, device=ids.device) for n in (11, 13)])[None]
        none = torch.full_like(ids, -100)
        alone = self(ids[:, 11:], none[:, 11:], position_ids[:, 11:], True).hidden.double()
        try:
            behind = self(ids, none, position_ids, True).hidden[:, 11:].double()
        except TypeError:  # a forward without position_ids
            behind = alone.new_full(alone.shape, float("nan"))
        exact = self.model.dtype in (torch.float32, torch.float64)
        if not (behind - alone).norm() <= (1e-3 if exact else 0.1) * alone.norm():
            raise ValueError(
                f"pack=True, and {type(self.model).__name__} lets a document see the one before it in its row (its "
                "states change with it), so the drafter would learn from contexts that never occur: set pack=False."
            )

    @torch.no_grad()
    def __call__(self, input_ids, labels, position_ids, packed: bool) -> TargetOutputs:
        """`position_ids` restart with each document; the target then keeps packed documents apart by itself."""
        extra = {"position_ids": position_ids} if packed else {}  # without them right padding is harmless
        with FeatureTap(self.model, self.layer_ids) as tap, torch.autocast(input_ids.device.type, enabled=False):
            hidden = self.model.get_decoder()(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
            features = tap.features()
        needed = torch.zeros_like(labels, dtype=torch.bool)
        needed[:, :-1] = labels[:, 1:] != -100
        lse = hidden.new_zeros(labels.shape, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        top = torch.full_like(labels, -1)
        for places in needed.nonzero().split(self.chunk):
            where = tuple(places.T)
            logits = self.logits(hidden[where])
            lse[where], top[where] = logits.logsumexp(-1).to(lse.dtype), logits.argmax(-1)
        return TargetOutputs(features, hidden, lse, top)


class FeatureCache:
    """Target outputs on disk, one safetensors file per example, so that later epochs skip the target.

    Nothing is written past `limit_gb`: what doesn't fit is computed each time. The folder remembers which target, taps
    and data it was filled with.

    Raises:
        ValueError: when the folder was filled with something else.
    """

    NAMES = ("features", "hidden", "log_normalizer", "top")

    def __init__(self, folder, limit_gb: float, facts: dict):
        self.folder, self.limit = Path(folder), limit_gb * 1e9
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "cache.json"
        if note.exists() and (found := json.loads(note.read_text())) != facts:
            raise ValueError(
                f"The feature cache {self.folder} holds {found}, and this run needs {facts}: give another "
                "feature_cache folder, or delete this one."
            )
        note.write_text(json.dumps(facts))
        self.used = sum(f.stat().st_size for f in self.folder.glob("*.safetensors"))

    def _path(self, example_id: int) -> Path:
        return self.folder / f"{example_id:07d}.safetensors"

    def load(self, documents: list[tuple], shape, device) -> TargetOutputs | None:
        """Outputs [B, T, ...] of a batch of `shape` [B, T], zero between its documents (example id, row, first column,
        columns); None unless there are some, all of them here."""
        paths = [self._path(example_id) for example_id, *_ in documents]
        if not paths or not all(p.exists() for p in paths):
            return None
        found = [load_file(p) for p in paths]
        parts = []
        for name in self.NAMES:
            out = found[0][name].new_zeros(*shape, *found[0][name].shape[1:])
            for stored, (_, row, at, n) in zip(found, documents, strict=True):
                out[row, at : at + n] = stored[name]
            parts.append(out.to(device))
        return TargetOutputs(*parts)

    def save(self, documents: list[tuple], outputs: TargetOutputs) -> None:
        for example_id, row, at, n in documents:
            path = self._path(example_id)
            tensors = {name: getattr(outputs, name)[row, at : at + n].contiguous().cpu() for name in self.NAMES}
            size = sum(t.nbytes for t in tensors.values())
            if path.exists() or self.used + size > self.limit:
                continue
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            save_file(tensors, temporary)
            temporary.rename(path)
            self.used += size
