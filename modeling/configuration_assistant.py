"""Configuration of Gemma 4's assistant, which reads the target's own keys and values."""

from transformers import AutoConfig

from .configuration_drafter import DrafterConfig

TYPES = ("full_attention", "sliding_attention")


class AssistantConfig(DrafterConfig):
    """Configuration of an [`AssistantDrafter`].

    Args (and those of [`DrafterConfig`]; sizes are those of the states it exchanges with the target):
        assistant (`dict`, *optional*): transformers' configuration of the assistant, `model_type` included.
        key_value_layers (`list[int]`): the target's layers whose keys and values are read: the last one with full and
            the last one with sliding attention that has its own.
        chain_length (`int`, defaults to 4): drafts of one stage unless the caller asks for another number.
        num_target_layers (`int`): the target's number of layers.
    """

    model_type = "hf_assistant"
    family = "Gemma 4 assistant"
    recursive = True
    layouts = "assistants"
    last_tap = 0
    borrows = ["embed_tokens"]

    def __init__(self, assistant=None, key_value_layers=(1, 0), chain_length=4, num_target_layers=2, **kwargs):
        self.assistant = dict(assistant or {})
        self.key_value_layers = list(key_value_layers)
        self.chain_length = chain_length
        if self.assistant:
            body = self.body_config()
            text = body.get_text_config()
            sizes = ("vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
            kwargs |= {key: getattr(text, key) for key in sizes} | {"hidden_size": body.backbone_hidden_size}
        # A layer's keys and values are made of its input, the output of the layer before.
        kwargs["target_layer_ids"] = [*(i - 1 for i in self.key_value_layers), num_target_layers]
        super().__init__(num_target_layers=num_target_layers, **kwargs)
        if chain_length < 1:
            raise ValueError(f"chain_length={chain_length} drafts nothing: set the number of drafts, at least 1.")

    def body_config(self):
        """transformers' configuration of the assistant."""
        options = dict(self.assistant)
        return AutoConfig.for_model(options.pop("model_type"), **options)

    @property
    def max_block(self) -> int:
        """Drafts K of one stage."""
        return self.chain_length
