"""Drafts without any weights, for every decoder-only target: what the text itself, or a memory of texts, suggests."""

from types import SimpleNamespace

import torch

from hf_dspark.modeling import SpeculationConfig
from hf_dspark.modeling.draft_cache import DraftCache

from .copying import CopyMemory


class TheTargets:
    """Stands for a value of the target's config: copies are tokens of the target, so pipelines find what they compare
    equal."""

    def __eq__(self, other) -> bool:
        return True

    __hash__ = object.__hash__


class CopyDrafter:
    """A drafter that copies: `target.generate(**inputs, assistant_model=CopyDrafter())`.

    It proposes what followed the longest earlier match of the text's last tokens. It works with any decoder-only
    target, any batch size and any sampling. Nothing is loaded or trained. Sources: prompt lookup decoding (Saxena
    2023), LLMA (arXiv 2304.04487).

    Args:
        memory ([`CopyMemory`], *optional*): texts of other calls and documents of your own, to copy from as well.
        speculation ([`SpeculationConfig`], *optional*): default settings of its calls. By default `copy="auto"`: copies
            are verified where they are expected to gain time; and `verification="match"`, which accepts a copy as often
            as the others would, and makes the tokens of a `seed` independent of what is copied.

    Raises:
        ValueError: `speculation` without `copy`, which leaves nothing to draft.
    """

    is_hf_drafter = True
    dtype = torch.float32

    def __init__(self, memory: CopyMemory | None = None, speculation: SpeculationConfig | None = None):
        self.speculation = speculation or SpeculationConfig(copy="auto", verification="match")
        if self.speculation.copy is None:
            raise ValueError(
                "CopyDrafter got a speculation with copy=None, and copies are all it drafts: set copy='auto', or a "
                "number of tokens."
            )
        self.copy_memory = memory
        self.last_speculation = None
        self.device = torch.device("cpu")
        self.config = config = SimpleNamespace(
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
            enable_thinking=None,
            template_hash=None,
            is_encoder_decoder=False,
            **{name: TheTargets() for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")},
        )
        config.get_text_config = lambda: config

    def __repr__(self) -> str:
        memory = "" if self.copy_memory is None else f"memory of {len(self.copy_memory)} tokens"
        return f"CopyDrafter({memory})"

    def bind(self, target) -> "CopyDrafter":
        """Follow `target` to its device."""
        self.device = target.device
        return self

    # ------------------------------------------------------------------ the drafter protocol, of blocks of no tokens

    def new_cache(self, first_positions: torch.Tensor) -> DraftCache:
        return DraftCache(0, first_positions)

    def expected_length(self, committed: torch.Tensor) -> torch.Tensor:
        return committed - 1

    def extend(self, cache: DraftCache, features, next_tokens, valid) -> None:
        cache.advance(valid.sum(1).cpu())
