"""What the configurations of all drafters share: the drafter's body, the target it belongs to, how it was trained."""

from transformers import PreTrainedConfig

BODIES = ("llama", "gemma4")


class DrafterConfig(PreTrainedConfig):
    """Base of [`DSparkConfig`], [`Eagle3Config`], [`MTPConfig`] and [`AssistantConfig`].

    Facts of a family are class attributes or properties: `family` (its name on a card), `recursive` (a draft costs a
    pass, and a chain goes on as long as it is asked to), `fixed_block` (a stage can be no longer than `max_block`),
    `max_block`, `last_tap` (the highest tap, counted from the target's number of layers), `layouts` (what its files
    look like).

    Args:
        vocab_size (`int`): size of the target's vocabulary V.
        draft_vocab_size (`int`, *optional*): size Vd of the drafter's vocabulary; `None` means V. A reduced vocabulary
            comes with the buffer `d2t` [Vd] of offsets: target id = draft id + d2t[draft id].
        hidden_size (`int`): D. This and `intermediate_size`, `num_hidden_layers`, `num_attention_heads`,
            `num_key_value_heads`, `head_dim`, `hidden_act`, `rms_norm_eps`, `max_position_embeddings` and
            `rope_parameters` describe the drafter's own layers, as in transformers. The older `rope_theta` and
            `rope_scaling` are read as well.
        attention_bias (`bool`): biases of the query, key and value projections.
        attention_output_bias (`bool`): bias of the output projection.
        qk_norm (`bool`, defaults to `True`): RMS norm on queries and keys per head, as in Qwen3.
        body (`str`, defaults to `"llama"`): `"llama"` for pre-norm layers; `"gemma4"` for norms around attention and
            MLP, a scalar per layer, normed values and unscaled attention.
        key_is_value (`bool`): values are the un-normed key projection, which the file then has alone.
        target_layer_ids (`list[int]`): tapped target layers, 0-based; the feature is that layer's output before the
            final norm. -1 is the input of layer 0. The last layer is refused.
        num_target_layers (`int`, *optional*): the target's number of layers.
        target_hidden_size (`int`, *optional*, defaults to `hidden_size`): the target's hidden size Dt.
        confidence_temperatures (`list[float]`, *optional*): one calibration temperature per draft position.
        survival_model (`dict`, *optional*): a fitted estimate of acceptance, for drafters without a confidence head.
        own_embedding (`bool`): whether the checkpoint holds an embedding. If not, the target's is borrowed.
        own_head (`bool`): whether the checkpoint holds an output layer. If not, the target's is borrowed.
        embed_scale (`float`): factor on input embeddings.
        final_logit_softcapping (`float`, *optional*): cap on base logits.
        trained_length (`int`, *optional*): longest sequence seen in training; decoding past it warns once.
        enable_thinking (`bool`, *optional*): whether the training chats were rendered with thinking.
        template_hash (`str`, *optional*): hash of the chat template they were rendered with.
        target_name (`str`, *optional*): the target this drafter was made for.
        speculation (`dict`, *optional*): stored defaults of [`SpeculationConfig`].
    """

    fixed_block = False
    recursive = False
    last_tap = -2
    mask_token_id = None
    confidence_head = False

    def __init__(
        self,
        vocab_size=32000,
        draft_vocab_size=None,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=None,
        head_dim=None,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        rope_parameters=None,
        attention_bias=False,
        attention_output_bias=False,
        qk_norm=True,
        body="llama",
        key_is_value=False,
        target_layer_ids=(0,),
        num_target_layers=None,
        target_hidden_size=None,
        confidence_temperatures=None,
        survival_model=None,
        own_embedding=False,
        own_head=False,
        embed_scale=1.0,
        final_logit_softcapping=None,
        trained_length=None,
        enable_thinking=None,
        template_hash=None,
        target_name=None,
        speculation=None,
        **kwargs,
    ):
        theta, scaling = kwargs.pop("rope_theta", None), kwargs.pop("rope_scaling", None)
        if rope_parameters is None:
            rope_parameters = {"rope_type": "default", "rope_theta": theta or 10000.0, **(scaling or {})}
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.rope_parameters = rope_parameters
        self.attention_bias = attention_bias
        self.attention_output_bias = attention_output_bias
        self.mlp_bias = False
        self.qk_norm = qk_norm
        self.body = body
        self.key_is_value = key_is_value
        self.target_layer_ids = list(target_layer_ids)
        self.num_target_layers = num_target_layers
        self.target_hidden_size = target_hidden_size or hidden_size
        self.confidence_temperatures = confidence_temperatures
        self.survival_model = survival_model
        self.own_embedding = own_embedding
        self.own_head = own_head
        self.embed_scale = embed_scale
        self.final_logit_softcapping = final_logit_softcapping
        self.trained_length = trained_length
        self.enable_thinking = enable_thinking
        self.template_hash = template_hash
        self.target_name = target_name
        self.speculation = speculation
        kwargs["tie_word_embeddings"] = False  # never the target's habit: head and embedding have their own flags
        super().__init__(**kwargs)
        check_target_layer_ids(self.target_layer_ids, num_target_layers, self.last_tap)
        if body not in BODIES:
            raise ValueError(f"body={body!r} is unknown: set one of {BODIES}.")
        if self.draft_vocab_size > vocab_size:
            raise ValueError(
                f"draft_vocab_size={draft_vocab_size} exceeds vocab_size={vocab_size}, and every draft must be a "
                "token of the target: set draft_vocab_size to vocab_size or less, or None for the whole vocabulary."
            )

    @property
    def borrows(self) -> list[str]:
        """What the drafter takes from its target: `embed_tokens`, `lm_head`."""
        return [name for name, own in (("embed_tokens", self.own_embedding), ("lm_head", self.own_head)) if not own]


def check_target_layer_ids(ids: list[int], num_target_layers: int | None, last_tap: int = -2) -> None:
    """Refuse taps that can't be meant: repeated, below -1, or the last layer (pre-norm or post-norm is unclear).

    `last_tap`: the highest tap, counted from the number of layers; only multi-token-prediction heads go past -2.
    """
    if len(set(ids)) != len(ids) or not ids:
        raise ValueError(f"target_layer_ids={ids} is empty or repeats a layer: list each tapped layer once.")
    top = num_target_layers + last_tap if num_target_layers else max(ids)
    bad = [i for i in ids if not -1 <= i <= top]
    if bad:
        raise ValueError(
            f"target_layer_ids={ids}: {bad} lie outside -1..{top}. Ids are 0-based decoder layers (output before the "
            "final norm), -1 is the input of layer 0, and the last layer can't be tapped: files disagree on whether "
            "it is normed."
        )
