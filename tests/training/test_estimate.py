"""What a run is said to take before it starts."""

import sys
import time
from pathlib import Path

import pytest
from transformers import TrainerState

sys.path.insert(0, str(Path(__file__).parent))
from tiny_training import make_trainer

from hf_dspark.training.callbacks import log_line
from hf_dspark.training.estimate import shorter, steps_of


def test_what_shortens_a_run_is_named_with_the_time_it_would_take():
    found = shorter(plain=40.0, fewer=12.0, losses=32.0, minutes=100.0, anchors=512, vocabulary=49152)
    # 40 s - 32 s * (1 - 8192 / 49152) = 13.3 s
    assert "about 30.0 minutes with --num-anchors 128 (measured)" in found
    assert "about 33.3 minutes with --draft-vocab-size 8192 (losses take 32.00 s of 40.00 s)" in found
    assert shorter(40.0, 39.0, 2.0, 100.0, 512, 49152) == ""
    assert "--draft-vocab-size" not in shorter(40.0, 12.0, 32.0, 100.0, 512, 8192)


def test_the_estimate_measures_fewer_anchors_and_the_losses(tmp_path, monkeypatch):
    """Losses are made slow by 5 ms an anchor: a quarter of the anchors takes a quarter of the time."""
    trainer = make_trainer(tmp_path, num_anchors=8, loop_exposure=0)
    count = trainer.sums_of

    def slow(drafter, blocks, step):
        time.sleep(0.005 * len(blocks.prev))
        return count(drafter, blocks, step)

    trainer.sums_of = slow
    said = trainer.estimate()
    seconds = float(said.split("steps of about ")[1].split(" s")[0])
    anchors = sum(
        (b >= 0).sum().item() for b in trainer.data_collator([trainer.train_dataset[i] for i in range(4)])["anchors"]
    )
    assert 0.005 * anchors <= seconds + 0.01 < 0.005 * anchors + 0.5
    assert "with --num-anchors 2 (measured)" in said and not trainer.sums["estimate"]


@pytest.mark.parametrize(("changes", "steps"), [({"max_steps": 7}, 7), ({"max_steps": -1, "num_train_epochs": 2}, 8)])
def test_steps_are_counted_as_they_are_taken(tmp_path, changes, steps):
    trainer = make_trainer(tmp_path, **changes)
    assert steps_of(trainer) == steps
    trainer.train()
    assert trainer.state.global_step == steps


def test_a_log_entry_is_one_short_line():
    state = TrainerState(global_step=10, max_steps=300)
    logs = {
        "loss": 3.21,
        "learning_rate": 1e-3,
        "ce_loss": 5.0,
        "tau": 1.42,
        "accept_rate@1": 0.35,
        "accept_rate@2": 0.2,
    }
    assert log_line(logs, state) == "step 10/300  loss 3.210  tau 1.420  accept_rate@1 0.350"
    logs = {"eval_loss": 2.0, "eval_a_tau": 1.5, "eval_a_kl_loss": 1.0, "eval_a_decode_tau": 1.4, "eval_runtime": 3.0}
    assert log_line(logs, state) == "step 10/300  eval_loss 2.000  eval_a_tau 1.500  eval_a_decode_tau 1.400"
    assert log_line({"train_runtime": 3.0, "train_loss": 2.0}, state) == ""
