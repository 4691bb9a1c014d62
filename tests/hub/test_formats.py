"""What configs say, leave out or get wrong: detection, conventions, contradictions and refusals."""

import json

import golden
import pytest
import torch
from golden import drafter_folder, edited_drafter, load_drafter, load_target
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark.auto import AutoDrafter
from hf_dspark.hub.facts import read_rope
from hf_dspark.hub.formats import detect

VANILLA, BONUS = "speculators-dspark-vanilla-anchor", "speculators-dspark-gated-bonus"


def load(folder, name, **kwargs):
    return AutoDrafter.from_pretrained(folder, target=load_target(name), **kwargs)


def edited_config(tmp_path, name, config, **kwargs):
    return load(edited_drafter(tmp_path, name, config), name, **kwargs).config


def facts(config):
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


# ------------------------------------------------------------------ detection

FAMILIES = {"deepspec": "deepspec", "zlab": "zlab", "specforge-dspark": "specforge", "specforge-domino": "domino"}


@pytest.mark.parametrize("name", [*golden.BLOCKS, *golden.EAGLE3])
def test_every_fixture_is_recognised_by_its_config_alone(name):
    config = json.loads((drafter_folder(name) / "config.json").read_text())
    family = detect(name, config)
    if "eagle3" in name:
        assert family == {"safeailab": "eagle3"}.get(name.split("-")[0], f"eagle3-{name.split('-')[0]}")
    else:
        assert family == next((v for k, v in FAMILIES.items() if name.startswith(k)), "speculators")


def test_nested_algorithm_and_tensors_decide_where_the_usual_keys_are_missing(tmp_path):
    config = {"speculators_config": {"algorithm": "dspark"}, "architectures": ["DSparkDraftModel"]}
    assert detect("x", config) == "speculators"
    assert detect("x", {"architectures": ["DFlashDraftModel"]}, ["prefix_gru.weight_hh_l0"]) == "domino"
    assert detect("x", {"model_type": "llama"}) == ""
    assert detect("x", {"model_type": "llama"}, ["midlayer.hidden_norm.weight"]) == "eagle3"
    assert detect("x", {"architectures": ["Eagle3LlamaForCausalLM"]}) == "eagle3"


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, [], "DFlash2.*convolutions"),
        ({"architectures": ["DFlashDraftModel"]}, ["layers.0.mlp_conv.base_kernel"], "DFlash2.*convolutions"),
        ({"architectures": ["PEagleDraftModel"]}, [], "PEagle.*one pass"),
        ({"speculators_model_type": "peagle"}, [], "'peagle' drafter"),
        ({"speculators_model_type": "dflash2"}, [], "'dflash2' drafter"),
        ({"speculators_model_type": "eagle3"}, ["mask_hidden"], "mask_hidden.*P-EAGLE"),
        ({"architectures": ["Qwen3DSparkModel"], "model_type": "gemma4_text"}, [], "gemma4_text body"),
        (
            {"speculators_model_type": "dspark", "transformer_layer_config": {"model_type": "gemma4_text"}},
            [],
            "gemma4_text",
        ),
        ({"architectures": ["Gemma4UnifiedAssistantForCausalLM"]}, [], "keys and values of its own"),
        ({"architectures": ["Qwen35DSparkModel"]}, [], "gated"),
        ({"architectures": ["Qwen3NextMTP"]}, [], "multi-token-prediction"),
        ({"model_type": "qwen3_next"}, ["mtp.fc.weight"], "multi-token-prediction"),
        ({"architectures": ["DFlashDraftModel"]}, ["aux_hidden_norms.0.weight"], "Laguna"),
        ({"architectures": ["DFlashDraftModel"]}, ["layers.0.self_attn.g_proj.weight"], "Laguna"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"attention_sink_bias": True}}, [], "attention_sink"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "new"}},
            [],
            "projector_type='new'",
        ),
        ({"architectures": ["Qwen3DSparkModel"], "quantization_config": {"bits": 4}}, [], "quantised.*bfloat16"),
        ({"architectures": ["Qwen3DSparkModel"]}, ["layers.0.mlp.up_proj.weight_packed"], "quantised"),
        ({"model_type": "deepseek_v4", "dspark_noise_token_id": 3}, [], "DeepSeek-V4"),
        ({"model_type": "llama"}, ["fc.weight", "fc.bias", "layers.0.mlp.up_proj.weight"], "EAGLE-1 or EAGLE-2"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ["model.norm.weight"], "known formats"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name_with_reason_and_way_out(config, tensors, words):
    with pytest.raises(ValueError, match=words) as caught:
        detect("some/repo", config, tensors)
    assert "some/repo holds" in str(caught.value) and "Instead, " in str(caught.value)


def test_interleaved_rotary_embeddings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rope_is_neox_style=false.*Permute"):
        edited_config(tmp_path, "specforge-dspark-vanilla", {"rope_is_neox_style": False})


# ------------------------------------------------------------------ block layout


def test_absent_block_layout_follows_the_rule_of_the_format(tmp_path):
    assert load_drafter("deepspec-dspark-vanilla").config.sample_from_anchor is True
    assert load_drafter("specforge-dspark-vanilla").config.sample_from_anchor is True
    assert load_drafter("zlab-dflash-b8").config.sample_from_anchor is False
    assert edited_config(tmp_path / "a", "specforge-domino-shift", {"dflash_config.shift_label": ...}).max_block == 7
    assert edited_config(tmp_path / "b", BONUS, {"sample_from_anchor": ...}).sample_from_anchor is False
    dflash = edited_config(tmp_path / "c", "speculators-dflash-reduced", {"sample_from_anchor": ...})
    assert dflash.sample_from_anchor is False


def test_an_old_speculators_file_that_proposes_whole_blocks_is_asked_about(tmp_path):
    folder = edited_drafter(tmp_path, VANILLA, {"sample_from_anchor": ...})
    with pytest.raises(ValueError, match="doesn't say whether slot k.*sample_from_anchor=True"):
        load(folder, VANILLA)
    assert load(folder, VANILLA, sample_from_anchor=True).config.max_block == 6


def test_dspark_weights_under_a_dflash_label_are_asked_about(tmp_path):
    name = "deepspec-dspark-vanilla"
    folder = edited_drafter(tmp_path, name, {"architectures": ["DFlashDraftModel"]})
    with pytest.raises(ValueError, match="doesn't say whether slot k"):
        load(folder, name)
    drafter = load(folder, name, sample_from_anchor=True)
    assert drafter.config.correction_head == "markov" and drafter.config.max_block == 7


@pytest.mark.parametrize(
    ("name", "edit", "anchor"),
    [
        ("zlab-dflash-b8", {"sample_from_anchor": True}, True),
        ("zlab-dflash-b8", {"dflash_config.sample_from_anchor": True}, True),
        ("deepspec-dspark-vanilla", {"dspark_bonus_anchor": True}, False),
        ("specforge-domino-shift", {"dflash_config.shift_label": False}, False),
        (BONUS, {"sample_from_anchor": ..., "dspark_bonus_anchor": False}, True),
    ],
)
def test_explicit_keys_win_wherever_they_sit(name, edit, anchor, tmp_path):
    assert edited_config(tmp_path, name, edit).sample_from_anchor is anchor


def test_the_argument_wins_over_the_file():
    assert load_drafter(BONUS, sample_from_anchor=True).config.max_block == 7


def test_two_keys_that_disagree_are_refused_naming_both(tmp_path):
    with pytest.raises(ValueError, match=r"sample_from_anchor=True and dspark_bonus_anchor \(negated\)=False"):
        edited_config(tmp_path, VANILLA, {"dspark_bonus_anchor": True})
    with pytest.raises(ValueError, match=r"shift_label='true'"):
        edited_config(tmp_path, "specforge-domino-shift", {"dflash_config.shift_label": "true"})
    with pytest.raises(ValueError, match=r"emb_dim=32 and dflash_config\.emb_dim=16"):
        edited_config(tmp_path, "specforge-domino-shift", {"emb_dim": 32})


# ------------------------------------------------------------------ config against tensors


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (
            "deepspec-dspark-vanilla",
            {"num_hidden_layers": 3, "layer_types": ...},
            r"num_hidden_layers=3.*layers\.1.*says 2",
        ),
        ("deepspec-dspark-vanilla", {"markov_rank": 6}, r"markov_rank=6.*markov_w1\.weight says 8"),
        ("deepspec-dspark-vanilla", {"markov_rank": 0}, r"markov_rank='none'.*says 'markov'"),
        ("deepspec-dspark-vanilla", {"markov_head_type": "gated"}, r"markov_head_type='gated'.*says 'markov'"),
        ("deepspec-dspark-vanilla", {"enable_confidence_head": False}, r"enable_confidence_head=False.*says True"),
        ("deepspec-dspark-vanilla", {"confidence_head_with_markov": False}, r"confidence_head_with_markov=False.*True"),
        ("deepspec-dspark-vanilla", {"target_layer_ids": [1, 3]}, r"2 layer ids.*fc\.weight says 72"),
        ("deepspec-dspark-vanilla", {"vocab_size": 96}, r"vocab_size=96.*embed_tokens\.weight says 97"),
        ("deepspec-dspark-vanilla", {"hidden_size": 64}, r"hidden_size=64.*norm\.weight says 48"),
        ("deepspec-dspark-vanilla", {"head_dim": 8}, r"head_dim=8.*q_norm\.weight says 16"),
        ("deepspec-dspark-vanilla", {"num_key_value_heads": 4}, r"num_key_value_heads=4.*k_proj\.weight says 2"),
        ("deepspec-dflash", {"enable_confidence_head": True}, r"enable_confidence_head=True.*says False"),
        ("deepspec-dflash", {"markov_rank": 8}, r"markov_rank=8.*absent.*says 0"),
        ("specforge-domino-shift", {"dflash_config.gru_hidden_dim": 32}, r"gru_hidden_dim=32.*says 24"),
        (VANILLA, {"draft_vocab_size": 80}, r"draft_vocab_size=80.*lm_head\.weight says 72"),
        (VANILLA, {"target_hidden_size": 96}, r"target_hidden_size=96.*fc\.weight says 48"),
        ("safeailab-eagle3-llama", {"num_attention_heads": 2, "head_dim": 12}, r"num_attention_heads=2.*says 4"),
        ("speculators-eagle3-v31", {"norm_before_fc": False}, r"norm_before_fc=False.*input_norm\.weight says True"),
        ("speculators-eagle3-llama", {"fc_norm": True}, r"fc_norm=True.*fc_norm\.0\.weight says False"),
    ],
)
def test_a_lying_config_is_refused_naming_what_it_says_and_what_the_tensors_say(name, edit, words, tmp_path):
    folder = edited_drafter(tmp_path, name, edit)
    with pytest.raises(ValueError, match=words):
        AutoDrafter.from_pretrained(folder, **({"target_layer_ids": [1, 3, 4]} if "eagle3" in name else {}))


def test_what_the_config_leaves_out_is_read_from_the_tensors(tmp_path):
    silent = dict.fromkeys(("markov_rank", "markov_head_type", "enable_confidence_head", "head_dim", "vocab_size"), ...)
    silent |= dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"), ...
    )
    loaded = edited_config(tmp_path, "deepspec-dspark-rnn", silent)
    assert facts(loaded) == facts(load_drafter("deepspec-dspark-rnn").config)


def test_options_inherited_from_the_target_but_not_built_are_ignored(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1]}
    inherited = {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "rope_parameters": rope,
        "full_attention_interval": 4,
    }
    loaded = edited_config(tmp_path, "deepspec-dspark-vanilla", inherited)
    assert facts(loaded) == facts(load_drafter("deepspec-dspark-vanilla").config)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_an_essential_key_is_never_guessed(key, tmp_path):
    folder = edited_drafter(tmp_path, "deepspec-dspark-vanilla", {key: ...})
    with pytest.raises(ValueError, match=f"no {key}"):
        AutoDrafter.from_pretrained(folder)
    value = getattr(load_drafter("deepspec-dspark-vanilla").config, key)
    assert AutoDrafter.from_pretrained(folder, **{key: value}).config.block_size == 7


def test_layer_ids_become_outputs_of_layers_and_the_last_layer_is_refused(tmp_path):
    assert load_drafter(VANILLA).config.target_layer_ids == [0, 2, 4]  # the file says 1, 3, 5: inputs
    assert edited_config(tmp_path, VANILLA, {"aux_hidden_state_layer_ids": [0, 3, 5]}).target_layer_ids == [-1, 2, 4]
    with pytest.raises(ValueError, match="taps layer 7"):
        edited_config(tmp_path, VANILLA, {"aux_hidden_state_layer_ids": [1, 3, 8]})
    folder = edited_drafter(tmp_path, "deepspec-dspark-vanilla", {"target_layer_ids": [1, 3, 5]})
    with pytest.raises(ValueError, match="last layer can't be tapped"):
        AutoDrafter.from_pretrained(folder)


def test_a_mask_token_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mask_token_id=97 lies outside"):
        edited_config(tmp_path, "deepspec-dspark-vanilla", {"mask_token_id": 97})


# ------------------------------------------------------------------ EAGLE-3


def test_eagle3_layer_ids_follow_the_target_or_are_asked_for(tmp_path):
    name = "safeailab-eagle3-llama"
    with pytest.raises(ValueError, match="pass target"):
        AutoDrafter.from_pretrained(drafter_folder(name))
    assert load_drafter(name).config.target_layer_ids == [1, 3, 4]
    for n, said in enumerate(([1, 3, 4], [2, 4, 5])):  # as outputs, as inputs: either is recognised
        folder = edited_drafter(tmp_path / str(n), name, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": said}})
        assert load(folder, name).config.target_layer_ids == [1, 3, 4]
    folder = edited_drafter(tmp_path / "odd", name, {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]})
    with pytest.raises(ValueError, match=r"=\[0, 2, 5\]\. Some engines.*or \[-1, 1, 4\] if they are inputs"):
        load(folder, name)
    assert load(folder, name, target_layer_ids=[0, 2, 5]).config.target_layer_ids == [0, 2, 5]
    ids = "eagle_aux_hidden_state_layer_ids"
    assert edited_config(tmp_path, "speculators-eagle3-llama", {ids: None}).target_layer_ids == [1, 3, 4]


def test_eagle3_positions_follow_the_training_stack():
    # Rotary embedding is relative, so only the habit itself can tell.
    offsets = {name: load_drafter(name).config.position_offset for name in golden.EAGLE3}
    assert all(offset == name.startswith("speculators") for name, offset in offsets.items())


def test_eagle3_flags_that_engines_read_differently_are_asked_for(tmp_path):
    folder = edited_drafter(tmp_path / "a", "speculators-eagle3-llama", {"norm_before_residual": ...})
    with pytest.raises(ValueError, match="vLLM reads it as true"):
        load(folder, "speculators-eagle3-llama")
    assert load(folder, "speculators-eagle3-llama", norm_before_residual=True).config.norm_before_residual
    specforge = {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True}
    folder = edited_drafter(tmp_path / "b", "safeailab-eagle3-llama", specforge)
    with pytest.raises(ValueError, match="norm_output=True or|norm_output=True \\(next"):
        load(folder, "safeailab-eagle3-llama")
    assert load(folder, "safeailab-eagle3-llama", norm_output=False).config.norm_head


# ------------------------------------------------------------------ rotary embedding


def test_old_and_new_rope_spelling_give_one_drafter(tmp_path):
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}}
    old = {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    both = new | {"rope_theta": 5e5}
    configs = [
        edited_config(tmp_path / str(n), "deepspec-dspark-vanilla", edit).rope_parameters
        for n, edit in enumerate((new, old, both))
    ]
    assert configs[0]["rope_theta"] == 5e5 and configs[0]["rope_type"] == "yarn"
    assert configs[0] == configs[1] == configs[2]


def test_two_rope_spellings_that_disagree_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two rotary embeddings"):
        edited_config(tmp_path, "deepspec-dspark-vanilla", {"rope_theta": 1e6})


def test_inherited_multimodal_and_partial_rope_keys_do_not_reach_the_drafter():
    copied = {"rope_theta": 1e7, "rope_type": "default", "mrope_section": [1, 2], "partial_rotary_factor": 0.25}
    assert read_rope({"rope_parameters": copied}) == {"rope_theta": 1e7, "rope_type": "default"}
    assert (
        read_rope({"rope_theta": 1e7, "rope_scaling": {"type": "mrope", "mrope_section": [1]}})["rope_type"]
        == "default"
    )
    assert read_rope({"model_type": "llama"}) == {"rope_theta": 10000.0, "rope_type": "default"}
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match="differ between layer types"):
        read_rope({"rope_parameters": nested})


# ------------------------------------------------------------------ sliding layers

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}


def test_sliding_layers_keep_the_meaning_of_the_stack_that_trained_them(tmp_path):
    zlab = edited_config(tmp_path / "a", "zlab-dflash-b8", SLIDING)
    assert (zlab.sliding_window, zlab.window_from, zlab.causal_block) == (6, "slot", True)
    nested = {f"transformer_layer_config.{k}": v for k, v in SLIDING.items()}
    library = edited_config(tmp_path / "b", VANILLA, nested)
    assert (library.sliding_window, library.window_from, library.causal_block) == (6, "anchor", True)
    assert not edited_config(tmp_path / "c", VANILLA, nested | {"sliding_window_non_causal": True}).causal_block
    assert not edited_config(tmp_path / "d", "zlab-dflash-b8", SLIDING | {"is_causal": False}).causal_block
    by_depth = {"layer_types": ..., "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
    assert edited_config(tmp_path / "e", "zlab-dflash-b8", by_depth).layer_types[::-1] == SLIDING["layer_types"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (SLIDING | {"use_sliding_window": False}, "contradict each other"),
        ({"dflash_config.use_swa": True}, "contradict each other"),
        (SLIDING | {"dflash_config.swa_window_size": 9}, "swa_window_size=9"),
        ({"dflash_config.causal": True}, "full-attention layers would be causal"),
        (SLIDING | {"sliding_window": None}, "without a sliding_window|sliding_window is not set"),
    ],
)
def test_sliding_options_that_contradict_or_are_not_supported_are_refused(edit, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        edited_config(tmp_path, "zlab-dflash-b8", edit)


# ------------------------------------------------------------------ the assistant of transformers


def test_muse_glimmer_assistant_drafts_like_transformers_own_class(tmp_path):
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="newer transformers only")
    from transformers.cache_utils import DFlashCache

    torch.manual_seed(0)
    body = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    target = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, num_hidden_layers=6, intermediate_size=64, **body)).eval()
    config = muse.MuseGlimmerAssistantConfig(
        num_hidden_layers=2,
        intermediate_size=48,
        sliding_window=5,
        block_size=4,
        mask_token_id=49,
        target_layer_ids=[1, 3],
        **body,
    )
    theirs = muse.MuseGlimmerAssistantModel(config).eval()
    for p in theirs.parameters():
        p.data.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    theirs.save_pretrained(tmp_path)
    ours = AutoDrafter.from_pretrained(tmp_path, target=target)
    assert ours.config.max_block == 3 and ours.config.vocab_size == 50

    features, anchor = torch.randn(1, 9, 64), torch.tensor([7])
    cache = ours.new_cache(torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        ours.extend(cache, features, torch.zeros(1, 9, dtype=torch.long), torch.ones(1, 9, dtype=torch.bool))
        state = ours.start(cache, anchor)
        their_cache = DFlashCache(config=config)
        their_cache.set_previous_accepted_tokens(9)
        expected = theirs(
            noise_embeds=target.get_input_embeddings()(torch.tensor([[7, 49, 49, 49]])),
            context_hidden_states=features,
            attention_mask=torch.ones(1, 13),
            position_ids=torch.arange(13)[None],
            cache=their_cache,
        ).last_hidden_state
    torch.testing.assert_close(state.hidden, expected[:, 1:], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="how large its vocabulary is"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_norm_inside_the_targets_embedding_is_not_applied_to_drafts():
    class NormedEmbedding(torch.nn.Embedding):
        def __init__(self, *args):
            super().__init__(*args)
            self.embed_norm = torch.nn.LayerNorm(48)

        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    drafter = load_drafter("zlab-dflash-b8")
    table = drafter._bound["embedding"] = NormedEmbedding(97, 48)
    ids = torch.tensor([3, 5])
    assert torch.equal(drafter.embed(ids), table.weight[ids])


def test_a_side_file_with_a_mask_embedding_is_not_overlooked(tmp_path):
    folder = edited_drafter(tmp_path, "zlab-dflash-b8")
    save_file({"embedding": torch.zeros(48)}, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        load(folder, "zlab-dflash-b8")
