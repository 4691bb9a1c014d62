"""Training a multi-token-prediction head: its loss, how a step is cut up, resumption, and that it learns."""

import math
import sys
from pathlib import Path

import pytest
import torch
from tiny import GQA, make_mtp, make_target
from transformers import TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))
from tiny_training import make_trainer, rows, weights

from hf_dspark import MTPDrafter
from hf_dspark.training import ChatDataset, DecodeCheck, init_mtp, new_mtp
from hf_dspark.training.anchors import Step

CHECKPOINTING = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))


@pytest.fixture(scope="module")
def target():
    return make_target()


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def slow_loss(drafter, target, examples, stages):
    """Each chain decoded by itself: the mean over the first and the last stage of sum 0.6^k KL(p_k, q_k) / sum
    0.6^k."""
    K = drafter.config.max_block
    sums = {s: [0.0, 0.0] for s in {0, stages - 1}}
    for example in examples:
        ids, labels = torch.tensor(example["input_ids"]), example["labels"]
        features = target.model(ids[None]).last_hidden_state
        p = target(ids[None]).logits[0].log_softmax(-1)
        for a in range(1, len(ids) - 1):
            cache = drafter.new_cache(torch.tensor([0]))
            seed = drafter.extend(cache, features[:, :a], ids[None, 1 : a + 1], torch.ones(1, a, dtype=torch.bool))
            state = drafter.start(cache, ids[a, None], seed)
            for j in range(stages * K):
                if a + j + 1 >= len(ids) or labels[a + j + 1] == -100:
                    break
                logits, _, state = drafter.step(cache, state, ids[a + j, None])
                q = logits[0].log_softmax(-1)
                if j // K in sums:
                    kl, weight = (p[a + j].exp() * (p[a + j] - q)).sum(), 0.6 ** (j % K)
                    sums[j // K] = [sums[j // K][0] + weight * kl, sums[j // K][1] + weight]
    return sum(top / bottom for top, bottom in sums.values()) / len(sums)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("heads", "stages"), [(1, 1), (1, 2), (3, 1)])
def test_the_loss_of_a_step_equals_a_slow_twin(tmp_path, target, heads, stages, pack):
    drafter = make_mtp(target, heads=heads, chain_length=3)
    data = ChatDataset([{"input_ids": r["input_ids"], "prompt_len": n} for r, n in zip(rows(3), (1, 3, 4))])
    trainer = make_trainer(tmp_path, drafter, target, data, num_anchors=100, pack=pack, max_length=30)
    batch = trainer.data_collator([data[i] for i in range(3)])
    fast = trainer.compute_loss(drafter.train(), {**batch, "step": Step(stages)})
    torch.testing.assert_close(fast.detach(), slow_loss(drafter, target, data.examples, stages), rtol=1e-6, atol=0)


def trained(folder, target, **changes):
    trainer = make_trainer(folder, make_mtp(target, chain_length=3), target, **changes)
    trainer.train()
    return weights(trainer), losses(trainer)


def test_how_a_step_is_cut_up_changes_nothing(tmp_path, target):
    whole = trained(tmp_path / "a", target)
    for changes in (
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=4),
        dict(pack=True, max_length=30),
        {"loss_chunk": 4, CHECKPOINTING: True},
    ):
        found = trained(tmp_path / "b", target, **changes)
        assert found[1] == pytest.approx(whole[1], abs=1e-6)
        torch.testing.assert_close(found[0], whole[0], rtol=0, atol=1e-6)


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path, target):
    def run(folder, resume=None):
        trainer = make_trainer(folder, make_mtp(target, chain_length=3), target, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(again)) and losses(whole)[2:] == losses(again)[-2:]
    loaded = MTPDrafter.from_pretrained(tmp_path / "whole" / "checkpoint-4", dtype=torch.float64)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in whole.model.state_dict().items())


def test_the_weights_of_drafts_are_fastmtps_unless_given(tmp_path, target):
    drafter = make_mtp(target)
    for changes, expected in (({}, 0.6), (dict(step_decay=0.5), 0.5)):
        objective = make_trainer(tmp_path, target=target, **changes).args.objective(drafter)
        assert math.exp(-1 / objective.decay) == pytest.approx(expected) and (objective.ce, objective.distill) == (
            0.0,
            1.0,
        )


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("llama", {}), ("qwen3_moe", dict(**GQA, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16))],
)
def test_a_head_that_starts_from_the_target_takes_its_last_layer_and_learns(model_type, options, tmp_path):
    target = make_target(model_type, **options)
    drafter = new_mtp(target, chain_length=2)
    assert drafter.config.step_decay == 0.6 and drafter.dtype == torch.float64
    taken = init_mtp(drafter, target)
    names = {f"layers.0.block.{name}" for name, _ in target.model.layers[-1].named_parameters()}
    assert names | {"layers.0.post_norm.weight"} < set(taken)
    assert all(target.config.vocab_size not in t.shape for t in drafter.state_dict().values())
    embedding, state = drafter.layers[0].eh_proj.weight.detach().chunk(2, 1)
    assert state.diagonal().min() > 0.8 > embedding.diagonal().max(), "the projection lets the state through"
    data = ChatDataset(rows())
    trainer = make_trainer(tmp_path, drafter, target, data, max_steps=30, loop_exposure=0, logging_steps=10)
    trainer.eval_dataset, trainer.decode_check = data, DecodeCheck(target, [[3, 5, 7]], 8)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_tau"] > before["eval_tau"] + 0.1 and after["eval_decode_tau"] >= 1
