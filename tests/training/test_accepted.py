"""Arguments and datasets of `DrafterTrainer` that are honoured, or refused by name."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import datasets
import pytest
import torch
from tiny import TARGETS, make_drafter, make_target
from transformers import TrainingArguments

from hf_dspark.training import ChatDataset, DrafterTrainingArguments
from hf_dspark.training.accepted import BESIDE, EXACT, REFUSED, unclassified

sys.path.insert(0, str(Path(__file__).parent))
from tiny_training import make_trainer, rows, weights

VALUES = {  # other than the default
    "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "average_tokens_across_devices": False, "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True}, "torch_compile": True, "torch_compile_backend": "eager",
    "torch_compile_mode": "default", "auto_find_batch_size": True, "bf16_full_eval": True, "fp16_full_eval": True,
    "include_for_metrics": ["inputs"], "batch_eval_metrics": True, "ignore_data_skip": True,
    "train_sampling_strategy": "sequential", "group_by_length": True, "dataloader_in_order": False,
    "accelerator_config": {"split_batches": True}, "parallelism_config": object(), "fsdp": True, "fsdp_config": {"a": 1},
    "deepspeed": "zero3.json",
}  # fmt: skip


def test_every_argument_of_transformers_is_classified_once():
    """Fails when transformers adds one: say in accepted.py whether it is honoured."""
    assert unclassified() == []
    assert not (BESIDE & EXACT or (BESIDE | EXACT) & set(REFUSED))


@pytest.mark.parametrize("name", sorted({f.name for f in fields(TrainingArguments)} & set(REFUSED)))
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match=f"^{name}=.* can't be used to train a drafter: "):
        DrafterTrainingArguments(str(tmp_path), use_cpu=True, **{name: VALUES[name]})


def test_the_defaults_are_accepted_and_a_cpu_pins_no_memory(tmp_path):
    assert DrafterTrainingArguments(str(tmp_path), use_cpu=True).dataloader_pin_memory is False


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list])
def test_other_datasets_of_rows_train_as_the_same_chats(tmp_path, kind):
    expected = make_trainer(tmp_path, dataset=ChatDataset(rows()))
    found = make_trainer(tmp_path, dataset=kind(rows()))
    for trainer in (expected, found):
        trainer.train()
    assert torch.equal(weights(found), weights(expected))


def test_a_dataset_without_a_length_is_refused(tmp_path):
    with pytest.raises(ValueError, match="IterableDataset was given as a dataset, and it has no length"):
        make_trainer(tmp_path, dataset=datasets.IterableDataset.from_generator(rows))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral window", "qwen3_moe", "gpt_oss"])
def test_packing_is_refused_for_targets_that_mix_documents_alone(tmp_path, name):
    kind, attention, options = TARGETS[name]
    target = make_target(kind, attention, **options)
    if name == "gpt_oss":
        with pytest.raises(ValueError, match="lets a document see the one before it"):
            make_trainer(tmp_path, make_drafter(target), target, pack=True)
    else:
        assert make_trainer(tmp_path, make_drafter(target), target, pack=True).args.pack


def test_a_finished_run_is_not_trained_further(tmp_path):
    run = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    run.train()
    again = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert torch.equal(weights(again), weights(run)) and again.state.global_step == 4
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4 and not (tmp_path / "checkpoint-5").exists()
    more = make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    assert more.train(resume_from_checkpoint=True).global_step == 6
    with pytest.raises(ValueError, match="no checkpoint in"):
        make_trainer(tmp_path / "empty").train(resume_from_checkpoint=True)
