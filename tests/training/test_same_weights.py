"""What a run learns is a function of its data, its seed and its steps: nothing that happens beside them changes a
weight."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_training import RUN, make_trainer, rows, weights

from hf_dspark.training import ChatDataset
from hf_dspark.training.data import KeyedSampler

HERE = Path(__file__).parent


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(folder, resume=None, evaluate=False, **changes):
    """14 examples in steps of 4, over two epochs whose last step is short, into loop exposure."""
    data = ChatDataset(rows(14))
    trainer = make_trainer(folder, None, None, data, data if evaluate else None, **{**RUN, **changes})
    trainer.model.eval()  # as `from_pretrained` leaves it
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"), save_strategy="steps", save_steps=1)


def same(trainer, straight):
    assert torch.equal(weights(trainer), weights(straight))
    assert losses(trainer) == losses(straight)[-len(losses(trainer)) :]


def test_evaluation_every_step_changes_nothing(tmp_path, straight):
    trainer = run(tmp_path, evaluate=True, eval_strategy="steps", eval_steps=1)
    same(trainer, straight)
    assert sum("eval_tau" in entry for entry in trainer.state.log_history) == RUN["max_steps"]


def test_the_estimate_changes_nothing(tmp_path, straight):
    same(run(tmp_path, skip_estimate=True), straight)


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_run_resumed_before_at_and_after_the_start_of_loops_changes_nothing(tmp_path, straight, step):
    same(run(tmp_path, resume=f"{straight.args.output_dir}/checkpoint-{step}"), straight)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_change_nothing(tmp_path, straight, persistent):
    same(run(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=persistent), straight)


def test_random_numbers_drawn_beside_the_run_change_nothing(tmp_path, straight):
    trainer = make_trainer(tmp_path, dataset=ChatDataset(rows(14)), **RUN)
    loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: (torch.rand(3), loss(*args, **kwargs))[1]
    trainer.train()
    same(trainer, straight)


@pytest.mark.parametrize("size", [1, 2])
def test_accumulation_changes_only_rounding(tmp_path, straight, size):
    trainer = run(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
    torch.testing.assert_close(weights(trainer), weights(straight), rtol=0, atol=1e-12)


def test_two_processes_change_only_rounding_from_the_first_logged_loss_on(tmp_path, straight):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)])
    common = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(HERE / "tiny_training.py"), str(tmp_path), str(tmp_path / "out.pt"), "uneven"]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(i), "LOCAL_RANK": str(i), "OMP_NUM_THREADS": "1"})
        for i in range(2)
    ]
    assert [p.wait(timeout=120) for p in started] == [0, 0]
    found, logged = torch.load(tmp_path / "out.pt")
    torch.testing.assert_close(found, weights(straight), rtol=0, atol=1e-12)
    assert logged == pytest.approx(losses(straight), abs=1e-6)  # logged in float32


def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(tmp_path):
    found = []
    for size in (1, 3, 14):
        trainer = make_trainer(tmp_path, dataset=ChatDataset(rows(14)), per_device_eval_batch_size=size)
        found.append(trainer.evaluate(ChatDataset(rows(14)))["eval_loss"])
    assert found[1:] == pytest.approx(found[:1] * 2, abs=1e-12)


def test_an_evaluation_and_a_step_on_the_same_data_show_one_loss(tmp_path):
    """The whole data in one step without learning; the second epoch draws other anchors, unless all are drawn."""
    data = ChatDataset(rows(6))
    changes = dict(
        per_device_train_batch_size=6, num_anchors=99, learning_rate=0.0, eval_strategy="steps", eval_steps=1
    )
    trainer = make_trainer(tmp_path, None, None, data, data, max_steps=4, loop_exposure=1, loop_start=0.5, **changes)
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    # An evaluation after step s minimises what step s + 1 does.
    assert evaluated[:3] == pytest.approx(losses(trainer)[1:], abs=1e-6)


def test_an_order_is_a_function_of_seed_and_epoch_and_blanks_fill_its_last_group():
    keys = (1, 0), (1, 0), (1, 1), (2, 0)
    first, again, later, other = (list(KeyedSampler(5, 4, seed, lambda e=epoch: e)) for seed, epoch in keys)
    assert first == again and first[5:] == [(0, None)] * 3 and sorted(n for _, n in first[:5]) == list(range(5))
    assert [n for _, n in first] != [n for _, n in later] and later[0][0] == 1
    assert first != other
    assert len(list(KeyedSampler(5, 4, 1, drop_last=True))) == 4 == len(KeyedSampler(5, 4, drop_last=True))
    assert list(KeyedSampler(3, 2)) == [(0, 0), (0, 1), (0, 2), (0, None)]
