"""AutoDrafter: our own format, where things are put, what is borrowed, and what is refused."""

import json
import shutil
from copy import deepcopy

import golden
import pytest
import torch
from golden import drafter_folder, load_drafter, load_target
from safetensors.torch import load_file, save_file

from hf_dspark.auto import AutoDrafter
from hf_dspark.modeling import DSparkDrafter, Eagle3Drafter, SpeculationConfig


def same(drafter, other):
    ours, theirs = drafter.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    return True


def logits(drafter):
    """Logits of the first draft after random features: what saving must not change."""
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = torch.randn(2, 5, width, generator=generator)
    tokens, valid = torch.randint(0, 90, (2, 5), generator=generator), torch.ones(2, 5, dtype=torch.bool)
    cache = drafter.new_cache(torch.zeros(2, dtype=torch.long))
    with torch.no_grad():
        seed = drafter.extend(cache, features, tokens, valid)
        return drafter.step(cache, drafter.start(cache, tokens[:, -1], seed), tokens[:, -1])[0]


@pytest.mark.parametrize("name", [*golden.BLOCKS, *golden.EAGLE3])
def test_a_saved_drafter_comes_back_the_same_through_either_door(name, tmp_path):
    drafter, target = load_drafter(name), load_target(name)
    drafter.speculation = SpeculationConfig(num_draft_tokens=3, loop_gate=-0.5, seed=7)
    drafter.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] in ("hf_dspark", "hf_eagle3") and "seed" not in stored["speculation"]
    again = AutoDrafter.from_pretrained(tmp_path, target=target)
    direct = type(drafter).from_pretrained(tmp_path).bind(target)
    assert type(again) is type(drafter) and same(again, drafter) and same(direct, drafter)
    assert torch.equal(logits(again), logits(drafter)) and torch.equal(logits(direct), logits(drafter))
    assert again.speculation == SpeculationConfig(num_draft_tokens=3, loop_gate=-0.5)
    assert again.config.to_dict() == direct.config.to_dict()


def test_sharded_own_files_load(tmp_path):
    drafter = load_drafter("deepspec-dspark-vanilla")
    drafter.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert same(AutoDrafter.from_pretrained(tmp_path), drafter)


@pytest.mark.parametrize("name", ["speculators-dspark-gated-bonus", "safeailab-eagle3-llama"])
def test_own_files_are_as_strict_as_published_ones(name, tmp_path):
    drafter = load_drafter(name)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for lost in tensors:
        save_file({k: v for k, v in tensors.items() if k != lost}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"missing: .*{lost}".replace(".", r"\.").replace(r"\.*", ".*")):
            AutoDrafter.from_pretrained(tmp_path)
    save_file(tensors | {"norm.weight": torch.ones(3), "other": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected: other; mismatched: .*norm\.weight"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["deepspec-dspark-vanilla", "safeailab-eagle3-llama"])
def test_a_wrong_target_of_an_own_file_is_refused_before_weights_are_opened(name, tmp_path):
    load_drafter(name).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    target = deepcopy(load_target(name))
    target.config.vocab_size = 98
    with pytest.raises(ValueError, match="vocab_size 97"):
        AutoDrafter.from_pretrained(tmp_path, target=target)


@pytest.mark.parametrize("tied", [False, True])
def test_a_reduced_vocabulary_survives_saving_with_tied_and_untied_targets(tied, tmp_path):
    target = deepcopy(load_target("speculators-dspark-vanilla-anchor"))
    if tied:
        target.config.tie_word_embeddings = True
        target.lm_head.weight = target.model.embed_tokens.weight
    drafter = AutoDrafter.from_pretrained(drafter_folder("speculators-dspark-vanilla-anchor"), target=target)
    before = logits(drafter)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path, target=target)
    assert before.shape[1] == 72 and torch.equal(logits(again), before)
    assert not again.config.tie_word_embeddings and torch.equal(again.target_ids(), drafter.target_ids())


def test_dtype_and_device_follow_the_target_unless_told():
    folder, target = drafter_folder("zlab-dflash-b8"), load_target("zlab-dflash-b8")
    half = deepcopy(target).to(torch.bfloat16)
    assert AutoDrafter.from_pretrained(folder).dtype == torch.float32
    assert AutoDrafter.from_pretrained(folder, target=half).dtype == torch.bfloat16
    assert AutoDrafter.from_pretrained(folder, target=half, dtype=torch.float64).dtype == torch.float64
    assert AutoDrafter.from_pretrained(folder, dtype="bfloat16").dtype == torch.bfloat16
    for device_map in ("cpu", torch.device("cpu"), {"": "cpu"}):
        assert AutoDrafter.from_pretrained(folder, target=target, device_map=device_map).device.type == "cpu"


def test_the_drafter_comes_back_bound_in_eval_mode_and_knows_where_its_tensors_came_from():
    target, drafter = load_target("zlab-dflash-b8"), load_drafter("zlab-dflash-b8")
    assert drafter._bound["target"] is target and not drafter.training
    assert drafter.sources["embed_tokens.weight"] == drafter.sources["lm_head.weight"] == "target (borrowed)"
    assert drafter.sources["fc.weight"].endswith("drafter: fc.weight")
    assert drafter.sources.keys() == drafter.state_dict().keys() | {"embed_tokens.weight", "lm_head.weight"}
    own = load_drafter("deepspec-dspark-rnn")
    assert own.sources.keys() == own.state_dict().keys()
    assert own.sources["correction.w1.weight"].endswith("markov_head.markov_w1.weight")
    reduced = load_drafter("speculators-dflash-reduced")
    assert reduced.sources["d2t"].endswith("d2t") and reduced.sources.keys() >= reduced.state_dict().keys()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("smollm2", r"target='smollm2' is a name.*load_smollm2\(\)\[0\]"),
        ("Qwen/Qwen3-4B", r"AutoModelForCausalLM.from_pretrained\('Qwen/Qwen3-4B'\)"),
        (golden.ROOT, "is a name"),
        (load_target("zlab-dflash-b8").config, "target is a Qwen3Config.*pass the model itself"),
    ],
)
def test_a_target_that_is_no_loaded_model_is_refused(target, words):
    with pytest.raises(TypeError, match=words):
        AutoDrafter.from_pretrained(drafter_folder("zlab-dflash-b8"), target=target)


def test_subfolders_and_unknown_fields(tmp_path):
    shutil.copytree(drafter_folder("zlab-dflash-b8"), tmp_path / "inner" / "drafter")
    drafter = AutoDrafter.from_pretrained(tmp_path, subfolder="inner/drafter")
    assert same(drafter, load_drafter("zlab-dflash-b8"))
    with pytest.raises(TypeError, match="target_layers.*target_layer_ids"):
        AutoDrafter.from_pretrained(tmp_path, subfolder="inner/drafter", target_layers=[1, 3])


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    folder = golden.edited_drafter(tmp_path, "zlab-dflash-b8", {"auto_map": {"AutoModel": "evil.Evil"}})
    (folder / "evil.py").write_text("raise SystemExit('code from a checkpoint ran')")
    for trust in (False, True):
        assert isinstance(AutoDrafter.from_pretrained(folder, trust_remote_code=trust), DSparkDrafter)


def test_a_drafter_of_a_newer_version_asks_for_an_upgrade(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "hf_future"}')
    with pytest.raises(ValueError, match="hf_future.*upgrade"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_target_without_heads_and_instances_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match="no multi-token-prediction heads.*use AutoDrafter"):
        AutoDrafter.from_target(load_target("zlab-dflash-b8"))
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoDrafter()
    assert isinstance(load_drafter("deepspec-eagle3"), Eagle3Drafter)
