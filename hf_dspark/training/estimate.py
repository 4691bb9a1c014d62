"""Memory and time of a run, measured on its first micro-batch; nothing of the run is changed by it."""

import contextlib
import math
import time
from dataclasses import replace

import torch

from .anchors import Step

FEWER, SMALL_VOCABULARY = 4, 8192  # anchors are divided by the first; the second is the vocabulary that is suggested


def estimate(trainer) -> str:
    """Parameters, memory, steps and minutes of `trainer`'s run in words; on a CPU also what would make it shorter.

    One micro-batch runs forward and backward. The time with fewer anchors is measured in the same way. The time with a
    smaller draft vocabulary is computed: the losses are timed alone, and their share of a step shrinks with the
        vocabulary.
    """
    args, examples = trainer.args, trainer.train_dataset
    count = min(args.per_device_train_batch_size, len(examples))
    batch = trainer._prepare_inputs(trainer.data_collator([examples[i] for i in range(count)]))
    mean = round(2 + (args.loop_exposure - 1) / 2)
    with _unchanged(trainer):
        trainer.model.train()
        part = {**batch, "anchors": batch["anchors"][:, ::FEWER]}
        _seconds(trainer, part, 1)  # what runs first is slower
        plain = _seconds(trainer, batch, 1)
        looped = _seconds(trainer, batch, mean) if args.loop_exposure else plain
        fewer = losses = plain
        if args.device.type == "cpu":
            fewer = _seconds(trainer, part, 1)
            losses = _loss_seconds(trainer, batch)
    start = args.loop_start if args.loop_exposure else 1
    each = (plain * start + looped * (1 - start)) * args.gradient_accumulation_steps
    minutes = each * steps_of(trainer) / 60
    parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    sizes = memory(trainer, parameters)
    listing = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
    text = (
        f"{parameters / 1e6:.1f} M parameters to train; about {sum(sizes.values()) / 1e9:.2f} GB ({listing}); "
        f"{steps_of(trainer)} steps of about {each:.2f} s, {minutes:.1f} minutes without evaluation."
    )
    return text + shorter(plain, fewer, losses, minutes, args.num_anchors, vocabulary(trainer))


def shorter(plain: float, fewer: float, losses: float, minutes: float, anchors: int, vocabulary: int) -> str:
    """What would save at least a tenth of the time, in words.

    Args:
        plain, fewer (`float`): seconds of a micro-batch with all anchors, and with a quarter of them.
        losses (`float`): seconds of `plain` that are spent on losses. minutes (`float`): of the run.
        anchors, vocabulary (`int`): the run's.
    """
    options = {f"--num-anchors {anchors // FEWER}": (fewer, "measured")} if anchors >= FEWER else {}
    if vocabulary > SMALL_VOCABULARY:
        rest = max(0.0, plain - min(plain, losses) * (1 - SMALL_VOCABULARY / vocabulary))
        options[f"--draft-vocab-size {SMALL_VOCABULARY}"] = rest, f"losses take {losses:.2f} s of {plain:.2f} s"
    parts = [
        f"about {minutes * seconds / plain:.1f} minutes with {option} ({how})"
        for option, (seconds, how) in options.items()
        if seconds < 0.9 * plain
    ]
    return " Shorter: " + ", or ".join(parts) + "." if parts else ""


def memory(trainer, parameters: int) -> dict[str, int]:
    """Bytes by what they are for."""
    args, text = trainer.args, trainer._target.model.config.get_text_config()
    width = (len(trainer._target.layer_ids) + 1) * text.hidden_size * trainer._target.model.dtype.itemsize
    length = min(trainer.train_dataset.max_length, args.max_length)
    return {
        "target": sum(p.nbytes for p in trainer._target.model.parameters()),
        "weights, gradients, optimizer": 16 * parameters,
        "logits": 6 * 4 * args.loss_chunk * vocabulary(trainer),
        "target's states": args.per_device_train_batch_size * length * width,
    }


def vocabulary(trainer) -> int:
    return max(d.config.draft_vocab_size for d in trainer.named.values())


def steps_of(trainer) -> int:
    """Optimizer steps of the run."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return math.ceil(math.ceil(len(trainer.train_dataset) / batch) * args.num_train_epochs)


@contextlib.contextmanager
def _unchanged(trainer):
    """Modes, random state, gradients and metrics are afterwards as before."""
    training = trainer.model.training
    try:
        with torch.random.fork_rng([trainer.args.device] if trainer.args.device.type == "cuda" else []):
            yield
    finally:
        trainer.model.train(training)
        trainer.model.zero_grad()
        trainer.sums.pop("estimate", None)


def _seconds(trainer, batch, stages: int) -> float:
    start = time.perf_counter()
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, {**batch, "step": Step(stages, split="estimate")})
    loss.backward()
    loss.item()  # waits for the device
    return time.perf_counter() - start


def _loss_seconds(trainer, batch) -> float:
    """Of the losses alone, forward and backward, for one stage."""
    seconds, batch = 0.0, {**batch, "step": Step(split="estimate")}
    with trainer.compute_loss_context_manager():
        outputs, states = trainer.states_of(trainer.model, batch)
        for name, drafter in trainer.named.items():
            blocks = trainer._blocks(drafter, batch, outputs, states[name], 0, 0)
            first = None if blocks.first is None else blocks.first.detach()
            blocks = replace(blocks, hidden=blocks.hidden.detach().requires_grad_(), first=first)
            start = time.perf_counter()
            trainer.sums_of(drafter, blocks, batch["step"])["loss"].backward()
            seconds += time.perf_counter() - start
    return seconds
