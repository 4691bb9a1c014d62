"""Configuration of multi-token-prediction heads."""

from transformers import AutoConfig, PreTrainedConfig

from .configuration_drafter import DrafterConfig

# A small dense block, so that a configuration without arguments exists.
DEFAULT_BLOCK = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "head_dim": 64,
}
# What every configuration says, and what says nothing about a block.
NOT_OF_A_BLOCK = {*PreTrainedConfig().to_dict(), "torch_dtype", "quantization_config", "_name_or_path"} - {"model_type"}


class MTPConfig(DrafterConfig):
    """Configuration of an [`MTPDrafter`] (multi-token prediction: DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Slot i reads the target's last state at position i beside the embedding of token i + 1, and predicts i + 2. Its
    rotary position is that of the token, i + 1. The decoder block is one of the target's own kind, dense or with
    experts.

    Args (and those of [`DrafterConfig`]; sizes of the body are those of `block_config`):
        block_config (`dict`, *optional*): transformers' configuration of the decoder blocks, `model_type` included;
            `num_hidden_layers` is the number of heads. With one head, its output is fed back for every further draft.
            With more, head k makes draft k from the output of head k - 1, and a stage has no more drafts than heads.
        chain_length (`int`, *optional*): drafts of one stage; by default one per head. Only a single head goes further.
        hidden_first (`bool`, defaults to `False`): the projection reads [state, embedding], not [embedding, state].
        norm_output (`bool`, defaults to `True`): the next slot reads the output behind the head's own norm, not before.
        tap_final_norm (`bool`, defaults to `True`): the target's last state is taken behind its final norm, not before.
        num_target_layers (`int`): the target's number of layers.
    """

    model_type = "hf_mtp"
    family = "MTP"
    recursive = True
    layouts = "heads"
    last_tap = 0
    step_decay = 0.6  # FastMTP, arXiv 2509.18362

    def __init__(
        self,
        block_config=None,
        chain_length=None,
        hidden_first=False,
        norm_output=True,
        tap_final_norm=True,
        num_target_layers=2,
        **kwargs,
    ):
        block = DEFAULT_BLOCK if block_config is None else block_config
        self.block_config = {k: v for k, v in block.items() if k not in NOT_OF_A_BLOCK and v is not None}
        self.hidden_first = hidden_first
        self.norm_output = norm_output
        self.tap_final_norm = tap_final_norm
        body = self.block()
        self.chain_length = body.num_hidden_layers if chain_length is None else chain_length
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes += ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings")
        kwargs |= {key: getattr(body, key) for key in sizes if hasattr(body, key)}
        if "rope_theta" in (getattr(body, "rope_parameters", None) or {}):  # else there is one per layer type
            kwargs["rope_parameters"] = body.rope_parameters
        kwargs["target_layer_ids"] = [num_target_layers if tap_final_norm else num_target_layers - 1]
        super().__init__(num_target_layers=num_target_layers, **kwargs)
        self._check()

    def block(self):
        """transformers' configuration of the blocks."""
        options = dict(self.block_config)
        return AutoConfig.for_model(options.pop("model_type"), **options)

    @property
    def fixed_block(self) -> bool:
        """Whether a stage can be no longer than `max_block`."""
        return self.num_hidden_layers > 1

    @property
    def max_block(self) -> int:
        """Drafts K of one stage."""
        return self.chain_length

    def _check(self):
        heads = self.num_hidden_layers
        if self.chain_length < 1:
            raise ValueError(f"chain_length={self.chain_length} drafts nothing: set the number of drafts, at least 1.")
        if heads > 1 and self.chain_length > heads:
            raise ValueError(
                f"chain_length={self.chain_length} with {heads} heads, each of which makes one draft of a stage: set "
                f"it to {heads} or less, and loop_gate to draft more than one stage."
            )
        if heads > 1 and not self.norm_output:
            raise ValueError(
                f"norm_output=False with {heads} heads, each with a norm of its own that the next one reads behind: "
                "set norm_output=True, or keep one head."
            )


def block_config_of(text, heads: int, experts: bool) -> dict:
    """Configuration of `heads` blocks like those of a target, given its text config; with experts or dense."""
    config = text.to_dict()
    full = ["full_attention"] * heads
    if config.get("layer_types") is not None:
        config["layer_types"] = list(config.get("mtp_layer_types") or full)[:heads]
    mlp = ["sparse" if experts else "dense"] * heads
    config |= {
        "num_hidden_layers": heads,
        "mlp_layer_types": mlp if config.get("mlp_layer_types") is not None else None,
        "first_k_dense_replace": (0 if experts else heads) if "first_k_dense_replace" in config else None,
        "decoder_sparse_step": 1 if "decoder_sparse_step" in config else None,
        "mlp_only_layers": ([] if experts else list(range(heads))) if "mlp_only_layers" in config else None,
        "per_layer_config": None,
    }
    return {key: value for key, value in config.items() if value is not None}
