"""A target whose logits depend on other tokens of the forward is noticed before any text; rounding never is."""

import copy
import threading
import warnings

import pytest
import tiny
import torch

from hf_dspark import SpeculationConfig
from hf_dspark.decoding import selfcheck
from hf_dspark.decoding.selfcheck import SelfCheck, self_check
from hf_dspark.evaluation.exactness import check_exactness


def bidirectional(target):
    """Every token sees those behind it, as in an encoder."""
    layer = target.model.layers[1]

    def mixing(module, args, output):
        return output + 0.1 * output.mean(1, keepdim=True)

    layer.register_forward_hook(mixing)
    return target


def quantized():
    target = tiny.make_target(**tiny.GQA).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_never_fails_the_check(case, dtype):
    found = self_check(copy.deepcopy(case.target).to(dtype))
    assert found.passed
    assert found.ahead < 0.01


def test_a_target_whose_tokens_see_what_is_behind_them_is_refused_unless_trusted(fresh_target, llama):
    target = bidirectional(fresh_target)
    call = dict(assistant_model=tiny.oracle(llama.texts), max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="fails the self-check: with another token behind it.*trust_target=True"):
        target.generate(llama.prompts[0][None], **call)
    out = target.generate(llama.prompts[0][None], **call, speculation=SpeculationConfig(trust_target=True))
    assert out.shape[1] == len(llama.prompts[0]) + 4


def test_one_activation_scale_for_all_tokens_of_a_call_is_noticed():
    found = self_check(quantized())
    assert not found.passed
    assert found.ahead > 10 * found.most_ahead


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_encoders_show_in_the_check_as_well(dtype):
    encoder = tiny.make_target("xlm-roberta-xl", attention="eager", is_decoder=False)
    assert not self_check(encoder.to(dtype)).passed


def test_forwards_that_differ_only_in_how_many_tokens_they_hold_are_noticed(fresh_target):
    def louder(module, args, output):
        return output * (2 if output.shape[1] == 1 else 1)

    fresh_target.model.layers[1].register_forward_hook(louder)
    found = self_check(fresh_target)
    assert not found.passed
    assert found.ahead == 0
    assert "fed together and one by one" in str(found)


def test_a_single_near_tie_of_a_router_does_not_fail_the_check(fresh_target, monkeypatch):
    results = iter([(0.4, 0.3), (1e-6, 0.0)])
    monkeypatch.setattr(selfcheck, "_differences", lambda *args: next(results))
    assert self_check(fresh_target) == SelfCheck(1e-6, 0.0, *[2.0**-10, 2.0**-13])


# ---------------------------------------------------------------------- cost and traces


def calls(target):
    counted = []
    target.register_forward_pre_hook(lambda module, args: counted.append(1))
    return counted


def test_a_target_is_measured_once_and_again_when_it_is_built_otherwise(fresh_target):
    counted = calls(fresh_target)
    for _ in range(2):
        assert self_check(fresh_target).passed
        assert len(counted) == 6
    fresh_target.model.layers[1].mlp.down_proj = torch.nn.Identity()
    fresh_target.model.layers[1].mlp = torch.nn.Identity()
    assert self_check(fresh_target).passed
    assert len(counted) == 12


def test_nothing_is_kept_of_a_target_that_is_gone():
    before = len(selfcheck._checked)
    self_check(tiny.make_target(**tiny.GQA))
    assert len(selfcheck._checked) == before


def test_the_check_leaves_no_trace(fresh_target):
    fresh_target.train()
    fresh_target.model.layers[0].eval()
    modes = [m.training for m in fresh_target.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in fresh_target.modules()]
    weights, state = copy.deepcopy(fresh_target.state_dict()), torch.get_rng_state()
    drawing = fresh_target.model.layers[1].register_forward_hook(lambda *args: torch.rand(1) * 0 + args[2])
    self_check(fresh_target)
    drawing.remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in fresh_target.modules()] == modes
    assert all(p.grad is None for p in fresh_target.parameters())
    assert hooks[0] == len(fresh_target._forward_hooks) + len(fresh_target._forward_pre_hooks)
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), fresh_target.state_dict().values()))


def test_dropout_of_a_target_in_training_mode_is_no_finding():
    assert self_check(tiny.make_target(**tiny.GQA, attention_dropout=0.5).train()).passed


def test_a_compiled_forward_is_not_compiled_for_the_check(fresh_target):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    fresh_target.forward = torch.compile(fresh_target.forward, backend=backend)
    assert self_check(fresh_target).passed
    assert not compiled


def test_threads_measure_a_target_once(fresh_target):
    counted, found = calls(fresh_target), []
    threads = [threading.Thread(target=lambda: found.append(self_check(fresh_target))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(counted) == 6
    assert len(set(found)) == 1


def test_the_comparison_of_texts_names_a_failed_check(llama):
    target = bidirectional(tiny.make_target(**tiny.GQA))
    report = check_exactness(target, tiny.oracle(llama.texts), [p.tolist() for p in llama.prompts[:1]], 4)
    assert not report.self_check.passed
    assert check_exactness(llama.target, tiny.oracle(llama.texts), [[5, 6]], 4).self_check.passed


def test_trust_belongs_to_a_call_and_is_neither_stored_nor_read():
    assert "trust_target" not in SpeculationConfig(trust_target=True).to_dict()
    assert not SpeculationConfig.from_dict({"trust_target": True}).trust_target
