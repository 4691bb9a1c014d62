"""Loading from the Hub by id and revision, pushing to it, and what happens when the network or the files are bad."""

import shutil
from copy import deepcopy

import pytest
import torch
from golden import drafter_folder, load_drafter, load_target
from hub_server import Hub, commit_of
from huggingface_hub import constants

from hf_dspark.auto import AutoDrafter

NAME, REPO = "speculators-dspark-vanilla-anchor", "someone/tiny-drafter"


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # made once, with the endpoint of then
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server.add(REPO, drafter_folder(NAME))
    yield server
    server.close()


def load(tmp_path, **kwargs):
    return AutoDrafter.from_pretrained(REPO, target=load_target(NAME), cache_dir=tmp_path / "cache", **kwargs)


def same(drafter, other):
    ours, theirs = drafter.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_repo_loads_by_its_id_and_then_without_the_network(hub, tmp_path):
    hub.repos[REPO]["main"]["training_state.rank0.pt"] = b"gigabytes"
    assert same(load(tmp_path), load_drafter(NAME))
    fetched = {r.rsplit("/", 1)[1] for r in hub.requests if r.startswith("GET") and "/resolve/" in r}
    assert fetched == {"config.json", "model.safetensors"}  # config and weights, nothing else
    hub.requests.clear()
    assert same(load(tmp_path, local_files_only=True), load_drafter(NAME))
    assert not hub.requests


def test_revision_subfolder_and_token_reach_the_hub(hub, tmp_path):
    other = drafter_folder("zlab-dflash-b8")
    shutil.copytree(other, tmp_path / "tree" / "inner")
    hub.add(REPO, tmp_path / "tree", revision="v2")
    target = load_target("zlab-dflash-b8")
    drafter = AutoDrafter.from_pretrained(
        REPO, target=target, revision="v2", subfolder="inner", token="hf_secret", cache_dir=tmp_path / "cache"
    )
    assert same(drafter, load_drafter("zlab-dflash-b8")) and "Bearer hf_secret" in hub.tokens
    assert drafter.config.name_or_path == REPO and drafter.config._commit_hash == commit_of(hub.repos[REPO]["v2"])


def test_a_wrong_target_is_refused_before_the_weights_are_downloaded(hub, tmp_path):
    target = deepcopy(load_target(NAME))
    target.config.vocab_size = 50
    with pytest.raises(ValueError, match="vocab_size 97"):
        AutoDrafter.from_pretrained(REPO, target=target, cache_dir=tmp_path)
    assert not any("safetensors" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("repo", "kwargs", "words"),
    [
        ("someone/else", {}, "not a valid model identifier|Repository Not Found|not a local folder"),
        (REPO, {"revision": "v9"}, "v9"),
        (REPO, {"local_files_only": True}, "cached files"),
    ],
)
def test_what_is_not_there_is_named(hub, repo, kwargs, words, tmp_path):
    with pytest.raises(OSError, match=words):
        AutoDrafter.from_pretrained(repo, cache_dir=tmp_path, **kwargs)


def test_a_broken_download_is_never_loaded_and_can_be_repeated(hub, tmp_path):
    hub.faults["model.safetensors"] = "cut"
    with pytest.raises(OSError, match="model.safetensors|Consistency|size"):
        load(tmp_path)
    hub.faults.clear()
    assert same(load(tmp_path), load_drafter(NAME))


@pytest.mark.parametrize("own", [False, True])
def test_a_wrong_checksum_is_refused_and_the_file_forgotten(hub, own, tmp_path):
    if own:
        load_drafter(NAME).save_pretrained(tmp_path / "own")
        hub.add(REPO, tmp_path / "own")
    hub.faults["model.safetensors"] = "flip"
    with pytest.raises(OSError, match=r"model\.safetensors.*checksum.*again"):
        load(tmp_path)
    hub.faults.clear()
    assert same(load(tmp_path), load_drafter(NAME))  # not served from the cache


def test_a_pushed_drafter_comes_back_the_same(hub, tmp_path):
    drafter = load_drafter(NAME)
    drafter.push_to_hub("me/pushed", token="hf_secret")
    assert {"config.json", "model.safetensors", "README.md"} <= hub.repos["me/pushed"]["main"].keys()
    target = load_target(NAME)
    assert same(AutoDrafter.from_pretrained("me/pushed", target=target, cache_dir=tmp_path), drafter)
    assert same(type(drafter).from_pretrained("me/pushed", cache_dir=tmp_path), drafter)
