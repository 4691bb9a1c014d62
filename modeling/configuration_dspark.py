"""Configuration of the parallel (block) drafters: DSpark, DFlash and Domino."""

from transformers import PreTrainedConfig

CORRECTION_HEADS = ("none", "markov", "gated", "rnn", "domino")


class DSparkConfig(PreTrainedConfig):
    """Configuration of a [`DSparkDrafter`] (DSpark: arXiv 2607.05147; DFlash: 2602.06036; Domino: 2605.29707).

    A block drafter reads the target's hidden states and fills a block of `block_size` slots in one pass; a correction head
    then walks the block left to right. DFlash is `correction_head="none"`.

    Args:
        vocab_size (`int`): size of the target's vocabulary V.
        draft_vocab_size (`int`, *optional*): size Vd of the drafter's vocabulary; `None` means V. A reduced vocabulary
            comes with the buffer `d2t` [Vd] of offsets: target id = draft id + d2t[draft id].
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
            hidden_act, rms_norm_eps, attention_bias, max_position_embeddings, rope_parameters: the drafter's own body.
            The older spelling `rope_theta` / `rope_scaling` is read as well.
        qk_norm (`bool`, defaults to `True`): RMS norm on queries and keys per head, as in Qwen3.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per layer.
        sliding_window (`int`, *optional*): a sliding layer's slot k at position p + k sees context positions
            >= p + k - sliding_window + 1 (`window_from="slot"`) or >= p - sliding_window (`window_from="anchor"`), p the anchor's.
        causal_block (`bool`, defaults to `True`): sliding layers are causal inside the block. Full layers never are.
        block_size (`int`): slots B of a block; slot 0 holds the anchor, the rest `mask_token_id`.
        mask_token_id (`int`): the id that fills slots 1..B-1.
        target_layer_ids (`list[int]`): tapped target layers, 0-based; the feature is that layer's output before the final
            norm. -1 is the input of layer 0. The last layer is refused.
        num_target_layers (`int`, *optional*), target_hidden_size (`int`, *optional*, defaults to `hidden_size`).
        sample_from_anchor (`bool`): slot k predicts position p + k + 1, so that a block gives B drafts; if `False` slot k
            predicts p + k and a block gives B - 1.
        correction_head (`str`): `"none"`, `"markov"`, `"gated"`, `"rnn"` or `"domino"`.
        markov_rank (`int`): rank r of the Markov family.
        gru_hidden_size, correction_size, pure_draft_prefix_len (`int`): Domino's GRU width, bottleneck, and number of first
            drafts that stay uncorrected.
        confidence_head (`bool`), confidence_with_markov (`bool`): predict each draft's acceptance; with the Markov feature.
        confidence_temperatures (`list[float]`, *optional*): one calibration temperature per draft position.
        own_embedding, own_head (`bool`): whether the checkpoint carries them; else they are the target's, borrowed.
        embed_scale (`float`), final_logit_softcapping (`float`, *optional*): factor on input embeddings; cap on base logits.
        loop_pseudo (`str`): what stands in for target features in looped drafting: `"pre_norm"` (last layer's state before
            the final norm, then the context norm) or `"post_norm"`.
        loop_alignment (`str`): with `sample_from_anchor=False`, `"prediction"` (state that predicted i+1) or `"position"`.
        trained_length (`int`, *optional*): longest sequence seen in training; decoding past it warns once.
        enable_thinking (`bool`, *optional*), template_hash (`str`, *optional*): how the training chats were rendered.
        target_name (`str`, *optional*): the target this drafter was made for.
        speculation (`dict`, *optional*): stored defaults of [`SpeculationConfig`].
    """

    model_type = "hf_dspark"

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
        attention_bias=False,
        qk_norm=True,
        max_position_embeddings=32768,
        rope_parameters=None,
        layer_types=None,
        sliding_window=None,
        causal_block=True,
        window_from="slot",
        block_size=7,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=None,
        target_hidden_size=None,
        sample_from_anchor=True,
        correction_head="markov",
        markov_rank=64,
        gru_hidden_size=0,
        correction_size=0,
        pure_draft_prefix_len=0,
        confidence_head=False,
        confidence_with_markov=True,
        confidence_temperatures=None,
        own_embedding=False,
        own_head=False,
        embed_scale=1.0,
        final_logit_softcapping=None,
        loop_pseudo="pre_norm",
        loop_alignment="prediction",
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
        self.attention_bias = attention_bias
        self.mlp_bias = False
        self.qk_norm = qk_norm
        self.max_position_embeddings = max_position_embeddings
        self.rope_parameters = rope_parameters
        self.layer_types = layer_types or ["full_attention"] * num_hidden_layers
        self.sliding_window = sliding_window
        self.causal_block = causal_block
        self.window_from = window_from
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.target_layer_ids = list(target_layer_ids)
        self.num_target_layers = num_target_layers
        self.target_hidden_size = target_hidden_size or hidden_size
        self.sample_from_anchor = sample_from_anchor
        self.correction_head = correction_head
        self.markov_rank = markov_rank
        self.gru_hidden_size = gru_hidden_size
        self.correction_size = correction_size
        self.pure_draft_prefix_len = pure_draft_prefix_len
        self.confidence_head = confidence_head
        self.confidence_with_markov = confidence_with_markov
        self.confidence_temperatures = confidence_temperatures
        self.own_embedding = own_embedding
        self.own_head = own_head
        self.embed_scale = embed_scale
        self.final_logit_softcapping = final_logit_softcapping
        self.loop_pseudo = loop_pseudo
        self.loop_alignment = loop_alignment
        self.trained_length = trained_length
        self.enable_thinking = enable_thinking
        self.template_hash = template_hash
        self.target_name = target_name
        self.speculation = speculation
        kwargs["tie_word_embeddings"] = False  # never the target's habit: head and embedding have their own flags
        super().__init__(**kwargs)
        self._check()

    @property
    def max_block(self) -> int:
        """Drafts K of one block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def _check(self):
        if self.correction_head not in CORRECTION_HEADS:
            raise ValueError(f"correction_head={self.correction_head!r} is unknown: set one of {CORRECTION_HEADS}.")
        if self.max_block < 1:
            raise ValueError(
                f"block_size={self.block_size} with sample_from_anchor={self.sample_from_anchor} leaves no slot that drafts: "
                "set a larger block_size."
            )
        if self.correction_head in ("markov", "gated", "rnn") and self.markov_rank < 1:
            raise ValueError(
                f"correction_head={self.correction_head!r} needs markov_rank >= 1, got {self.markov_rank}: set a rank, or "
                "correction_head='none'."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers: give one per layer."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types asks for sliding_attention but sliding_window is not set: set sliding_window.")
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)


def check_target_layer_ids(ids: list[int], num_target_layers: int | None) -> None:
    """Refuse taps that can't be meant: repeated, negative below -1, or the last layer (pre-norm or post-norm is unclear)."""
    if len(set(ids)) != len(ids) or not ids:
        raise ValueError(f"target_layer_ids={ids} is empty or repeats a layer: list each tapped layer once.")
    top = num_target_layers - 2 if num_target_layers else max(ids)
    bad = [i for i in ids if not -1 <= i <= top]
    if bad:
        raise ValueError(
            f"target_layer_ids={ids}: {bad} lie outside -1..{top}. Ids are 0-based decoder layers (output before the final "
            "norm), -1 is the input of layer 0, and the last layer can't be tapped: files disagree on whether it is normed."
        )
