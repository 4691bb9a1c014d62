"""What people reported of other loops, as far as no other test here checks it already."""

import pytest
import tiny
import torch
from tiny import generated
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from hf_dspark.drafting.proposer import Proposer


def subclasses(cls):
    return [cls, *(s for c in cls.__subclasses__() for s in subclasses(c))]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_cache_is_ever_cropped(name, monkeypatch):
    """`crop` changed its meaning between releases and knows no rows."""
    for cls in (DynamicCache, *subclasses(CacheLayerMixin)):
        if "crop" in vars(cls):
            monkeypatch.setattr(cls, "crop", lambda *args: pytest.fail("cropped"))
    case = tiny.load_case(name)
    cache = DynamicCache(config=case.target.config)
    case.target.generate(
        **case.padded(), max_new_tokens=tiny.NEW, do_sample=False, assistant_model=tiny.good(case.texts),
        **{tiny.CACHE: cache},
    )  # fmt: skip
    assert cache.get_seq_length() == 9 + tiny.NEW - 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral window", "gemma3", "gpt_oss"])
def test_drafts_are_rejected_on_both_sides_of_a_windows_edge(name, attention):
    """Window 12, a prompt of 9: the first rejections fall inside the window, the later ones beyond."""
    model_type, default, changes = tiny.TARGETS[name]
    attention = default if name == "gpt_oss" else attention
    target = tiny.make_target(model_type, attention, **{**changes, "sliding_window": 12})
    prompts = [tiny.load_case("llama").prompts[i] for i in (0, 3)]
    texts = [tiny.plain(target, p, max_new_tokens=40) for p in prompts]
    for accepted in ([0, 2, 1, 5], [4, 0, 0, 7, 1]):
        drafter = tiny.accepting(texts, accepted)
        out = target.generate(**tiny.padded(prompts), assistant_model=drafter, max_new_tokens=40, do_sample=False)
        assert generated(out, 9, [40, 40]) == [text[-40:] for text in texts]
        assert drafter.last_speculation.accepted_lengths[0][: len(accepted)] == accepted


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_pads_on_the_left_change_neither_features_nor_positions(name, monkeypatch):
    """A position read from the buffer and not from the mask makes padded rows garbage, first for the drafter."""
    monkeypatch.setattr(Proposer, "PATIENCE", 1)
    case = tiny.load_case(name)
    prompt, length = case.prompts[2], len(case.prompts[2])
    batch = tiny.padded([prompt, torch.cat([prompt, prompt])[: length + 4]])
    seen = {}
    for kind, args in (("alone", dict(input_ids=prompt[None])), ("padded", batch)):
        drafter = tiny.good([case.texts[2]])
        case.target.generate(**args, assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False)
        first, *rounds = drafter.features
        seen[kind] = [first[0, : length - 1], *(f[0] for f in rounds)]
        stats = drafter.last_speculation
        seen[kind + " rounds"] = stats.acceptance_lengths[0]
    assert seen["padded rounds"] == seen["alone rounds"] and len(seen["alone"]) > 4
    states = case.target(torch.tensor([case.texts[2][:-1]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1], states[2]], -1)[0]
    place = length - 1
    close = dict(atol=1e-4, rtol=1e-4)  # Gemma's eager attention takes its softmax in float32
    torch.testing.assert_close(seen["padded"][0], expected[:place], **close)
    for kind in ("alone", "padded"):
        at, each = place, [1, *seen["alone rounds"]]
        assert len(seen[kind]) >= len(each)  # a last token fed alone is never drafted behind, and so never read
        for gained, fed in zip(each, seen[kind][1:]):
            torch.testing.assert_close(fed[:gained], expected[at : at + gained], **close)
            at += gained


def test_features_are_a_layers_output_before_the_final_norm_and_the_embedding_for_minus_one(llama, monkeypatch):
    monkeypatch.setattr(Proposer, "PATIENCE", 1)
    drafter = tiny.Scripted(lambda prefix, ahead: tiny.continuation(llama.texts, prefix), taps=[-1, 1, 0])
    llama.target.generate(llama.prompts[0][None], assistant_model=drafter, max_new_tokens=3, do_sample=False)
    states = llama.target(llama.prompts[0][None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[0], states[2], states[1]], -1)
    torch.testing.assert_close(drafter.features[0][:, :8], expected[:, :8], atol=1e-12, rtol=0)
    torch.testing.assert_close(drafter.features[1], expected[:, 8:], atol=1e-12, rtol=0)
