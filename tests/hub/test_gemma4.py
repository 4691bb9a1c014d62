"""Drafters with a Gemma 4 body: layers against transformers' own, what their files say, and what is refused."""

import json

import pytest
import tiny
import torch
import transformers
from golden import drafter_folder, edited_drafter, load_drafter, load_target
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from hf_dspark import AutoDrafter, Eagle3Config, SpeculationConfig
from hf_dspark.hub import borrow, export
from hf_dspark.hub.formats import detect

NAME = "deepspec-dspark-gemma4-keqv"


class Everything:
    """A cache that keeps nothing: the layer sees what it is given."""

    def update(self, keys, values, layer_idx, *args, **kwargs):
        return keys, values


@pytest.mark.parametrize("shared", [True, False], ids=["keys are values", "own values"])
@torch.no_grad()
def test_a_layer_computes_what_transformers_layer_does(shared):
    body = AutoConfig.for_model(
        "gemma4_text", vocab_size=11, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_global_key_value_heads=1, head_dim=6, global_head_dim=8, attention_k_eq_v=shared,
        layer_types=["full_attention"], hidden_size_per_layer_input=0, num_kv_shared_layers=0, pad_token_id=0,
        rope_parameters={"full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    )  # fmt: skip
    theirs = tiny.redraw(AutoModel.from_config(body, attn_implementation="sdpa"), 3)
    layer, groups = theirs.layers[0], 1 if shared else 2
    layer.layer_scalar.fill_(0.8)
    target = tiny.make_target(vocab_size=11)
    drafter = tiny.make_drafter(
        target, num_hidden_layers=1, body="gemma4", key_is_value=shared, head_dim=8, num_key_value_heads=groups,
        hidden_act="gelu_pytorch_tanh", rope_parameters=dict(body.rope_parameters["full_attention"]),
    )  # fmt: skip
    drafter.layers[0].load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positions = torch.arange(3, 8).expand(2, 5)
    rope = theirs.rotary_emb(x, positions, "full_attention")
    mask = torch.ones(5, 5, dtype=torch.bool)[None, None]
    expected = layer(
        x.clone(), position_embeddings=rope, attention_mask=mask, shared_kv_states={}, position_ids=positions
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    ours = drafter.layers[0](x, drafter.rotary_emb(x, positions), Everything(), 0, None)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)


def test_facts_of_the_file_are_read():
    drafter = load_drafter(NAME)
    config = drafter.config
    assert (config.body, config.key_is_value, config.head_dim, config.num_key_value_heads) == ("gemma4", True, 16, 1)
    assert config.embed_scale == 48**0.5 and config.final_logit_softcapping == 30.0
    assert config.hidden_act == "gelu_pytorch_tanh" and config.rope_parameters["rope_type"] == "proportional"
    assert [float(layer.layer_scalar) for layer in drafter.layers] != [1.0, 1.0]


@pytest.mark.parametrize("arch", ["Gemma4DSparkModel", "Gemma4UnifiedDSparkModel"])
def test_both_architectures_are_known(arch, tmp_path):
    folder = edited_drafter(tmp_path, NAME, {"architectures": [arch], "model_type": "gemma4_unified_text"})
    assert AutoDrafter.from_pretrained(folder, target=load_target(NAME)).config.body == "gemma4"
    config = {"architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_text"}
    assert detect("x", config) == "eagle3-deepspec"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_k_eq_v": False}, r"attention_k_eq_v=False.*v_proj"),
        ({"num_global_key_value_heads": 2}, r"num_global_key_value_heads=2.*says 1"),
        ({"enable_moe_block": True}, "enable_moe_block=True.*dense target"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8"),
    ],
)
def test_contradictions_and_variants_that_were_never_built_are_refused(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(edited_drafter(tmp_path, NAME, config))


def test_a_gemma4_eagle3_file_loads_and_drafts(tmp_path):
    """No recorded run exists for this layout: the body is held to transformers' layer above, the recursion to
    EAGLE-3's."""
    target = load_target(NAME)
    drafter = tiny.make_eagle3(
        target, target_layer_ids=[0, 1, 2], body="gemma4", key_is_value=True, head_dim=16, num_key_value_heads=1,
        hidden_act="gelu_pytorch_tanh", own_embedding=True, own_head=True, embed_scale=48**0.5, final_logit_softcapping=30.0,
        intermediate_size=96,
    )  # fmt: skip
    config = json.loads((drafter_folder(NAME) / "config.json").read_text())
    config |= {
        "architectures": ["Gemma4Eagle3Model"], "target_layer_ids": [0, 1, 2], "num_hidden_layers": 1,
        "layer_types": ["full_attention"], "ttt_length": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {k: t.float().contiguous() for k, t in drafter.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoDrafter.from_pretrained(tmp_path, target=target)
    assert type(loaded.config) is Eagle3Config and loaded.config.body == "gemma4" and loaded.config.chain_length == 4
    batch = tiny.padded([torch.tensor([5, 6, 7, 8]), torch.tensor([9, 4])])
    args = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(target.generate(**batch, **args, assistant_model=loaded), target.generate(**batch, **args))


@torch.no_grad()
def drafts(drafter):
    cache = drafter.new_cache(torch.zeros(1, dtype=torch.long))
    features = torch.randn(1, 4, 144, generator=torch.Generator().manual_seed(2))
    drafter.extend(cache, features, torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))
    return drafter.start(cache, torch.tensor([7]), None).base


def test_deepspecs_layout_brings_it_back_and_others_refuse_it(tmp_path):
    target, drafter = load_target(NAME), load_drafter(NAME)
    export(drafter, tmp_path / "out", "deepspec")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((drafter_folder(NAME) / "config.json").read_text())
    for key in (
        "architectures",
        "attention_k_eq_v",
        "global_head_dim",
        "num_global_key_value_heads",
        "hidden_activation",
    ):
        assert config[key] == original[key], key
    again = AutoDrafter.from_pretrained(tmp_path / "out", target=target)
    assert torch.equal(drafts(again), drafts(drafter))
    for layout in ("speculators", "sglang", "zlab"):
        with pytest.raises(ValueError, match="Gemma 4 body"):
            export(drafter, tmp_path / "no", layout)


def test_a_borrowed_embedding_is_scaled_once(tmp_path):
    target, drafter = load_target(NAME), load_drafter(NAME)
    before = drafts(drafter)
    assert borrow(drafter) == ["embed_tokens", "lm_head"] and drafter.config.embed_scale == 1.0
    torch.testing.assert_close(drafts(drafter), before, atol=1e-5, rtol=1e-5)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path, target=target)
    torch.testing.assert_close(drafts(again), before, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- targets

TARGETS = {
    "keys are values": dict(attention_k_eq_v=True),
    "layers that read another's keys, embeddings per layer": dict(
        attention_k_eq_v=False, num_kv_shared_layers=2, hidden_size_per_layer_input=6, vocab_size_per_layer_input=tiny.V,
    ),
    "experts": dict(
        attention_k_eq_v=False, enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS)
def test_every_family_writes_a_gemma4_targets_plain_text(options):
    rope = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    shape = dict(
        num_key_value_heads=2, num_global_key_value_heads=1, head_dim=8, global_head_dim=12, hidden_size_per_layer_input=0,
        num_kv_shared_layers=0, sliding_window=4, rope_parameters=rope, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    target = tiny.make_target("gemma4_text", **{**shape, **options})
    batch = tiny.padded([torch.tensor(p) for p in ([3, 4, 5, 6, 7, 8, 9], [8, 3], [5, 5, 4, 7])])
    args = dict(max_new_tokens=14, do_sample=False)
    plain = target.generate(**batch, **args)
    for make in (tiny.make_drafter, tiny.make_eagle3, tiny.make_mtp):
        for speculation in (SpeculationConfig(), SpeculationConfig(tree="auto", tree_budget=6)):
            assert torch.equal(
                target.generate(**batch, **args, assistant_model=make(target), speculation=speculation), plain
            )
    if Version(transformers.__version__) < Version("5.18"):
        return  # no stock engine
    alone, stock = dict(input_ids=batch["input_ids"][:1]), SpeculationConfig(engine="stock")
    for drafter in (tiny.make_drafter(target), tiny.make_drafter(target, target_layer_ids=[0, 2])):
        if options.get("num_kv_shared_layers") and 2 in drafter.config.target_layer_ids:
            with pytest.raises(ValueError, match="from 2 on for the last token alone.*engine='own'"):
                target.generate(**alone, **args, assistant_model=drafter, speculation=stock)
        else:
            assert torch.equal(target.generate(**alone, **args, assistant_model=drafter, speculation=stock), plain[:1])
