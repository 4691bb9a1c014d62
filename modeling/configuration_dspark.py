"""Configuration of the parallel (block) drafters: DSpark, DFlash and Domino."""

from .configuration_drafter import DrafterConfig

CORRECTION_HEADS = ("none", "markov", "gated", "rnn", "domino")


class DSparkConfig(DrafterConfig):
    """Configuration of a [`DSparkDrafter`] (DSpark: arXiv 2607.05147; DFlash: 2602.06036; Domino: 2605.29707).

    A block drafter reads the target's hidden states and fills a block of `block_size` slots in one pass; a correction
    head then walks the block left to right. DFlash is `correction_head="none"`.

    Args (and those of [`DrafterConfig`]):
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per layer.
        sliding_window (`int`, *optional*): a sliding layer's slot k at position p + k, p the anchor's, sees context
            positions >= p + k - sliding_window + 1 (`window_from="slot"`) or >= p - sliding_window
            (`window_from="anchor"`).
        window_from (`str`, defaults to `"slot"`): `"slot"` or `"anchor"`, see `sliding_window`.
        causal_block (`bool`, defaults to `True`): sliding layers are causal inside the block. Full layers never are.
        block_size (`int`, defaults to 7): slots B of a block; slot 0 holds the anchor, the rest `mask_token_id`.
        mask_token_id (`int`, defaults to 0): the id that fills slots 1..B-1.
        sample_from_anchor (`bool`, defaults to `True`): slot k predicts position p + k + 1, so that a block gives B
            drafts; if `False` slot k predicts p + k and a block gives B - 1.
        correction_head (`str`, defaults to `"markov"`): `"none"`, `"markov"`, `"gated"`, `"rnn"` or `"domino"`.
        markov_rank (`int`, defaults to 64): rank r of the heads `"markov"`, `"gated"` and `"rnn"`.
        gru_hidden_size (`int`, defaults to 0): width of Domino's GRU.
        correction_size (`int`, defaults to 0): width of Domino's bottleneck.
        pure_draft_prefix_len (`int`, defaults to 0): number of first drafts that Domino leaves uncorrected.
        confidence_head (`bool`, defaults to `False`): predict the acceptance of each draft.
        confidence_with_markov (`bool`, defaults to `True`): the confidence head also reads the Markov embedding of the
            token before.
        loop_pseudo (`str`, defaults to `"pre_norm"`): what stands in for target features in looped drafting:
            `"pre_norm"` (last layer's state before the final norm, then the context norm) or `"post_norm"`.
        loop_alignment (`str`, defaults to `"prediction"`): with `sample_from_anchor=False`, `"prediction"` (state that
            predicted i + 1) or `"position"`.
    """

    model_type = "hf_dspark"
    fixed_block = True
    layouts = "blocks"

    def __init__(
        self,
        layer_types=None,
        sliding_window=None,
        causal_block=True,
        window_from="slot",
        block_size=7,
        mask_token_id=0,
        sample_from_anchor=True,
        correction_head="markov",
        markov_rank=64,
        gru_hidden_size=0,
        correction_size=0,
        pure_draft_prefix_len=0,
        confidence_head=False,
        confidence_with_markov=True,
        loop_pseudo="pre_norm",
        loop_alignment="prediction",
        **kwargs,
    ):
        self.sliding_window = sliding_window
        self.causal_block = causal_block
        self.window_from = window_from
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.sample_from_anchor = sample_from_anchor
        self.correction_head = correction_head
        self.markov_rank = markov_rank
        self.gru_hidden_size = gru_hidden_size
        self.correction_size = correction_size
        self.pure_draft_prefix_len = pure_draft_prefix_len
        self.confidence_head = confidence_head
        self.confidence_with_markov = confidence_with_markov
        self.loop_pseudo = loop_pseudo
        self.loop_alignment = loop_alignment
        super().__init__(**kwargs)
        self.layer_types = layer_types or ["full_attention"] * self.num_hidden_layers
        self._check()

    @property
    def family(self) -> str:
        """What a card calls the drafter."""
        return {"none": "DFlash", "domino": "Domino"}.get(self.correction_head, "DSpark")

    @property
    def max_block(self) -> int:
        """Drafts K of one block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def _check(self):
        if self.correction_head not in CORRECTION_HEADS:
            raise ValueError(f"correction_head={self.correction_head!r} is unknown: set one of {CORRECTION_HEADS}.")
        if self.max_block < 1:
            raise ValueError(
                f"block_size={self.block_size} with sample_from_anchor={self.sample_from_anchor} leaves no slot that "
                "drafts: set a larger block_size."
            )
        if self.correction_head in ("markov", "gated", "rnn") and self.markov_rank < 1:
            raise ValueError(
                f"correction_head={self.correction_head!r} needs markov_rank >= 1, got {self.markov_rank}: set a "
                "rank, or correction_head='none'."
            )
        if self.confidence_head and self.confidence_with_markov and self.correction_head in ("none", "domino"):
            raise ValueError(
                f"confidence_with_markov=True with correction_head={self.correction_head!r}, which has no Markov "
                "feature for the confidence head to read: set confidence_with_markov=False, or a head with markov_rank."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers: give one per "
                "layer."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types asks for sliding_attention without a sliding_window: set sliding_window.")
