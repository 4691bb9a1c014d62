"""Configuration of the recursive drafters EAGLE-3 and EAGLE-3.1."""

from .configuration_drafter import DrafterConfig


class Eagle3Config(DrafterConfig):
    """Configuration of an [`Eagle3Drafter`] (EAGLE-3: arXiv 2503.01840).

    Slot i reads the target's fused features at position i beside the embedding of token i + 1, and predicts i + 2.
    Behind the last feature the drafter reads its own output instead. Llama-style bodies set `qk_norm=False`.

    Args (and those of [`DrafterConfig`]):
        chain_length (`int`, defaults to 7): drafts of one stage unless the caller asks for another number.
        norm_before_residual (`bool`, defaults to `False`): the first layer's residual stream starts from the normed
            feature, not the raw.
        norm_before_fc (`bool`, defaults to `False`): one RMS norm over all taps in front of the fusion.
        fc_norm (`bool`, defaults to `False`): one RMS norm per tap in front of the fusion.
        fc_bias (`bool`, defaults to `False`): bias of the fusion.
        norm_output (`bool`, defaults to `False`): the next slot reads the final-normed output (EAGLE-3.1), not the raw
            one.
        norm_head (`bool`, defaults to `True`): the final norm exists; if `False` the head reads the raw output.
        position_offset (`int`, defaults to 0): rotary position of slot i, minus i: 0, or 1 where training used the
            token's position.
    """

    model_type = "hf_eagle3"
    family = "EAGLE-3"
    recursive = True
    layouts = "chains"
    step_decay = 0.8  # in training, the loss of draft k weighs step_decay^k

    def __init__(
        self,
        chain_length=7,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        fc_bias=False,
        norm_output=False,
        norm_head=True,
        position_offset=0,
        **kwargs,
    ):
        self.chain_length = chain_length
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.fc_bias = fc_bias
        self.norm_output = norm_output
        self.norm_head = norm_head
        self.position_offset = position_offset
        super().__init__(**kwargs)
        self._check()

    @property
    def max_block(self) -> int:
        """Drafts K of one stage."""
        return self.chain_length

    def _check(self):
        if self.chain_length < 1:
            raise ValueError(f"chain_length={self.chain_length} drafts nothing: set the number of drafts, at least 1.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both set, and the taps are normed together or one by one, not both: "
                "set one of them."
            )
        if self.norm_output and not self.norm_head:
            raise ValueError(
                "norm_output=True reads the final norm that norm_head=False leaves out: set norm_head=True, or "
                "norm_output=False."
            )
