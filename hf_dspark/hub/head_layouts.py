"""The one layout that multi-token-prediction heads have apart from their target: that of the speculators library."""

SPECULATORS = 'export to "speculators"'
NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}


def speculators(source):
    """One head, which vLLM runs as the target's own."""
    config = source.config
    heads = config.num_hidden_layers
    source.refuse_if(heads != 1, f"{heads} heads", "the library has one")
    source.refuse_if(config.hidden_first, "hidden_first=True", "its projection reads the embedding first")
    source.refuse_if(not config.norm_output, "norm_output=False", "its recursion reads the normed output")
    source.refuse_if(not config.tap_final_norm, "tap_final_norm=False", "it reads the target's normed state")
    own = config.own_embedding or config.own_head
    source.refuse_if(own, "an embedding or a head of its own", "its files leave both to the target")
    source.refuse_if(source.reduced, "a reduced vocabulary", "it drafts over the whole one")
    facts = source.envelope("mtp", "MTPDraftModel", _body(source)) | {"num_nextn_predict_layers": 1}
    return facts, source.weights(_their_name)


def _body(source) -> dict:
    """The target's text config, as far as it is known: the block's, with the target's number of layers."""
    layers = source.num_target_layers()
    body = dict(source.config.block_config) | {"num_hidden_layers": layers}
    for key in ("layer_types", "mlp_layer_types"):
        if body.get(key):
            body[key] = body[key] * layers
    return body


def _their_name(ours: str) -> str:
    _, _, part, *rest = ours.split(".")
    return "mtp_layers.0." + ".".join([NAMES[part], *rest] if part in NAMES else rest)


def deepspec(source):
    source.refuse_if(True, "multi-token-prediction heads", "that layout is for block and chain drafters", SPECULATORS)


def sglang(source):
    source.refuse_if(
        True, "multi-token-prediction heads", "SGLang reads them from the target's own checkpoint", SPECULATORS
    )


zlab = deepspec
