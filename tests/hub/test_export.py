"""Exports mean what the drafter meant, hold the keys their readers look for, and refuse what has no runtime."""

import json
from copy import deepcopy

import pytest
import torch
from golden import drafter_folder, edited_drafter, load_drafter, load_target
from safetensors.torch import load_file

from hf_dspark.auto import AutoDrafter
from hf_dspark.hub import export
from hf_dspark.hub.export import FORMATS

ROUTES = {
    "deepspec-dflash": ["deepspec", "speculators"],
    "deepspec-dspark-vanilla": ["deepspec", "speculators", "sglang"],
    "deepspec-dspark-rnn": ["deepspec", "sglang"],
    "zlab-dflash-b8": ["speculators", "sglang", "zlab"],
    "specforge-dspark-vanilla": ["deepspec", "speculators", "sglang"],
    "specforge-domino-shift": ["sglang"],
    "speculators-dflash-reduced": ["speculators"],
    "speculators-dspark-gated-bonus": [],
    "speculators-dspark-vanilla-anchor": ["speculators"],
    "deepspec-eagle3": ["deepspec", "speculators"],
    "safeailab-eagle3-llama": ["speculators", "sglang"],
    "speculators-eagle3-llama": ["speculators"],
    "speculators-eagle3-v31": ["speculators"],
}
OPEN = [(name, to) for name, routes in ROUTES.items() for to in routes]
CLOSED = [(name, to) for name, routes in ROUTES.items() for to in FORMATS if to not in routes]
MEANING = (
    "target_layer_ids",
    "sample_from_anchor",
    "block_size",
    "mask_token_id",
    "correction_head",
    "confidence_head",
)
MEANING += ("draft_vocab_size", "vocab_size", "rope_parameters", "layer_types", "head_dim", "max_block", "norm_output")
MEANING += ("confidence_with_markov", "pure_draft_prefix_len", "norm_before_residual", "norm_before_fc", "fc_norm")


def first_drafts(drafter):
    """Logits and confidences of one stage after random features."""
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    features = torch.randn(2, 9, len(config.target_layer_ids) * config.target_hidden_size, generator=generator)
    tokens, valid = torch.randint(0, 90, (2, 9), generator=generator), torch.ones(2, 9, dtype=torch.bool)
    cache, out, previous = drafter.new_cache(torch.zeros(2, dtype=torch.long)), [], tokens[:, -1]
    with torch.no_grad():
        state = drafter.start(cache, previous, drafter.extend(cache, features, tokens, valid))
        for _ in range(config.max_block):
            logits, confidence, state = drafter.step(cache, state, previous)
            previous = drafter.target_ids(logits.argmax(-1))
            out += [logits] if confidence is None else [logits, confidence[:, None]]
    return torch.cat(out, 1)


def assert_same_meaning(drafter, original):
    for key in MEANING:
        assert getattr(drafter.config, key, None) == getattr(original.config, key, None), key
    ours, theirs = drafter.state_dict(), original.state_dict()
    frozen = {"embed_tokens.weight", "lm_head.weight"}  # may move between file and target, as they are equal
    assert ours.keys() ^ theirs.keys() <= frozen
    assert all(torch.equal(ours[k], theirs[k]) for k in ours.keys() & theirs.keys())
    torch.testing.assert_close(first_drafts(drafter), first_drafts(original), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "to"), OPEN)
def test_import_export_import_keeps_tensors_and_meaning(name, to, tmp_path):
    original = load_drafter(name)
    again = AutoDrafter.from_pretrained(export(original, tmp_path, to), target=load_target(name))
    assert_same_meaning(again, original)


IN_A_ROW = [("deepspec-dspark-vanilla", a, b) for a in ROUTES["deepspec-dspark-vanilla"] for b in FORMATS[:3] if a != b]
IN_A_ROW += [("zlab-dflash-b8", "sglang", "speculators"), ("safeailab-eagle3-llama", "sglang", "speculators")]


@pytest.mark.parametrize(("name", "first", "second"), IN_A_ROW)
def test_two_exports_in_a_row_lose_nothing_either(name, first, second, tmp_path):
    original, target = load_drafter(name), load_target(name)
    middle = AutoDrafter.from_pretrained(export(original, tmp_path / "a", first), target=target)
    again = AutoDrafter.from_pretrained(export(middle, tmp_path / "b", second), target=target)
    assert_same_meaning(again, original)


@pytest.mark.parametrize(("name", "to"), CLOSED)
def test_what_a_layout_cannot_say_or_a_server_cannot_run_is_refused_with_a_way_out(name, to, tmp_path):
    with pytest.raises(ValueError, match=f"The drafter has .* can't be exported to '{to}': .*Instead, "):
        export(load_drafter(name), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["speculators-dspark-gated-bonus", "deepspec-dspark-rnn"])
def test_heads_that_vllm_does_not_run_are_written_on_request(name, tmp_path):
    original = load_drafter(name)
    folder = export(original, tmp_path, "speculators", allow_unservable=True)
    assert_same_meaning(AutoDrafter.from_pretrained(folder, target=load_target(name)), original)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="to='gguf'.*'sglang'"):
        export(load_drafter("zlab-dflash-b8"), tmp_path, "gguf")


# ------------------------------------------------------------------ the very keys


def exported(name, to, tmp_path, **kwargs):
    folder = export(load_drafter(name), tmp_path, to, **kwargs)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


BODY = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
}
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}


def proposals(count):
    method = {"proposal_type": "greedy", "speculative_tokens": count, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {"default_proposal_method": "greedy", "proposal_methods": [method]}


def test_deepspec_config_is_exactly_that_of_the_format(tmp_path):
    config, tensors = exported("deepspec-dspark-vanilla", "deepspec", tmp_path)
    assert config == BODY | MARKOV | CONFIDENCE | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "mask_token_id": 96,
        "target_layer_ids": [1, 3, 4],
        "num_target_layers": 6,
        "num_anchors": 512,
        "dtype": "float32",
    }
    original = load_file(drafter_folder("deepspec-dspark-vanilla") / "model.safetensors")
    assert tensors.keys() == original.keys() and all(torch.equal(tensors[k], original[k]) for k in tensors)
    config, _ = exported("deepspec-dflash", "deepspec", tmp_path)
    assert config["markov_rank"] == 0 and config["enable_confidence_head"] is False
    assert (
        not {"markov_head_type", "confidence_head_with_markov", "sample_from_anchor", "dflash_config"} & config.keys()
    )


def test_speculators_dspark_config_is_exactly_that_of_the_format(tmp_path):
    config, tensors = exported("deepspec-dspark-vanilla", "speculators", tmp_path)
    target = load_target("deepspec-dspark-vanilla")
    assert config == MARKOV | CONFIDENCE | {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dspark",
            "verifier": {"name_or_path": target.config._name_or_path, "architectures": ["Qwen3ForCausalLM"]},
            **proposals(7),
        },
        "transformer_layer_config": BODY,
        "block_size": 7,
        "mask_token_id": 96,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "draft_vocab_size": 97,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert not {"d2t", "t2d"} & tensors.keys() and not any(name.startswith("model.") for name in tensors)


def test_speculators_dflash_has_no_markov_keys_and_counts_one_draft_less(tmp_path):
    config, tensors = exported("zlab-dflash-b8", "speculators", tmp_path)
    assert config["architectures"] == ["DFlashSpeculator"] and config["sample_from_anchor"] is False
    assert config["speculators_config"] | {"verifier": 0} == {"algorithm": "dflash", "verifier": 0, **proposals(7)}
    assert not {"markov_rank", "markov_head_type", "enable_confidence_head"} & config.keys()
    assert not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()  # vocabularies match: the target's are shared


@pytest.mark.parametrize(
    "name", ["speculators-dspark-vanilla-anchor", "speculators-dflash-reduced", "speculators-eagle3-v31"]
)
def test_reduced_vocabularies_keep_offsets_mask_and_head(name, tmp_path):
    config, tensors = exported(name, "speculators", tmp_path)
    original = load_file(drafter_folder(name) / "model.safetensors")
    for key in ("d2t", "t2d", "lm_head.weight"):
        assert torch.equal(tensors[key], original[key]) and tensors[key].dtype == original[key].dtype
    assert (
        config["draft_vocab_size"] == 72 and tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    )


def test_speculators_eagle3_config_is_exactly_that_of_the_format(tmp_path):
    config, _ = exported("speculators-eagle3-v31", "speculators", tmp_path)
    theirs = json.loads((drafter_folder("speculators-eagle3-v31") / "config.json").read_text())
    written_by_the_library_only = {"auto_map", "transformers_version"}
    assert config.keys() == theirs.keys() - written_by_the_library_only
    differing = {key for key in config if config[key] != theirs[key]}
    assert differing <= {"architectures", "transformer_layer_config"} and config["architectures"] == [
        "Eagle3Speculator"
    ]
    config, _ = exported("deepspec-eagle3", "speculators", tmp_path)
    assert config["num_aux_hidden_states"] == 5 and config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4, 5, 6]
    assert config["norm_before_residual"] is False and config["transformer_layer_config"]["model_type"] == "qwen3"


def test_sglang_dspark_keys_lie_flat_and_in_both_blocks(tmp_path):
    config, tensors = exported("deepspec-dspark-vanilla", "sglang", tmp_path)
    facts = MARKOV | CONFIDENCE | {"block_size": 7, "mask_token_id": 96, "target_layer_ids": [1, 3, 4]}
    facts |= {"num_target_layers": 6, "sample_from_anchor": True}
    assert config["architectures"] == ["Qwen3DSparkModel"]
    for place in (config, config["dflash_config"], config["dspark_config"]):
        assert place.items() >= facts.items()
    assert config.items() >= BODY.items() and not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()


def test_sglang_domino_keys(tmp_path):
    config, tensors = exported("specforge-domino-shift", "sglang", tmp_path)
    assert config["architectures"] == ["DFlashDraftModel"] and config["emb_dim"] == 16
    assert config["dflash_config"] == {
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 24,
        "emb_dim": 16,
        "mask_token_id": 96,
        "target_layer_ids": [1, 3],
        "block_size": 8,
        "num_target_layers": 6,
    }
    assert tensors.keys() == load_file(drafter_folder("specforge-domino-shift") / "model.safetensors").keys()


def test_sglang_eagle3_keys(tmp_path):
    config, tensors = exported("safeailab-eagle3-llama", "sglang", tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 72
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang adds one
    assert "norm_output" not in config and config["fc_norm"] is False
    original = load_file(drafter_folder("safeailab-eagle3-llama") / "model.safetensors")
    assert tensors.keys() == original.keys() and all(torch.equal(tensors[k], original[k]) for k in tensors)


def test_zlab_keys(tmp_path):
    config, _ = exported("zlab-dflash-b8", "zlab", tmp_path)
    assert config == BODY | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3]},
        "dtype": "float32",
    }


# ------------------------------------------------------------------ details


def test_weights_are_cast_on_request_and_maps_are_not(tmp_path):
    config, tensors = exported("speculators-dspark-vanilla-anchor", "speculators", tmp_path, dtype=torch.bfloat16)
    assert config["dtype"] == "bfloat16" and tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_both_rope_spellings_and_the_targets_context_length_are_written(tmp_path):
    name = "zlab-dflash-b8"
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 512}
    folder = edited_drafter(tmp_path / "a", name, {"rope_parameters": yarn})
    drafter = AutoDrafter.from_pretrained(folder, target=load_target(name))
    config = json.loads((export(drafter, tmp_path / "b", "zlab") / "config.json").read_text())
    assert config["rope_parameters"] == yarn and config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in yarn.items() if k != "rope_theta"}
    assert AutoDrafter.from_pretrained(tmp_path / "b").config.rope_parameters == yarn

    target = deepcopy(load_target(name))
    target.config.max_position_embeddings = 4096
    drafter = AutoDrafter.from_pretrained(drafter_folder(name), target=target)
    config = json.loads((export(drafter, tmp_path / "c", "zlab") / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096


def test_sliding_windows_go_only_where_they_are_counted_alike(tmp_path):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
    target = load_target("zlab-dflash-b8")
    drafter = AutoDrafter.from_pretrained(edited_drafter(tmp_path / "a", "zlab-dflash-b8", sliding), target=target)
    again = AutoDrafter.from_pretrained(export(drafter, tmp_path / "b", "sglang"), target=target)
    assert_same_meaning(again, drafter)
    assert (again.config.sliding_window, again.config.causal_block) == (6, True)
    with pytest.raises(ValueError, match="from the anchor"):
        export(drafter, tmp_path / "c", "speculators")
    nested = {f"transformer_layer_config.{k}": v for k, v in sliding.items()} | {"sliding_window_non_causal": True}
    name = "speculators-dspark-vanilla-anchor"
    drafter = AutoDrafter.from_pretrained(edited_drafter(tmp_path / "d", name, nested), target=load_target(name))
    again = AutoDrafter.from_pretrained(export(drafter, tmp_path / "e", "speculators"), target=load_target(name))
    assert_same_meaning(again, drafter)
    assert (again.config.window_from, again.config.causal_block) == ("anchor", False)


def test_a_layout_that_needs_the_targets_tensors_asks_for_the_target(tmp_path):
    drafter = AutoDrafter.from_pretrained(drafter_folder("specforge-dspark-vanilla"))
    with pytest.raises(ValueError, match=r"needs the embedding.*pass target"):
        export(drafter, tmp_path, "deepspec")
    export(drafter, tmp_path, "deepspec", target=load_target("specforge-dspark-vanilla"))
    drafter = AutoDrafter.from_pretrained(drafter_folder("deepspec-dspark-vanilla"))
    with pytest.raises(ValueError, match="no target_name.*pass target"):
        export(drafter, tmp_path, "speculators")


def test_an_own_embedding_or_head_is_dropped_only_if_it_is_the_targets(tmp_path):
    drafter = load_drafter("deepspec-dspark-vanilla")
    with torch.no_grad():
        drafter.lm_head.weight[3] += 1
    with pytest.raises(ValueError, match="an own lm_head that differs from the target's"):
        export(drafter, tmp_path, "sglang")


def test_a_borrowed_head_is_written_as_its_drafted_rows(tmp_path):
    name = "speculators-dspark-vanilla-anchor"
    folder = edited_drafter(
        tmp_path / "a", name, tensors=lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"}
    )
    drafter = AutoDrafter.from_pretrained(folder, target=load_target(name), own_head=False)
    tensors = load_file(export(drafter, tmp_path / "b", "speculators") / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], load_target(name).lm_head.weight[drafter.target_ids()])


def test_calibration_travels_with_the_export(tmp_path):
    name = "deepspec-dspark-vanilla"
    drafter = load_drafter(name)
    drafter.config.confidence_temperatures = [1.5] * 7
    for to in ROUTES[name]:
        again = AutoDrafter.from_pretrained(export(drafter, tmp_path / to, to), target=load_target(name))
        assert again.config.confidence_temperatures == [1.5] * 7


@pytest.mark.parametrize(
    ("name", "field", "value", "to", "words"),
    [
        ("zlab-dflash-b8", "target_layer_ids", [-1, 3], "sglang", "can't tap the embedding"),
        ("zlab-dflash-b8", "embed_scale", 2.0, "zlab", "embed_scale=2.0"),
        ("zlab-dflash-b8", "final_logit_softcapping", 30.0, "zlab", "final_logit_softcapping"),
        ("zlab-dflash-b8", "attention_bias", True, "zlab", "attention_output_bias"),
        ("specforge-domino-shift", "pure_draft_prefix_len", 2, "sglang", "exactly 1"),
        ("safeailab-eagle3-llama", "norm_head", False, "speculators", "norm_head=False"),
        ("safeailab-eagle3-llama", "num_hidden_layers", 2, "sglang", "2 layers"),
    ],
)
def test_options_without_a_key_are_refused_by_name(name, field, value, to, words, tmp_path):
    drafter = load_drafter(name)
    setattr(drafter.config, field, value)
    with pytest.raises(ValueError, match=words):
        export(drafter, tmp_path, to)
