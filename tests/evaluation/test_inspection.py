"""Inspection names what is wrong with drafters broken on purpose, and finds nothing wrong with a whole one."""

import pytest
import tiny
import tiny_chat
import torch

from hf_dspark import DSparkConfig, DSparkDrafter, SpeculationConfig
from hf_dspark.evaluation import inspection
from hf_dspark.evaluation.inspection import clearly_better, describe, diagnose, expected_drafts, judge, variant


def rebuilt(drafter, target=None, tensors=None, **changes):
    """A drafter as if loaded from a file with these facts and tensors in it."""
    config = DSparkConfig.from_dict({**drafter.config.to_dict(), **changes})
    state = {k: v.clone() for k, v in drafter.state_dict().items()} | (tensors or {})
    new = DSparkDrafter.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return new.bind(target or tiny_chat.trained().target).eval()


def found(drafter, target=None):
    target = target or tiny_chat.trained().target
    return diagnose(target, drafter, tiny_chat.trained().prompts[:2], new_tokens=30, anchors=16)


def other_target():
    target = tiny.make_target(seed=7, **tiny.TARGETS["llama"][2], num_hidden_layers=4).float()
    generator = torch.Generator().manual_seed(8)
    for p in target.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.15, generator=generator)
    return target


def permuted_head(target):
    weight = target.get_output_embeddings().weight.detach()
    return weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))].clone()


def test_a_whole_drafter_fits():
    diagnosis = found(tiny_chat.trained().drafter)
    assert diagnosis.verdict == "fits" and not diagnosis.changes
    assert diagnosis.readings[0].name == "as loaded" and diagnosis.readings[0].tau > 4


@pytest.mark.parametrize(("fault", "verdict", "changes", "words"), [
    (dict(sample_from_anchor=False), "slots", dict(sample_from_anchor=True), "sample_from_anchor=True"),
    (dict(target_layer_ids=[1, 2]), "layers", dict(target_layer_ids=[0, 1]), "one too high"),
    (dict(target_layer_ids=[-1, 0]), "layers", dict(target_layer_ids=[0, 1]), "one too low"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "rope", dict(rope_theta=1e4), "rope_theta to 10000"),
    (dict(own_head=True), "head", dict(head=True), "own_head=False"),
])  # fmt: skip
def test_a_fault_is_named_with_what_to_do_about_it(fault, verdict, changes, words):
    target, drafter, _ = tiny_chat.trained()
    tensors = {"lm_head.weight": permuted_head(target)} if "own_head" in fault else {}
    diagnosis = found(rebuilt(drafter, tensors=tensors, **fault))
    assert diagnosis.verdict == verdict and diagnosis.changes == changes and words in diagnosis.advice
    best = max(diagnosis.readings, key=lambda r: r.expected)
    assert best.changed == changes and best.tau > 4 > diagnosis.readings[0].tau


def test_two_faults_at_once_are_both_named():
    drafter = rebuilt(tiny_chat.trained().drafter, sample_from_anchor=False, target_layer_ids=[1, 2])
    assert found(drafter).verdict == "slots+layers"


def test_the_other_slot_convention_is_told_as_well():
    target, drafter, prompts = tiny_chat.trained(sample_from_anchor=False)
    assert diagnose(target, drafter, prompts[:2], new_tokens=30, anchors=16).verdict == "fits"
    broken = rebuilt(drafter, target, sample_from_anchor=True)
    assert diagnose(target, broken, prompts[:2], new_tokens=30, anchors=16).changes == dict(sample_from_anchor=False)


def test_another_targets_drafter_is_told_from_an_untrained_one():
    drafter, target = tiny_chat.trained().drafter, other_target()
    diagnosis = found(rebuilt(drafter, target, target_name="its/own"), target)
    assert diagnosis.verdict == "target" and "its/own" in diagnosis.advice and not diagnosis.changes
    with torch.random.fork_rng():
        fresh = DSparkDrafter(drafter.config).bind(tiny_chat.trained().target).eval()
    assert found(fresh).verdict == "untrained"


def test_too_little_training_is_told_from_another_target_by_the_run_record():
    drafter, target, prompts = tiny_chat.trained().drafter, other_target(), tiny_chat.trained().prompts[:2]

    def judged(name, **record):
        target.config._name_or_path = "this/target"
        return diagnose(target, rebuilt(drafter, target, target_name=name), prompts, 30, 16, record=record)

    same = judged(None, target="this/target", steps=12, examples=1400)
    assert (
        same.verdict == "undertrained" and "12 steps on 1,400 examples" in same.advice and "another" not in same.advice
    )
    assert judged("this/target").verdict == "undertrained"
    other = judged("its/own", target="its/own", steps=12)
    assert other.verdict == "target" and "its/own" in other.advice
    assert "or too little (its run record says 12 steps)" in other.advice
    unknown = judged(None)
    assert unknown.verdict == "target" and "another target, or too little" in unknown.advice


def test_what_the_judge_sees_is_what_decoding_does():
    target, drafter, prompts = tiny_chat.trained()
    (text,) = inspection.greedy_texts(target, prompts[:1], [0, 1], 30, block=4, most=99)
    accepted = dict(zip(text.anchors.tolist(), judge(drafter, text, [0, 1])[0].tolist(), strict=True))
    ids = torch.tensor(prompts[:1])
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, assistant_model=drafter,
        return_dict_in_generate=True, speculation=SpeculationConfig(),
    )  # fmt: skip
    anchor, pairs = len(prompts[0]), []
    for tokens, kept in zip(out.speculation.acceptance_lengths[0], out.speculation.accepted_lengths[0], strict=True):
        pairs.append((kept, accepted.get(anchor, kept)))
        anchor += tokens
    assert len(pairs) > 5 and all(a == b for a, b in pairs[:-1])  # the budget cuts the last


def test_recursive_drafters_can_be_judged_too():
    target = tiny.make_target(**tiny.TARGETS["llama"][2], num_hidden_layers=4).float()
    drafter = tiny.make_eagle3(target).float()
    diagnosis = diagnose(target, drafter, [[3, 4, 5], [6, 7]], new_tokens=20, anchors=8)
    assert diagnosis.verdict == "target"
    assert {"layer ids +1", "layer ids -1"} <= {r.name for r in diagnosis.readings}


def test_variants_share_weights_and_leave_the_drafter_as_it_was():
    drafter = tiny_chat.trained().drafter
    before = drafter.config.to_dict()
    other = variant(drafter, sample_from_anchor=False, rope_theta=5.0)
    assert all(a is b for a, b in zip(other.parameters(), drafter.parameters(), strict=True))
    assert drafter.config.to_dict() == before and other.config.rope_parameters["rope_theta"] == 5.0
    assert not torch.equal(other.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)


def test_expected_drafts_end_at_the_first_wrong_one():
    assert expected_drafts(torch.tensor([[0.5, 0.5], [0.0, 1.0]])).tolist() == [0.75, 0.0]


def test_a_small_or_uncertain_gain_is_no_clear_one():
    half, noise = torch.full((40, 3), 0.5), torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    assert (
        clearly_better(half + 0.1, half) and not clearly_better(half + 0.005, half) and not clearly_better(half, half)
    )
    mean = expected_drafts(noise).mean()  # a constant with the same mean is no better and no worse
    assert not clearly_better(noise, torch.full((40, 1), float(mean))) and not clearly_better(
        noise + 0.03, noise.flip(0)
    )
    assert clearly_better(half + 0.1, half[:, :2])


def test_answers_shorter_than_a_block_judge_nothing():
    target, drafter, prompts = tiny_chat.trained()
    with pytest.raises(ValueError, match="longer answers"):
        diagnose(target, drafter, prompts[:1], new_tokens=3)


def test_a_description_holds_every_tensor_and_its_source(tmp_path):
    drafter = tiny.make_drafter(tiny.make_target())
    drafter.sources = {"fc.weight": "file: fc.weight", "lm_head.weight": "target (borrowed)"}
    facts = describe(drafter)
    assert facts["tensors"]["fc.weight"]["source"] == "file: fc.weight"
    assert facts["tensors"]["norm.weight"]["source"] == "not recorded"
    assert facts["tensors"]["lm_head.weight"] == {"shape": None, "bytes": 0, "source": "target (borrowed)"}
    assert facts["bytes"] == 8 * facts["parameters"]  # float64, no buffers
    assert facts["drafts_per_stage"] == 5 and facts["correction_head"] == "markov"
