"""What evaluation adds to losses: the real decode loop on held-out prompts, and a picture of a run."""

from pathlib import Path

import torch


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
            'A plot of the run needs matplotlib, which isn\'t installed: `pip install "hf-dspark[plots]"`.', name="matplotlib"
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
