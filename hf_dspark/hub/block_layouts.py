"""The layouts of block drafters: what each can say, what its server runs, and the keys it is read by."""

from functools import partial

from .blocks import HEAD_TYPES, their_name

SPECULATORS = 'export to "speculators"'
HEAD_NAMES = {ours: theirs for theirs, ours in HEAD_TYPES.items()}


def deepspec(source):
    """DeepSpec's flat config; vLLM serves it with `method: dspark`."""
    _refuse_for_flat_dspark(source)
    config = source.config
    return {
        **_dspark_facts(source),
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": source.num_target_layers(),
        "num_anchors": 512,  # read by the training constructor only
    }, {
        "embed_tokens.weight": source.embedding(),
        "lm_head.weight": source.head(),
        **source.weights(_names("deepspec")),
    }


def speculators(source):
    """The layout of the speculators library, which vLLM serves."""
    config, head = source.config, source.config.correction_head
    kind = "dflash" if head == "none" and not config.sample_from_anchor and not config.confidence_head else "dspark"
    _refuse_body(source)
    source.refuse_if(head == "domino", "a Domino head", "the library has no such head", 'export to "sglang"')
    source.refuse_if(
        head in ("gated", "rnn") and not source.allow_unservable,
        f"a {head} correction head",
        "vLLM runs vanilla Markov heads only",
        'export to "sglang", or pass allow_unservable=True (--anyway) to write the file all the same',
    )
    source.refuse_if(
        "sliding_attention" in config.layer_types and config.window_from != "anchor",
        f"window_from={config.window_from!r}",
        "the library counts sliding windows from the anchor",
    )
    body = source.body("qwen3") | _sliding(config)
    facts = source.envelope(kind, {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[kind], body) | {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": "sliding_attention" in config.layer_types and not config.causal_block,
    }
    if kind == "dspark":
        facts |= _heads(config) | {
            "confidence_head_with_markov": config.confidence_head and config.confidence_with_markov
        }
    tensors = source.weights(_names("speculators")) | source.vocabulary()
    if config.own_embedding:
        tensors["embed_tokens.weight"] = source.embedding()
    if config.own_head or source.reduced:
        tensors["lm_head.weight"] = source.head()
    return facts, tensors


def sglang(source):
    """SGLang: `DSPARK` for Markov heads, `DFLASH` for plain DFlash and Domino. Embedding and head are the target's."""
    config = source.config
    _refuse_embedding_tap(source)
    if config.correction_head == "domino":
        return _domino(source)
    if config.correction_head == "none" and not config.sample_from_anchor:
        facts, tensors = zlab(source)
        facts["dflash_config"] |= {key: facts[key] for key in ("block_size", "num_target_layers")}
        return facts, tensors
    source.refuse_if(
        config.correction_head == "none",
        "no correction head but sample_from_anchor=True",
        "SGLang's DSPARK wants a Markov head and its DFLASH reads another block layout",
        'export to "deepspec" and serve with vLLM, method dspark',
    )
    _refuse_for_flat_dspark(source)
    source.leave_to_target("embed_tokens", "lm_head")
    facts = _dspark_facts(source) | {
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": source.num_target_layers(),
        "sample_from_anchor": True,
    }
    shared = (
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "sample_from_anchor",
        *_heads(config),
    )
    nested = {key: facts[key] for key in shared}
    return facts | {"dflash_config": nested, "dspark_config": nested}, source.weights(_names("sglang"))


def zlab(source):
    """Plain DFlash. Embedding and head are the target's."""
    config = source.config
    _refuse_body(source)
    _refuse_embedding_tap(source)
    source.refuse_if(
        config.correction_head != "none" or config.confidence_head,
        f"correction_head={config.correction_head!r}, confidence_head={config.confidence_head}",
        "plain DFlash has neither",
        'export to "speculators", "deepspec" or "sglang"',
    )
    source.refuse_if(
        config.sample_from_anchor,
        "sample_from_anchor=True",
        "DFlash slots predict their own position, so every draft would be one off",
        'export to "deepspec" or "speculators" and serve with vLLM, method dspark',
    )
    _refuse_reduced(source)
    _refuse_anchor_window(source)
    source.leave_to_target("embed_tokens", "lm_head")
    return _dflash_facts(source), source.weights(_names("zlab"))


def _domino(source):
    config = source.config
    _refuse_body(source)
    _refuse_reduced(source)
    _refuse_anchor_window(source)
    m = config.pure_draft_prefix_len
    source.refuse_if(m != 1, f"pure_draft_prefix_len={m}", "SGLang runs Domino with exactly 1")
    source.refuse_if(config.confidence_head, "a confidence head", "Domino files have none")
    source.leave_to_target("embed_tokens", "lm_head")
    facts = _dflash_facts(source)
    facts["dflash_config"] |= {
        "projector_type": "domino",
        "shift_label": config.sample_from_anchor,
        "pure_draft_prefix_len": m,
        "gru_hidden_dim": config.gru_hidden_size,
        "emb_dim": config.correction_size,
        "block_size": config.block_size,
        "num_target_layers": source.num_target_layers(),
    }
    return facts | {"emb_dim": config.correction_size}, source.weights(_names("domino"))


def _names(family):
    return partial(their_name, family=family)


def _sliding(config) -> dict:
    sliding = "sliding_attention" in config.layer_types
    window = config.sliding_window if sliding else None
    return {"layer_types": config.layer_types, "sliding_window": window, "use_sliding_window": sliding}


def _heads(config) -> dict:
    """Markov and confidence keys; only those that mean something, as readers take them at their word."""
    facts = {"markov_rank": config.markov_rank if config.correction_head != "none" else 0}
    if config.correction_head != "none":
        facts["markov_head_type"] = HEAD_NAMES[config.correction_head]
    facts["enable_confidence_head"] = config.confidence_head
    if config.confidence_head:
        facts["confidence_head_with_markov"] = config.confidence_with_markov
    return facts


def _dspark_facts(source) -> dict:
    config = source.config
    return {
        "architectures": source.architecture("DSparkModel"),
        **source.body("qwen3"),
        **_sliding(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        **_heads(config),
    }


def _dflash_facts(source) -> dict:
    config = source.config
    nested = {"target_layer_ids": config.target_layer_ids, "mask_token_id": config.mask_token_id}
    if "sliding_attention" in config.layer_types and not config.causal_block:
        nested["causal"] = False  # absent, sliding layers are causal
    return {
        "architectures": ["DFlashDraftModel"],
        **source.body("qwen3"),
        **_sliding(config),
        "block_size": config.block_size,
        "num_target_layers": source.num_target_layers(),
        "dflash_config": nested,
    }


def _refuse_body(source):
    source.refuse_if(not source.config.qk_norm, "qk_norm=False", "its readers build a Qwen3 body, which norms both")


def _refuse_reduced(source):
    source.refuse_if(
        source.reduced,
        f"a reduced vocabulary of {source.config.draft_vocab_size}",
        "a flat config has no place for the map",
        SPECULATORS,
    )


def _refuse_embedding_tap(source):
    source.refuse_if(
        -1 in source.config.target_layer_ids, "target_layer_ids with -1", "the engines can't tap the embedding"
    )


def _refuse_anchor_window(source):
    config = source.config
    anchored = "sliding_attention" in config.layer_types and config.window_from == "anchor"
    source.refuse_if(anchored, "window_from='anchor'", "here sliding windows count from each slot", SPECULATORS)


def _refuse_for_flat_dspark(source):
    config = source.config
    _refuse_body(source)
    _refuse_reduced(source)
    source.refuse_if(
        config.correction_head == "domino", "a Domino head", "DSpark has no such head", 'export to "sglang"'
    )
    bonus, sliding = not config.sample_from_anchor, "sliding_attention" in config.layer_types
    source.refuse_if(bonus, "sample_from_anchor=False", "its class always samples from the anchor", SPECULATORS)
    source.refuse_if(sliding, "sliding layers", "its class has full attention only", SPECULATORS)
