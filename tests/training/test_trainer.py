import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_drafter, make_target
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))  # the second process finds it the same way
from tiny_training import make_trainer, rows, weights

from hf_dspark.modeling import DSparkDrafter
from hf_dspark.training import ChatDataset, init_from_drafter, init_from_target, new_drafter
from hf_dspark.training.initialization import default_layer_ids
from hf_dspark.training.targets import FeatureCache, FrozenTarget

CHECKPOINTING = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))
ROOT = Path(__file__).parents[2]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("straight"))
    trainer.train()
    return weights(trainer), losses(trainer)


@pytest.mark.parametrize(
    "changes",
    [
        dict(per_device_train_batch_size=2, gradient_accumulation_steps=2),
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=4),
        dict(pack=True, max_length=30),
        dict(loss_chunk=4),
        {CHECKPOINTING: True},
    ],
    ids=["2 x 2", "1 x 4", "packed", "chunked", "checkpointed"],
)
def test_how_a_step_is_cut_up_changes_nothing(tmp_path, straight, changes):
    trainer = make_trainer(tmp_path, **changes)
    trainer.train()
    assert losses(trainer) == pytest.approx(straight[1], abs=1e-6)
    torch.testing.assert_close(weights(trainer), straight[0], rtol=0, atol=1e-6)


def test_two_processes_equal_one(tmp_path, straight):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    common = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).parent / "tiny_training.py"), str(tmp_path), str(tmp_path / "out.pt")]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(i), "LOCAL_RANK": str(i), "OMP_NUM_THREADS": "1"})
        for i in range(2)
    ]
    assert [p.wait(timeout=120) for p in started] == [0, 0]
    found, logged = torch.load(tmp_path / "out.pt")
    torch.testing.assert_close(found, straight[0], rtol=0, atol=1e-6)
    assert logged == pytest.approx(straight[1], abs=1e-6)


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path):
    """Over an epoch's end, into loop exposure, with drafters in a group: 8 steps = 4 + 4."""

    def run(folder, resume=None):
        target = make_target()
        group = {"a": make_drafter(target, block_size=3), "b": make_drafter(target, seed=7, block_size=4)}
        trainer = make_trainer(
            folder,
            group,
            target,
            ChatDataset(rows(12)),
            max_steps=8,
            save_strategy="steps",
            save_steps=4,
            loop_start=0.25,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(weights(whole), weights(again))
    assert losses(whole)[4:] == losses(again)[-4:]
    loaded = DSparkDrafter.from_pretrained(tmp_path / "whole" / "checkpoint-8" / "b", dtype=torch.float64)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in whole.named["b"].state_dict().items())


def test_drafters_of_a_group_train_as_if_alone(tmp_path):
    target = make_target()

    def drafters():
        return {
            "a": make_drafter(target, block_size=3),
            "b": make_drafter(target, seed=7, block_size=3, correction_head="none", confidence_head=False),
        }

    group = make_trainer(tmp_path, drafters(), target, max_grad_norm=0.0)
    group.train()
    for name, drafter in drafters().items():
        alone = make_trainer(tmp_path, drafter, target, max_grad_norm=0.0)
        alone.train()
        together = torch.cat([p.flatten() for p in group.named[name].parameters()])
        torch.testing.assert_close(together, weights(alone), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="share the target's features"):
        make_trainer(tmp_path, {"a": make_drafter(target), "b": make_drafter(target, target_layer_ids=[0])}, target)


def test_the_target_stays_frozen_and_out_of_checkpoints(tmp_path):
    target = make_target()
    before = {k: v.clone() for k, v in target.state_dict().items()}
    trainer = make_trainer(tmp_path, target=target)
    trainer.train()
    assert all(torch.equal(before[k], v) for k, v in target.state_dict().items())
    mine = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not mine & {id(p) for p in target.parameters()} and not target.training
    trainer.save_model(str(tmp_path / "saved"))
    saved = DSparkDrafter.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert saved.config.trained_length == 14 and saved.config.loop_exposure == 2
    assert set(saved.state_dict()) == set(trainer.model.state_dict())


def test_training_raises_acceptance_and_both_kinds_of_metrics_reach_the_history(tmp_path):
    """The target is nearly a lookup table, which a drafter learns within seconds."""
    target = make_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        target.lm_head.weight.mul_(4)
    data = []
    for start in range(1, 33):
        ids = target.generate(torch.tensor([[start, 5, start]]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        data.append({"input_ids": ids[0].tolist(), "prompt_len": 3})
    drafter = new_drafter(target, 60, num_hidden_layers=1, block_size=3, markov_rank=16, confidence_head=True)
    trainer = make_trainer(
        tmp_path, drafter, target, ChatDataset(data), max_steps=120, num_anchors=8, logging_steps=60, loop_exposure=0
    )
    trainer.decode_check = lambda drafter: {"decode_tau": 1.5}
    trainer.eval_dataset = trainer.train_dataset
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_accept_rate@1"] < 0.2 < 0.5 < after["eval_accept_rate@1"]
    assert after["eval_tau"] > before["eval_tau"] + 0.6
    last = trainer.state.log_history[-1]
    assert last["eval_decode_tau"] == 1.5 and last["eval_tau"] == after["eval_tau"]
    trained = next(entry for entry in reversed(trainer.state.log_history) if "loss" in entry)
    assert {"tau", "greedy_tau", "accept_rate@3", "confidence_error"} <= set(trained)


def test_a_feature_cache_changes_nothing_and_keeps_to_its_cap(tmp_path, straight, caplog):
    cached = make_trainer(tmp_path / "run", feature_cache=str(tmp_path / "cache"))
    cached.train()
    torch.testing.assert_close(weights(cached), straight[0], rtol=0, atol=1e-6)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 16
    again = make_trainer(tmp_path / "again", feature_cache=str(tmp_path / "cache"))
    again._target = NoForward(again._target)
    again.train()
    torch.testing.assert_close(weights(again), straight[0], rtol=0, atol=1e-6)
    packed = make_trainer(tmp_path / "packed", feature_cache=str(tmp_path / "cache"), pack=True, max_length=30)
    packed._target = NoForward(packed._target)
    packed.train()
    torch.testing.assert_close(weights(packed), straight[0], rtol=0, atol=1e-6)
    packing = make_trainer(tmp_path / "packing", feature_cache=str(tmp_path / "other"), pack=True, max_length=30)
    packing.train()
    torch.testing.assert_close(weights(packing), straight[0], rtol=0, atol=1e-6)
    for file in (tmp_path / "cache").glob("*.safetensors"):
        alone, beside = load_file(file), load_file(tmp_path / "other" / file.name)
        assert all(torch.allclose(alone[name].double(), beside[name].double(), atol=1e-6) for name in alone)

    capped = make_trainer(tmp_path / "capped", feature_cache=str(tmp_path / "small"), feature_cache_gb=2e-5)
    capped.train()
    size = sum(f.stat().st_size for f in (tmp_path / "small").glob("*.safetensors"))
    assert 0 < size <= 2.2e4
    with pytest.raises(ValueError, match="holds"):
        FeatureCache(tmp_path / "small", 1, {"target": "another"})


class NoForward:
    """A frozen target whose body may not run any more."""

    def __init__(self, frozen):
        self.frozen = frozen

    def __getattr__(self, name):
        return getattr(self.frozen, name)

    def __call__(self, *args):
        raise AssertionError("everything is cached")


def test_the_stock_trainer_trains_on_cached_features(tmp_path):
    target = make_target()
    frozen, drafter = FrozenTarget(target, [0, 1]), make_drafter(target, block_size=3)
    data = []
    for row in rows(8):
        ids = torch.tensor(row["input_ids"][:9])
        labels = ids.masked_fill(torch.arange(9) < 3, -100)
        out = frozen(ids[None], labels[None], torch.arange(9)[None], False)
        data.append({"features": out.features[0], "input_ids": ids, "labels": labels})
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=10, learning_rate=1e-2, logging_steps=5,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(drafter, arguments, train_dataset=data)
    trainer.train()
    first, last = losses(trainer)
    assert last < first


def test_a_new_drafter_takes_what_fits_from_the_target():
    target = make_target()
    drafter = new_drafter(target, 60, torch.tensor([1, 4, 9]), num_hidden_layers=1, markov_rank=4, qk_norm=True)
    assert drafter.target_ids().tolist() == [1, 4, 9] and drafter.dtype == torch.float64
    taken = init_from_target(drafter, target)
    last = target.model.layers[-1]
    assert torch.equal(drafter.layers[0].self_attn.q_proj.weight, last.self_attn.q_proj.weight)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    assert "layers.0.mlp.up_proj.weight" in taken and not any("q_norm" in name for name in taken)
    other = new_drafter(target, 60, num_hidden_layers=1, markov_rank=4)
    copied = init_from_drafter(other, drafter)
    assert "fc.weight" in copied and "correction.w2.weight" not in copied  # 3 rows against 61
    assert torch.equal(other.fc.weight, drafter.fc.weight)


def test_default_taps_are_spread_evenly():
    assert default_layer_ids(36) == [1, 9, 17, 25, 33]
    assert default_layer_ids(30) == [1, 8, 14, 20, 27]
    assert default_layer_ids(12, 1) == [6]
