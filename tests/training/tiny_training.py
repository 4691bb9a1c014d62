"""What trainer tests share, importable from a second process as well."""

import sys

import torch
from tiny import make_drafter, make_eagle3, make_target

from hf_dspark.training import ChatDataset, DrafterTrainer, DrafterTrainingArguments

# Over an epoch's end and into loop exposure; 14 examples leave the last step of an epoch short.
RUN = dict(max_steps=8, loop_exposure=3, loop_start=0.5)


def rows(count=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 15, (count,), generator=g).tolist()
    return [{"input_ids": torch.randint(1, 60, (n,), generator=g).tolist(), "prompt_len": 3} for n in lengths]


def make_trainer(folder, model=None, target=None, dataset=None, eval_dataset=None, **changes):
    settings = dict(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=4, max_steps=4,
        learning_rate=1e-2, num_anchors=4, logging_steps=1, save_strategy="no", loop_exposure=2, loop_start=0.5,
    )  # fmt: skip
    target = target or make_target()
    if model is None:
        model = make_drafter(target, block_size=3, num_hidden_layers=1)
    arguments = DrafterTrainingArguments(**{**settings, **changes})
    dataset = ChatDataset(rows()) if dataset is None else dataset
    return DrafterTrainer(model, arguments, target, dataset, eval_dataset=eval_dataset)


def recursive_and_domino(target):
    """Drafters whose training differs from that of the others, to be trained side by side."""
    domino = dict(correction_head="domino", gru_hidden_size=7, correction_size=9, pure_draft_prefix_len=1)
    return {
        "eagle3": make_eagle3(target, chain_length=3, draft_vocab_size=40),
        "domino": make_drafter(target, block_size=3, num_hidden_layers=1, confidence_head=False, **domino),
    }


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


if __name__ == "__main__":  # one of several processes: train, and let the first one save what came out
    target = make_target()
    model = recursive_and_domino(target) if "recursive" in sys.argv else None
    data, changes = (ChatDataset(rows(14)), RUN) if "uneven" in sys.argv else (None, {})
    trainer = make_trainer(sys.argv[1], model, target, data, per_device_train_batch_size=2, **changes)
    trainer.model.eval()  # as `from_pretrained` leaves it
    trainer.train()
    if trainer.args.process_index == 0:
        torch.save((weights(trainer), [e["loss"] for e in trainer.state.log_history if "loss" in e]), sys.argv[2])
    torch.distributed.barrier()  # whoever leaves first would take the group down under the other
    torch.distributed.destroy_process_group()
