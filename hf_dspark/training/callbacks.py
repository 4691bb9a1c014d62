"""What evaluation adds to losses: the real decode loop on held-out prompts, and a picture of a run."""

import signal
import threading
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback


class LogLines(ProgressCallback):
    """transformers' progress bar, with the few numbers of [`log_line`] above it instead of a whole dict."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = log_line(logs, state)
        if state.is_world_process_zero and line:
            tqdm.write(line)


def log_line(logs: dict, state) -> str:
    """Step, losses, tau and first-draft acceptance of a log entry, in one short line; empty if it has none of them."""
    kept = [k for k in logs if k in ("loss", "eval_loss") or k.endswith(("greedy_tau", "decode_tau", "accept_rate@1"))]
    kept += [k for k in logs if k.split("_")[-1] == "tau" and k not in kept]
    parts = [f"{key} {logs[key]:.3f}" for key in logs if key in kept]
    return "  ".join([f"step {state.global_step}/{state.max_steps}", *parts]) if parts else ""


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C ends a run after the step at hand, with a checkpoint; the second one ends it at once.

    For runs of one process: others would not know of it and wait for ever.
    """

    def __init__(self):
        self.interrupted, self.before = False, None

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_):
        self.interrupted = True
        signal.signal(signal.SIGINT, self.before)
        tqdm.write("Stopping after this step. Ctrl-C again stops at once.")

    def on_step_end(self, args, state, control, **kwargs):
        if self.interrupted:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


class DecodeCheck:
    """Greedy decoding of a few prompts with the drafter in training, by the same loop that users run.

    Teacher-forced acceptance can look well while decoding is broken; this number can't.

    Args:
        target: the drafter's target. prompts: token ids of each prompt. max_new_tokens (`int`): tokens per prompt.
    """

    def __init__(self, target, prompts: list[list[int]], max_new_tokens: int = 64):
        self.target, self.prompts, self.max_new_tokens = target, prompts, max_new_tokens

    @classmethod
    def from_dataset(cls, target, dataset, count: int = 8, max_new_tokens: int = 64) -> "DecodeCheck":
        """On the prompts (what comes before the first supervised token) of the first `count` chats."""
        prompts = []
        for example in dataset.examples[:count]:
            first = next((i for i, x in enumerate(example["labels"]) if x != -100), 0)
            prompts.append(example["input_ids"][: max(1, first)])
        return cls(target, prompts, max_new_tokens)

    @torch.no_grad()
    def __call__(self, drafter) -> dict[str, float]:
        """`decode_tau` (tokens per round, bonus included) and `decode_acceptance_rate`, pooled over prompts."""
        tokens = rounds = accepted = verified = 0
        was_training = drafter.training
        drafter.eval()
        for prompt in self.prompts:
            ids = torch.tensor([prompt], device=self.target.device)
            stats = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
                return_dict_in_generate=True,
            ).speculation
            tokens += sum(map(sum, stats.acceptance_lengths))
            rounds += sum(map(len, stats.acceptance_lengths))
            accepted += sum(map(sum, stats.accepted_lengths))
            verified += sum(map(sum, stats.draft_lengths))
        drafter.train(was_training)
        return {"decode_tau": tokens / max(1, rounds), "decode_acceptance_rate": accepted / max(1, verified)}


def plot_history(history: list[dict], path: str | Path) -> None:
    """Draw every tau and first-draft acceptance of a `log_history` over the steps, training and evaluation, to a file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'A plot of the run needs matplotlib, which isn\'t installed: `pip install "hf-dspark[plots]"`.',
            name="matplotlib",
        ) from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, ending, label in zip(figure.subplots(1, 2), ("tau", "accept_rate@1"), ("tau", "acceptance of draft 1")):
        for key in dict.fromkeys(k for entry in history for k in entry if k.endswith(ending)):
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            axes.plot(*zip(*points, strict=True), label=key, marker="o" if key.startswith("eval") else None)
        axes.set(xlabel="step", ylabel=label)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path)
