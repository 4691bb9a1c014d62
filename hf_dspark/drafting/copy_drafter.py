"""Drafts without any weights, for every decoder-only target: what the text itself, or a memory of texts, suggests."""

from types import SimpleNamespace

import torch

from hf_dspark.modeling import SpeculationConfig
from hf_dspark.modeling.draft_cache import DraftCache

from .copying import CopyMemory


class CopyDrafter:
    """A drafter that copies: `target.generate(**inputs, assistant_model=CopyDrafter())`.

    It proposes what followed the longest earlier match of the text's last tokens. Any decoder-only target, any batch size, any
    sampling; nothing is loaded or trained.

    Args:
        memory ([`CopyMemory`], *optional*): texts of other calls and documents of your own to copy from, too.
        speculation ([`SpeculationConfig`], *optional*): default knobs of its calls. By default `copy="auto"`: copies are verified
            where they are expected to gain time.

    Raises:
        ValueError: `speculation` without `copy`, which leaves nothing to draft.
    """

    is_hf_drafter = True
    dtype = torch.float32

    def __init__(self, memory: CopyMemory | None = None, speculation: SpeculationConfig | None = None):
        self.speculation = speculation or SpeculationConfig(copy="auto")
        if self.speculation.copy is None:
            raise ValueError(
                "CopyDrafter got a speculation with copy=None, and copies are all it drafts: set copy='auto', or a number of tokens."
            )
        self.copy_memory = memory
        self.last_speculation = None
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(
            model_type="copy",
            name_or_path="copy",
            max_block=0,
            fixed_block=True,
            recursive=False,
            target_layer_ids=[],
            confidence_head=False,
            confidence_temperatures=None,
            survival_model=None,
            trained_length=None,
            is_encoder_decoder=False,
        )

    def __repr__(self) -> str:
        memory = "" if self.copy_memory is None else f"memory of {len(self.copy_memory)} tokens"
        return f"CopyDrafter({memory})"

    def bind(self, target) -> "CopyDrafter":
        """Follow `target` to its device, and settle whose token ids the memory holds.

        Raises:
            ValueError: the memory's ids belong to another vocabulary.
        """
        self.device = target.device
        if self.copy_memory is not None:
            self.copy_memory.bind(target.config.get_text_config().vocab_size)
        return self

    # ------------------------------------------------------------------ the drafter protocol, of blocks of no tokens

    def new_cache(self, first_positions: torch.Tensor) -> DraftCache:
        return DraftCache(0, first_positions)

    def expected_length(self, committed: torch.Tensor) -> torch.Tensor:
        return committed - 1

    def extend(self, cache: DraftCache, features, next_tokens, valid) -> None:
        cache.advance(valid.sum(1).cpu())
