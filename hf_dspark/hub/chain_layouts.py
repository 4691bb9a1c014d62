"""The layouts of EAGLE-3 drafters: what each can say, what its server runs, and the keys it is read by."""

SPECULATORS = 'export to "speculators"'


def deepspec(source):
    """DeepSpec's flat config with the whole vocabulary and a Qwen3 body."""
    config = source.config
    source.refuse_if(not config.qk_norm, "a Llama body (qk_norm=False)", "DeepSpec's class norms both", SPECULATORS)
    source.refuse_if(source.reduced, "a reduced vocabulary", "DeepSpec drafts over the whole one", SPECULATORS)
    _refuse_unknown(source, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    facts = {
        "architectures": source.architecture("Eagle3Model"),
        **source.body("qwen3"),
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": source.num_target_layers(),
        "draft_num_hidden_layers": config.num_hidden_layers,
        "ttt_length": config.chain_length,
        "step_loss_decay": 0.8,  # read by the trainer only
    }
    if config.target_name:
        facts["target_model_name_or_path"] = config.target_name
    return facts, {**_vocabulary_tensors(source), **source.weights(str)}


def speculators(source):
    """The layout of the speculators library, which vLLM serves."""
    config = source.config
    _refuse_unknown(source)
    body = source.body("qwen3" if config.qk_norm else "llama")
    facts = source.envelope("eagle3", "Eagle3Speculator", body) | {
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
    }
    if len(config.target_layer_ids) != 3:
        facts["num_aux_hidden_states"] = len(config.target_layer_ids)
    return facts, {**_vocabulary_tensors(source), **source.vocabulary(), **source.weights(str)}


def sglang(source):
    """SGLang's `EAGLE3` with a Llama body of one layer. The embedding is the target's."""
    config = source.config
    source.refuse_if(
        config.qk_norm, "a Qwen3 body (qk_norm=True)", "SGLang's class has no query and key norms", SPECULATORS
    )
    layers = config.num_hidden_layers
    source.refuse_if(layers != 1, f"{layers} layers", "SGLang's class has one", SPECULATORS)
    source.refuse_if(-1 in config.target_layer_ids, "target_layer_ids with -1", "SGLang can't tap the embedding")
    _refuse_unknown(source, "norm_before_residual", "norm_before_fc")
    source.leave_to_target("embed_tokens")
    facts = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **source.body("llama"),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.fc_norm,
        "num_target_layers": source.num_target_layers(),
        "target_layer_ids": config.target_layer_ids,  # unambiguous where the next line isn't
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": config.target_layer_ids},
    }
    if config.norm_output:  # false is the default, and means something else to the trainers of this layout
        facts["norm_output"] = True
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in source.weights(str).items()}
    return facts, {"lm_head.weight": source.head(), **source.vocabulary(), **tensors}


def zlab(source):
    source.refuse_if(True, "an EAGLE-3 body", "that layout is for DFlash", 'export to "speculators" or "sglang"')


def _vocabulary_tensors(source):
    return {"embed_tokens.weight": source.embedding(), "lm_head.weight": source.head()}


def _refuse_unknown(source, *flags):
    config = source.config
    for flag in flags:
        source.refuse_if(getattr(config, flag), f"{flag}=True", "its readers don't apply that", SPECULATORS)
    source.refuse_if(not config.norm_head, "norm_head=False", "its readers always norm before the head")
    source.refuse_if(config.fc_bias, "fc_bias=True", "its readers build the fusion without one")
