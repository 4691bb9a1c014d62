"""A checkpoint loads whole or not at all, and the error names what is wrong with it."""

import json
import re
import shutil
from copy import deepcopy

import golden
import pytest
import torch
from golden import drafter_folder, edited_drafter, load_drafter, load_target
from safetensors.torch import load_file, save_file

from hf_dspark.auto import AutoDrafter

ALL = [*golden.BLOCKS, *golden.EAGLE3]
UP = "layers.0.mlp.up_proj.weight"


def load(folder, name, **kwargs):
    return AutoDrafter.from_pretrained(folder, target=load_target(name), **kwargs)


def refuses(folder, name, words, **kwargs):
    with pytest.raises(ValueError, match=words):
        load(folder, name, **kwargs)


def tensors_of(name):
    return load_file(drafter_folder(name) / "model.safetensors")


# ------------------------------------------------------------------ tensors


def without(lost):
    return lambda tensors: {k: v for k, v in tensors.items() if k != lost}


@pytest.mark.parametrize("name", ALL)
def test_every_single_missing_tensor_is_named(name, tmp_path):
    optional = {"t2d"} if "t2d" in tensors_of(name) else set()
    for lost in tensors_of(name).keys() - optional - {"d2t"}:
        folder = edited_drafter(tmp_path, name, tensors=without(lost))
        with pytest.raises(ValueError) as caught:
            load(folder, name)
        stem = re.sub(r"\.(weight|bias)$", "", lost)  # a lost weight may first be seen as a lost module
        assert lost in str(caught.value) or stem in str(caught.value), (lost, str(caught.value))


@pytest.mark.parametrize("name", ["deepspec-dspark-rnn", "specforge-domino-shift", "speculators-eagle3-v31"])
def test_a_renamed_tensor_is_named_twice(name, tmp_path):
    for lost in (UP, "norm.weight"):
        folder = edited_drafter(tmp_path, name, tensors=lambda t, lost=lost: t | {"other.weight": t.pop(lost)})
        refuses(folder, name, lost.replace(".", r"\."))
    folder = edited_drafter(tmp_path, name, tensors=lambda t: t | {"other.weight": t.pop(UP)})
    refuses(folder, name, r"missing layers\.0\.mlp\.up_proj\.weight; unknown other\.weight")


@pytest.mark.parametrize("name", ALL)
def test_an_unknown_tensor_is_named(name, tmp_path):
    folder = edited_drafter(tmp_path, name, tensors=lambda t: t | {"model.layers.0.new_gate.weight": torch.zeros(3)})
    refuses(folder, name, r"unknown model\.layers\.0\.new_gate\.weight")


@pytest.mark.parametrize("name", ALL)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name, tmp_path):
    down = "midlayer.mlp.down_proj.weight" if name.startswith("safeailab") else "layers.0.mlp.down_proj.weight"
    shape = list(tensors_of(name)[down].shape)
    folder = edited_drafter(tmp_path, name, tensors=lambda t: t | {down: torch.zeros(7, 5)})
    refuses(folder, name, re.escape(f"{down} has shape [7, 5] instead of {shape}"))


def test_a_reduced_vocabulary_needs_a_map_but_one_spelling_is_enough(tmp_path):
    name = "speculators-dspark-vanilla-anchor"
    whole = load_drafter(name)
    for lost in ("d2t", "t2d"):
        folder = edited_drafter(tmp_path, name, tensors=without(lost))
        assert torch.equal(load(folder, name).d2t, whole.d2t)
    folder = edited_drafter(tmp_path, name, tensors=lambda t: {k: v for k, v in t.items() if k not in ("d2t", "t2d")})
    refuses(folder, name, "no d2t")


def test_recomputed_buffers_are_not_asked_for_and_prefixes_are_stripped(tmp_path):
    def old_style(tensors):
        renamed = {f"model.{k}": v.clone() for k, v in tensors.items()}
        return renamed | {"model.rotary_emb.inv_freq": torch.ones(8)}

    folder = edited_drafter(tmp_path / "a", "deepspec-dspark-vanilla", tensors=old_style)
    loaded, whole = load(folder, "deepspec-dspark-vanilla"), load_drafter("deepspec-dspark-vanilla")
    assert_same(loaded, whole)

    def legacy_head(tensors):
        heads = ("prefix_gru.", "embed_proj.")
        return {f"logit_head.{k}" if k.startswith(heads) else k: v for k, v in tensors.items()}

    folder = edited_drafter(tmp_path / "b", "specforge-domino-shift", tensors=legacy_head)
    assert_same(load(folder, "specforge-domino-shift"), load_drafter("specforge-domino-shift"))

    folder = edited_drafter(
        tmp_path / "c", "zlab-dflash-b8", tensors=lambda t: t | {"model.fc.weight": t["fc.weight"] * 2}
    )
    refuses(folder, "zlab-dflash-b8", r"both .*fc\.weight and .*fc\.weight, which mean one tensor")


def facts(config):
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


def assert_same(drafter, other):
    ours, theirs = drafter.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert facts(drafter.config) == facts(other.config)


# ------------------------------------------------------------------ embedding and head


def test_a_head_and_embedding_of_the_file_are_kept_though_the_config_inherited_tied_weights(tmp_path):
    name = "deepspec-dspark-vanilla"
    ones = torch.ones(97, 48)
    folder = edited_drafter(tmp_path, name, {"tie_word_embeddings": True}, lambda t: t | {"lm_head.weight": ones})
    drafter = load(folder, name)
    assert drafter.config.own_head and drafter.config.own_embedding and not drafter.config.tie_word_embeddings
    assert torch.equal(drafter.lm_head.weight, ones)


def test_a_file_saved_tied_takes_its_embedding_as_head(tmp_path):
    name = "deepspec-dspark-vanilla"
    drafter = load(edited_drafter(tmp_path, name, {"tie_word_embeddings": True}, without("lm_head.weight")), name)
    assert torch.equal(drafter.lm_head.weight, drafter.embed_tokens.weight)


def test_a_lost_head_is_borrowed_only_on_request(tmp_path):
    name = "speculators-eagle3-llama"
    folder = edited_drafter(tmp_path, name, tensors=without("lm_head.weight"))
    refuses(folder, name, r"no tensor lm_head\.weight.*own_head=False")
    drafter = load(folder, name, own_head=False)
    assert drafter.sources["lm_head.weight"] == "target (borrowed)"
    assert "lm_head" not in dict(drafter.named_modules())


def test_files_that_bring_their_own_embedding_keep_it(tmp_path):
    name = "zlab-dflash-b8"
    table = load_target(name).get_input_embeddings().weight.detach() * 2
    drafter = load(edited_drafter(tmp_path, name, tensors=lambda t: t | {"embed_tokens.weight": table.clone()}), name)
    ids = torch.tensor([5, 7])
    assert torch.equal(drafter.embed(ids), table[ids]) and drafter.sources["lm_head.weight"] == "target (borrowed)"


def test_older_speculators_files_bring_the_embedding_and_newer_ones_may_bring_neither(tmp_path):
    name = "speculators-dspark-vanilla-anchor"
    table = load_target(name).get_input_embeddings().weight.detach().clone()
    older = load(edited_drafter(tmp_path / "a", name, tensors=lambda t: t | {"embed_tokens.weight": table}), name)
    assert older.config.own_embedding and older.config.own_head
    assert not load_drafter(name).config.own_embedding
    full = {
        "draft_vocab_size": 97,
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    lost = ("lm_head", "d2t", "t2d", "markov_head", "confidence_head")
    folder = edited_drafter(
        tmp_path / "b", name, full, lambda t: {k: v for k, v in t.items() if not k.startswith(lost)}
    )
    newer = load(folder, name)
    assert not newer.config.own_embedding and not newer.config.own_head and newer.config.draft_vocab_size == 97


def test_nothing_of_vocabulary_size_is_kept_when_it_is_borrowed():
    drafter = load_drafter("zlab-dflash-b8")
    assert all(97 not in p.shape for p in drafter.state_dict().values())


# ------------------------------------------------------------------ targets


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("field", "words"), [("vocab_size", "vocab_size 97"), ("hidden_size", "hidden size")])
def test_a_wrong_target_is_refused_before_any_weight_is_opened(name, field, words, tmp_path):
    shutil.copy(drafter_folder(name) / "config.json", tmp_path)  # no weights at all
    target = deepcopy(load_target(name))
    setattr(target.config, field, getattr(target.config, field) + 1)
    with pytest.raises(ValueError, match=words):
        AutoDrafter.from_pretrained(tmp_path, target=target)


@pytest.mark.parametrize("name", ["deepspec-dspark-rnn", "zlab-dflash-b8", "speculators-dspark-gated-bonus"])
def test_a_target_with_too_few_layers_is_refused_before_any_weight_is_opened(name, tmp_path):
    shutil.copy(drafter_folder(name) / "config.json", tmp_path)
    target = deepcopy(load_target(name))
    target.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="number of layers|deeper target"):
        AutoDrafter.from_pretrained(tmp_path, target=target)


def test_a_config_without_weights_says_which_files_it_looked_for(tmp_path):
    shutil.copy(drafter_folder("zlab-dflash-b8") / "config.json", tmp_path)
    with pytest.raises(OSError, match=r"no weights.*model\.safetensors.*pytorch_model\.bin"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("place", ["./nowhere", "nope/", "/no/where", "~/nowhere", "a/b/c", "..\\nowhere"])
def test_a_path_that_leads_nowhere_is_told_from_an_id_on_the_hub(place):
    with pytest.raises(OSError, match="there is no such folder.*owner/name: give a folder") as error:
        AutoDrafter.from_pretrained(place)
    assert str(error.value).startswith(place)


def test_a_folder_without_a_config_says_so_and_names_the_one_inside(tmp_path):
    with pytest.raises(OSError, match=r"no config\.json in it: give the folder"):
        AutoDrafter.from_pretrained(tmp_path)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    with pytest.raises(OSError, match="such as .*final"):
        AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"final.other.* no config\.json in it"):
        AutoDrafter.from_pretrained(tmp_path, subfolder="final/other")


# ------------------------------------------------------------------ files


def test_shards_and_pickles_load_like_one_safetensors_file(tmp_path):
    name, tensors = "deepspec-dspark-vanilla", tensors_of("deepspec-dspark-vanilla")
    whole, names = load_drafter(name), sorted(tensors)
    halves = {"1": names[::2], "2": names[1::2]}
    for kind, save in (("safetensors", save_file), ("bin", torch.save)):
        stem = "model" if kind == "safetensors" else "pytorch_model"
        for folder in (tmp_path / kind, tmp_path / f"{kind}-sharded"):
            folder.mkdir()
            shutil.copy(drafter_folder(name) / "config.json", folder)
        save(tensors, tmp_path / kind / f"{stem}.{kind}")
        shards = {key: f"{stem}-0000{part}-of-00002.{kind}" for part, keys in halves.items() for key in keys}
        for shard in set(shards.values()):
            save({k: tensors[k] for k in names if shards[k] == shard}, tmp_path / f"{kind}-sharded" / shard)
        index = tmp_path / f"{kind}-sharded" / f"{stem}.{kind}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
        assert_same(load(tmp_path / kind, name), whole)
        assert_same(load(tmp_path / f"{kind}-sharded", name), whole)
    index.write_text(json.dumps({"weight_map": shards | {"norm.weight": shards["fc.weight"]}}))
    refuses(tmp_path / "bin-sharded", name, r"promises tensors its shards don't hold: norm\.weight")


class Boom:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code from a checkpoint ran')",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    shutil.copy(drafter_folder("zlab-dflash-b8") / "config.json", tmp_path)
    torch.save({"fc.weight": torch.zeros(2), "evil": Boom()}, tmp_path / "pytorch_model.bin")
    refuses(tmp_path, "zlab-dflash-b8", "can't be read as weights")


def test_a_truncated_file_is_called_damaged(tmp_path):
    folder = edited_drafter(tmp_path, "zlab-dflash-b8")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    refuses(folder, "zlab-dflash-b8", "damaged or cut short")
