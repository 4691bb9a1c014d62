"""The hook: drafters of ours reach our loop, everything else is left to transformers, and nothing stays behind."""

import copy
import threading

import pytest
import tiny
import torch
from transformers import GenerationConfig, GenerationMixin

import hf_dspark
from hf_dspark import SpeculationConfig
from hf_dspark.decoding import hook


@pytest.fixture
def without_hook():
    hf_dspark.uninstall()
    yield
    hf_dspark.install()


@pytest.fixture
def no_loop(monkeypatch):
    monkeypatch.setattr(hook, "speculative_generate", lambda *a, **k: pytest.fail("reached our loop"))


def forward_hooks(model):
    return [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


# ---------------------------------------------------------------------- neutrality


def test_an_ordinary_assistant_takes_transformers_own_path(llama, no_loop):
    assistant = tiny.make_target(num_hidden_layers=1, seed=7, **tiny.GQA)
    out = llama.target.generate(
        llama.prompts[0][None], assistant_model=assistant, max_new_tokens=tiny.NEW, do_sample=False
    )
    assert out[0].tolist() == llama.texts[0]


def test_prompt_lookup_takes_transformers_own_path(llama, no_loop):
    out = llama.target.generate(
        llama.prompts[0][None], prompt_lookup_num_tokens=3, max_new_tokens=tiny.NEW, do_sample=False
    )
    assert out[0].tolist() == llama.texts[0]


@pytest.mark.parametrize("options", [{}, dict(num_beams=2), dict(do_sample=True), dict(prompt_lookup_num_tokens=2)])
def test_calls_without_a_drafter_are_what_they_were(llama, options, without_hook):
    def run():
        torch.manual_seed(1)
        return llama.target.generate(llama.prompts[2][None], max_new_tokens=8, **{"do_sample": False, **options})

    before = run()
    hf_dspark.install()
    assert run().equal(before)


def test_errors_of_transformers_own_validation_stay(llama):
    with pytest.raises(ValueError, match="num_return_sequences|assisted"):
        llama.target.generate(
            llama.prompts[0][None], assistant_model=tiny.make_target(num_hidden_layers=1, **tiny.GQA), do_sample=True,
            num_return_sequences=2, max_new_tokens=2,
        )  # fmt: skip


def test_our_knobs_without_our_drafter_are_refused(llama):
    for assistant in (None, tiny.make_target(num_hidden_layers=1, **tiny.GQA)):
        with pytest.raises(ValueError, match="assistant_model=drafter"):
            llama.target.generate(
                llama.prompts[0][None], assistant_model=assistant, speculation=SpeculationConfig(), max_new_tokens=2
            )


# ---------------------------------------------------------------------- in and out


def test_uninstall_restores_what_was_there_and_install_is_idempotent(without_hook):
    bare = {name: getattr(GenerationMixin, name) for name in hook._WRAPPERS}
    assert not any(getattr(f, hook.MARK, False) for f in bare.values())
    hf_dspark.install()
    hooked = {name: getattr(GenerationMixin, name) for name in hook._WRAPPERS}
    hf_dspark.install()
    assert {name: getattr(GenerationMixin, name) for name in hook._WRAPPERS} == hooked != bare
    hf_dspark.uninstall()
    hf_dspark.uninstall()
    assert {name: getattr(GenerationMixin, name) for name in hook._WRAPPERS} == bare


def test_attach_works_without_the_hook_and_for_one_model_only(llama, fresh_target, without_hook):
    target, cls = fresh_target, type(fresh_target)
    assert hf_dspark.attach(target) is target
    expected = tiny.plain(target, llama.prompts[0], max_new_tokens=8)
    out = target.generate(
        llama.prompts[0][None], assistant_model=tiny.make_drafter(target), max_new_tokens=8, do_sample=False
    )
    assert out[0].tolist() == expected
    assert type(target).__name__ == cls.__name__ and isinstance(target, cls)
    assert hf_dspark.attach(target) is target and type(target).__bases__ == (cls,), "attaching twice changes nothing"
    with pytest.raises((AttributeError, TypeError, ValueError)):
        llama.target.generate(llama.prompts[0][None], assistant_model=tiny.make_drafter(llama.target), max_new_tokens=2)


def test_an_attached_target_can_be_copied_and_saved(fresh_target, llama, tmp_path, without_hook):
    target = hf_dspark.attach(fresh_target)
    twin = copy.deepcopy(target)
    args = dict(max_new_tokens=6, do_sample=False)
    a, b = (t.generate(llama.prompts[0][None], assistant_model=tiny.make_drafter(t), **args) for t in (target, twin))
    assert a.equal(b)
    target.save_pretrained(tmp_path)
    assert type(target).__base__.from_pretrained(tmp_path).config.architectures == ["LlamaForCausalLM"]


def test_a_drafter_without_the_hook_says_what_is_missing(llama, without_hook):
    with pytest.raises(AttributeError, match="import hf_dspark"):
        llama.target.generate(llama.prompts[0][None], assistant_model=tiny.make_drafter(llama.target), max_new_tokens=2)


# ---------------------------------------------------------------------- nothing stays behind


def test_neither_target_nor_configurations_change(fresh_target, llama):
    target, drafter = fresh_target, tiny.make_drafter(fresh_target)
    config, given = target.generation_config.to_dict(), GenerationConfig(max_new_tokens=5, do_sample=False)
    before = given.to_dict()
    drafted = {k: v.clone() for k, v in drafter.state_dict().items()}
    target.generate(
        llama.prompts[0][None], generation_config=given, assistant_model=drafter,
        speculation=SpeculationConfig(confidence_threshold=0.2),
    )  # fmt: skip
    assert target.generation_config.to_dict() == config and given.to_dict() == before
    assert given.speculation is None and target.generation_config.speculation is None
    assert drafter.speculation == SpeculationConfig()
    assert all(v.equal(drafted[k]) for k, v in drafter.state_dict().items())
    assert not forward_hooks(target)
    assert "_get_candidate_generator" not in target.__dict__


class Boom(RuntimeError):
    pass


def boom(*args, **kwargs):
    raise Boom


@pytest.mark.parametrize("where", ["processor", "criterion", "streamer", "drafter", "target"])
def test_hooks_are_removed_after_an_exception_and_the_next_call_is_right(fresh_target, llama, where, monkeypatch):
    target, drafter, options = fresh_target, tiny.make_drafter(fresh_target), {}
    if where == "processor":
        options = dict(logits_processor=[lambda ids, scores: boom() if ids.shape[1] > 10 else scores])
    elif where == "criterion":
        options = dict(stopping_criteria=[boom])
    elif where == "streamer":
        options = dict(streamer=type("S", (), {"put": boom, "end": boom})())
    else:
        broken = drafter if where == "drafter" else target.get_decoder().layers[2]
        monkeypatch.setattr(broken, "start" if where == "drafter" else "forward", boom)
    with pytest.raises(Boom):
        target.generate(llama.prompts[0][None], assistant_model=drafter, max_new_tokens=8, do_sample=False, **options)
    assert not forward_hooks(target)
    monkeypatch.undo()
    out = target.generate(llama.prompts[0][None], assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert out[0].tolist() == tiny.plain(target, llama.prompts[0], max_new_tokens=8)


def test_hooks_of_the_users_own_stay(fresh_target, llama):
    seen = []
    handle = fresh_target.get_decoder().layers[0].register_forward_hook(lambda *a: seen.append(1))
    fresh_target.generate(
        llama.prompts[0][None], assistant_model=tiny.make_drafter(fresh_target), max_new_tokens=3, do_sample=False
    )
    assert seen and forward_hooks(fresh_target)
    handle.remove()


def test_threads_that_share_a_target_do_not_see_each_others_states(llama):
    ready, results = threading.Barrier(3), {}

    def work(row):
        drafter = tiny.make_drafter(llama.target, seed=row)
        ready.wait()
        for _ in range(3):
            out = llama.target.generate(
                llama.prompts[row][None], assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False
            )
            results.setdefault(row, []).append(out[0].tolist())

    threads = [threading.Thread(target=work, args=(row,)) for row in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {row: [llama.texts[row]] * 3 for row in range(3)}


# ---------------------------------------------------------------------- which knobs hold


def drafted(target, prompt, drafter, **kwargs):
    target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False, **kwargs)
    return drafter.last_speculation.draft_lengths[0]


def test_knobs_of_the_call_beat_transformers_own_which_beat_the_stored_ones(llama):
    prompt, drafter = llama.prompts[0][None], tiny.make_drafter(llama.target)
    assert drafted(llama.target, prompt, drafter)[0] == 5
    drafter.speculation = SpeculationConfig(num_draft_tokens=4)
    assert drafted(llama.target, prompt, drafter)[0] == 4
    assert drafted(llama.target, prompt, drafter, num_assistant_tokens=3)[0] == 3
    assert drafted(llama.target, prompt, drafter, generation_config=GenerationConfig(num_assistant_tokens=2))[0] == 2
    knobs = SpeculationConfig(num_draft_tokens=1)
    assert drafted(llama.target, prompt, drafter, num_assistant_tokens=3, speculation=knobs)[0] == 1


def test_a_threshold_of_transformers_own_is_honoured(llama):
    prompt, drafter = llama.prompts[0][None], tiny.make_drafter(llama.target)
    free = drafted(llama.target, prompt, drafter)
    cut = drafted(llama.target, prompt, drafter, assistant_confidence_threshold=0.6)
    same = drafted(llama.target, prompt, drafter, speculation=SpeculationConfig(confidence_threshold=0.6))
    assert cut == same != free
