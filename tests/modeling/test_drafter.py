"""What all drafters share: the borrowed embedding and head, strict files, and refusals in words."""

import copy
import dataclasses
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from hf_dspark.modeling import DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter, SpeculationConfig

REDUCED = [0, 2, 5, 6, 8, 12, 15, 19, 22, 27, 28]


@pytest.fixture(params=["make_dspark", "make_eagle3"])
def make(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def hidden():
    return torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def reduce_to(drafter, ids):
    drafter.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    return drafter


# ---------------------------------------------------------------------- embedding and head


def test_own_and_borrowed_embedding_and_head_are_equal(make, target, hidden):
    borrowed, own = make(), make(own_embedding=True, own_head=True, bind=False)
    own.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    own.lm_head.weight.copy_(target.get_output_embeddings().weight)
    ids = torch.tensor([[1, 28], [0, 7]])
    assert torch.equal(own.embed(ids), borrowed.embed(ids))
    assert torch.equal(own.head(hidden), borrowed.head(hidden))


def test_a_reduced_head_gives_the_kept_columns_whatever_module_the_target_has(make, target, hidden):
    drafter = reduce_to(make(draft_vocab_size=11), REDUCED)
    kept = target.lm_head(hidden)[..., REDUCED]
    assert drafter.target_ids().tolist() == REDUCED
    assert drafter.target_ids(torch.tensor([[10, 1]])).tolist() == [[28, 2]]
    torch.testing.assert_close(drafter.head(hidden), kept)

    class LowRank(nn.Module):
        """A head with an adapter around it, as PEFT leaves it."""

        def __init__(self, base):
            super().__init__()
            self.base_layer, self.weight = base, base.weight
            self.delta = torch.randn(29, 16, dtype=torch.float64)

        def forward(self, x):
            return self.base_layer(x) + x @ self.delta.T

    wrapped = LowRank(target.lm_head)
    adapted = SimpleNamespace(
        config=target.config, get_input_embeddings=target.get_input_embeddings, get_output_embeddings=lambda: wrapped
    )
    torch.testing.assert_close(drafter.bind(adapted).head(hidden), wrapped(hidden)[..., REDUCED])
    torch.testing.assert_close(make(bind=False).bind(adapted).head(hidden), wrapped(hidden))


def test_embeddings_are_scaled_and_logits_capped_as_the_config_says(make, target, hidden):
    drafter = make(embed_scale=4.0, final_logit_softcapping=0.5)
    ids = torch.tensor([3, 9])
    assert torch.equal(drafter.embed(ids), 4 * target.get_input_embeddings().weight[ids])
    torch.testing.assert_close(drafter.head(hidden), 0.5 * torch.tanh(target.lm_head(hidden) / 0.5))


def test_logits_are_float32_at_least(make, target, hidden):
    low = make(own_head=True, own_embedding=True).to(torch.bfloat16)
    assert low.head(hidden.bfloat16()).dtype == torch.float32
    assert make().head(hidden).dtype == torch.float64


def test_what_is_borrowed_is_no_part_of_the_drafter(make, target):
    drafter = make()
    names = set(drafter.state_dict()) | {name for name, _ in drafter.named_modules()}
    assert not any("lm_head" in name or "embed_tokens" in name or "target" in name for name in names)
    assert not {p.data_ptr() for p in drafter.parameters()} & {p.data_ptr() for p in target.parameters()}


# ---------------------------------------------------------------------- targets


def test_binding_twice_changes_nothing_and_binding_anew_borrows_from_the_new_one(make, target, hidden):
    drafter = reduce_to(make(draft_vocab_size=11), REDUCED)
    drafter.head(hidden)
    rows = drafter._bound["rows"]
    assert drafter.bind(target) is drafter and drafter._bound["rows"] is rows
    assert (drafter.config.eos_token_id, drafter.config.pad_token_id, drafter.config.bos_token_id) == (2, 0, 1)
    other = LlamaForCausalLM(target.config).double()
    torch.testing.assert_close(drafter.bind(other).head(hidden), other.lm_head(hidden)[..., REDUCED])


@pytest.mark.parametrize(
    "ours, words",
    [
        (dict(vocab_size=30), "vocab_size 30, and llama has 29"),
        (dict(target_hidden_size=8), r"hidden size \(target_hidden_size\) 8, and llama has 16"),
        (dict(num_target_layers=6), r"number of layers \(num_target_layers\) 6, and llama has 4"),
        (dict(hidden_size=24, target_hidden_size=16), r"borrowed \(hidden_size\) 24, and llama has 16"),
        (
            dict(num_target_layers=None, target_layer_ids=[1, 3]),
            r"taps layer 3, and a target of 4 layers has taps 0\.\.2",
        ),
        (dict(vocab_size=30, target_name="some/target"), r"made for some/target\): load the target it was trained for"),
    ],
)
def test_a_target_it_was_not_made_for_is_refused_in_words(make, ours, words):
    with pytest.raises(ValueError, match=words):
        make(**ours)


def test_another_hidden_size_is_welcome_when_embedding_and_head_are_its_own(make):
    drafter = make(hidden_size=24, target_hidden_size=16, own_embedding=True, own_head=True)
    assert drafter.project(torch.zeros(1, 32)).shape == (1, 24)


def test_a_mask_token_outside_the_targets_table_is_refused(make_dspark):
    with pytest.raises(ValueError, match="mask_token_id=29 lies outside the target's 29 embeddings: set mask_token_id"):
        make_dspark(mask_token_id=29)


def test_an_unbound_drafter_says_what_it_lacks(make, hidden):
    with pytest.raises(ValueError, match=r"borrows its head .* call drafter.bind\(target\)"):
        make(bind=False).head(hidden)
    with pytest.raises(ValueError, match=r"borrows its embedding .* call drafter.bind\(target\)"):
        make(bind=False).embed(torch.tensor([1]))


def test_without_the_library_generate_learns_what_to_install(make):
    with pytest.raises(AttributeError, match="pip install hf-dspark"):
        getattr(make(), "generation_config")  # noqa: B009
    assert not make().can_generate()


# ---------------------------------------------------------------------- files

EVERYTHING = {
    "dspark": (
        DSparkDrafter,
        dict(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=4, window_from="anchor",
             correction_head="rnn", markov_rank=5, confidence_head=True, confidence_temperatures=[0.5, 2.0],
             draft_vocab_size=11, own_head=True, attention_bias=True),
    ),
    "eagle3": (
        Eagle3Drafter,
        dict(num_hidden_layers=2, fc_norm=True, fc_bias=True, norm_output=True, position_offset=1, chain_length=4,
             draft_vocab_size=11, own_embedding=True, own_head=True, attention_output_bias=True),
    ),
}  # fmt: skip


@pytest.fixture(params=EVERYTHING)
def saved(request, tmp_path):
    """A drafter with every part a file can hold, and the folder it was saved to."""
    cls, parts = EVERYTHING[request.param]
    drafter = reduce_to(request.getfixturevalue(f"make_{request.param}")(**parts), REDUCED)
    drafter.speculation = SpeculationConfig(num_draft_tokens=3, verification="block", seed=5)
    drafter.save_pretrained(tmp_path)
    return cls, drafter, tmp_path


def test_a_saved_drafter_comes_back_bit_for_bit(saved):
    cls, drafter, folder = saved
    again = cls.from_pretrained(folder, dtype=torch.float64)
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    skipped = {"eos_token_id", "pad_token_id", "bos_token_id", "_name_or_path"}
    mine, theirs = ({k: v for k, v in d.config.to_dict().items() if k not in skipped} for d in (drafter, again))
    assert mine == theirs
    assert again.config.max_block == drafter.config.max_block
    assert again.speculation == SpeculationConfig(num_draft_tokens=3, verification="block")  # a seed belongs to a call


def test_the_stored_file_has_nothing_of_the_target(saved):
    _, drafter, folder = saved
    assert set(load_file(folder / "model.safetensors")) == set(drafter.state_dict())
    assert json.loads((folder / "config.json").read_text())["model_type"].startswith("hf_")


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
        (lambda t: t.pop("d2t"), "missing: d2t"),
        (
            lambda t: t.update({"layers.7.mlp.up_proj.weight": torch.zeros(2)}),
            r"unexpected: layers\.7\.mlp\.up_proj\.weight",
        ),
        (lambda t: t.update({"fc.weight": torch.zeros(16, 8)}), r"mismatched: .*fc\.weight"),
    ],
)
def test_a_file_with_a_missing_extra_or_misshapen_tensor_is_refused_by_name(saved, edit, words):
    cls, _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"doesn't fit {cls.__name__} .*{words}"):
        cls.from_pretrained(folder)


def test_weights_in_memory_are_held_to_the_same(make_dspark, make_eagle3):
    for drafter in (make_dspark(), make_eagle3()):
        weights = {k: v for k, v in drafter.state_dict().items() if k != "norm.weight"}
        with pytest.raises(ValueError, match=r"missing: norm\.weight"):
            type(drafter).from_pretrained(None, config=drafter.config, state_dict=weights)


# ---------------------------------------------------------------------- configurations


@pytest.mark.parametrize("config", [DSparkConfig, Eagle3Config])
@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(target_layer_ids=[]), "is empty or repeats"),
        (dict(target_layer_ids=[1, 1]), "is empty or repeats"),
        (dict(target_layer_ids=[0, 7], num_target_layers=8), r"\[7\] lie outside -1\.\.6"),
        (dict(target_layer_ids=[-2]), r"\[-2\] lie outside"),
        (dict(vocab_size=10, draft_vocab_size=11), "draft_vocab_size=11 exceeds vocab_size=10"),
    ],
)
def test_fields_that_cannot_be_meant_are_refused(config, fields, words):
    with pytest.raises(ValueError, match=words):
        config(**fields)


@pytest.mark.parametrize(
    "config, fields, words",
    [
        (DSparkConfig, dict(correction_head="lstm"), "set one of"),
        (DSparkConfig, dict(block_size=1, sample_from_anchor=False), "leaves no slot that drafts"),
        (DSparkConfig, dict(correction_head="gated", markov_rank=0), "needs markov_rank >= 1"),
        (DSparkConfig, dict(num_hidden_layers=2, layer_types=["full_attention"]), "1 entries for 2 layers"),
        (DSparkConfig, dict(layer_types=["sliding_attention"]), "set sliding_window"),
        (Eagle3Config, dict(chain_length=0), "chain_length=0 drafts nothing"),
        (Eagle3Config, dict(norm_before_fc=True, fc_norm=True), "set one of them"),
        (Eagle3Config, dict(norm_output=True, norm_head=False), "set norm_head=True"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(config, fields, words):
    with pytest.raises(ValueError, match=words):
        config(**fields)


@pytest.mark.parametrize("config", [DSparkConfig, Eagle3Config])
def test_defaults_follow_from_one_another(config):
    c = config(vocab_size=50, hidden_size=32, num_attention_heads=4, target_layer_ids=(-1, 2), tie_word_embeddings=True)
    assert (c.draft_vocab_size, c.target_hidden_size, c.head_dim, c.num_key_value_heads) == (50, 32, 8, 4)
    assert c.target_layer_ids == [-1, 2] and c.max_block == 7
    assert c.tie_word_embeddings is False
    assert config(block_size=7, sample_from_anchor=False).max_block == (6 if config is DSparkConfig else 7)


@pytest.mark.parametrize("config", [DSparkConfig, Eagle3Config])
def test_the_older_spelling_of_rotary_parameters_is_read(config):
    scaling = {"rope_type": "linear", "factor": 2.0}
    old, new = config(rope_theta=5e5, rope_scaling=scaling), config(rope_parameters={"rope_theta": 5e5, **scaling})
    assert old.rope_parameters == new.rope_parameters == {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert config().rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(num_draft_tokens=-1), "0 for plain decoding"),
        (dict(num_draft_tokens=2.5), "only whole numbers"),
        (dict(num_draft_tokens="3"), "only whole numbers"),
        (dict(num_draft_tokens=True), "only whole numbers"),
        (dict(confidence_threshold=1.5), "set a probability"),
        (dict(confidence_threshold=float("nan")), "set a probability"),
        (dict(confidence_threshold="0.5"), "set a probability"),
        (dict(confidence_threshold=None), "set a probability"),
        (dict(loop_gate=float("nan")), "'auto' or None"),
        (dict(loop_gate=True), "'auto' or None"),
        (dict(seed=1.5), "only whole numbers"),
        (dict(max_draft_stages=2.0), "only whole numbers"),
        (dict(max_draft_stages=None), "only whole numbers"),
        (dict(verification="greedy"), "set one of"),
        (dict(engine="vllm"), "set one of"),
        (dict(scheduler="on"), "set one of"),
        (dict(loop_gate="always"), "'auto' or None"),
        (dict(max_draft_stages=0), "set at least 1"),
    ],
)
def test_knobs_out_of_range_or_of_another_type_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        SpeculationConfig(**fields)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_draft_token", "did you mean 'num_draft_tokens'"),
        ("verify", "'verification'"),
        ("xyz", "known are num_draft"),
    ],
)
def test_an_unknown_knob_is_named_with_the_nearest_known_ones(name, words):
    with pytest.raises(TypeError, match=f"{name!r}, which is no setting.*{words}"):
        SpeculationConfig(**{name: 1})
    knobs = SpeculationConfig(3, seed=5)
    assert pickle.loads(pickle.dumps(knobs)) == copy.deepcopy(knobs) == dataclasses.replace(knobs) == knobs


def test_knobs_of_a_newer_version_are_dropped():
    assert SpeculationConfig.from_dict({"engine": "stock", "telepathy": True}) == SpeculationConfig(engine="stock")
    assert SpeculationConfig.from_dict(None) == SpeculationConfig()
