"""`DrafterTrainer`: the frozen target inside the step, drafters' losses over whole optimizer steps, metrics that
matter."""

import os
from collections import defaultdict
from itertools import islice

import torch
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer_utils import TrainOutput, get_last_checkpoint
from transformers.utils import logging

from ..modeling.packed_blocks import chain_labels
from .anchors import Step, block_weights, draw_stages
from .arguments import DrafterTrainingArguments
from .data import BlockCollator, ChatDataset, KeyedSampler, as_chats
from .estimate import estimate
from .losses import Blocks, block_losses
from .targets import FeatureCache, FrozenTarget

logger = logging.get_logger(__name__)


class DrafterGroup(nn.Module):
    """Several drafters trained side by side on one target's features. They share nothing, so each trains as if alone
    (but for the gradient norm that clipping looks at, which is theirs together)."""

    def __init__(self, drafters: dict):
        super().__init__()
        taps = {name: d.config.target_layer_ids for name, d in drafters.items()}
        if len(set(map(tuple, taps.values()))) != 1:
            raise ValueError(
                f"Drafters trained together share the target's features, and these tap {taps}: use equal taps."
            )
        self.drafters = nn.ModuleDict(drafters)

    def forward(self, **inputs):
        return {name: drafter(**inputs) for name, drafter in self.drafters.items()}

    def activation_checkpointing_enable(self, *args, **kwargs):
        for drafter in self.drafters.values():
            drafter.activation_checkpointing_enable(*args, **kwargs)

    def gradient_checkpointing_enable(self, *args, **kwargs):  # its name before transformers 5.2x
        for drafter in self.drafters.values():
            drafter.gradient_checkpointing_enable(*args, **kwargs)


def finished_state(checkpoint, args) -> TrainerState | None:
    """The state stored in `checkpoint` if it has all the steps, or epochs, that `args` asks for."""
    path = os.path.join(checkpoint, "trainer_state.json")
    if not os.path.isfile(path):
        return None
    state = TrainerState.load_from_json(path)
    if args.max_steps > 0:
        return state if state.global_step >= args.max_steps else None
    return state if state.epoch >= args.num_train_epochs else None


class DrafterTrainer(Trainer):
    """Trains a [`DSparkDrafter`] (any correction head), an [`Eagle3Drafter`] or an [`MTPDrafter`], or several in a
    dict, against a frozen target.

    A step runs the target without gradient, all blocks of all stages in one packed forward each (for recursive drafters
    the chains of the same anchors, step by step), and the losses in chunks.
    Losses are sums, divided by the weights of the whole optimizer step over micro-batches and processes, so how a batch
    is cut up changes nothing. Beside transformers' own, the log has per draft position "accept_rate@k" and "tau", the
    tokens a round would emit (bonus included), teacher-forced at temperature 1; "greedy_tau" the same for argmax
    drafts; and for chains of stages "loop_accept_rate@k" and "loop_tau" of the last stage.

    Args:
        model: a drafter, or `{name: drafter}`; bound to `target` here.
        args ([`DrafterTrainingArguments`]).
        target: the target model, on the device it shall run on; it never enters checkpoints, optimizer or wrappers.
        train_dataset, eval_dataset ([`ChatDataset`]): or rows as it reads them, in a list or a `datasets.Dataset`;
            those that hold messages need the tokenizer as `processing_class`.
        decode_check (callable, *optional*): drafter -> metrics, run at each evaluation; see [`DecodeCheck`].

    Raises:
        ValueError: for sizes that don't fit the target, packing with a target that doesn't keep documents apart, a
            dataset without a length, and arguments of transformers that can't be honoured (see `accepted.py`).
    """

    def __init__(
        self, model, args: DrafterTrainingArguments, target, train_dataset=None, *, decode_check=None, **kwargs
    ):
        named = model if isinstance(model, dict) else {"": model}
        for drafter in named.values():
            drafter.bind(target)
        self._target = FrozenTarget(target, next(iter(named.values())).config.target_layer_ids)
        if args.pack and getattr(target, "_is_stateful", False):
            raise ValueError(
                f"pack=True, and {type(target).__name__} carries a recurrent state from one document to the next: set "
                "pack=False."
            )
        if args.pack:
            self._target.check_packing()
        tokenizer = kwargs.get("processing_class")
        train_dataset = as_chats(train_dataset, tokenizer, args.max_length)
        kwargs["eval_dataset"] = as_chats(kwargs.get("eval_dataset"), tokenizer, args.max_length)
        kwargs.setdefault("data_collator", BlockCollator(args.num_anchors, args.seed, args.pack, args.max_length))
        model = DrafterGroup(named) if isinstance(model, dict) else model
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        # Else Trainer would divide by the accumulation steps as well; the second is its name before transformers 5.2x.
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True
        self.named = named
        self.decode_check = decode_check
        self.sums: dict = defaultdict(lambda: defaultdict(float))
        self.cache = self._open_cache(train_dataset)
        self._record(train_dataset)

    # ------------------------------------------------------------------ set-up

    def _record(self, dataset):
        for drafter in self.named.values():
            if isinstance(dataset, ChatDataset):
                drafter.config.trained_length = max(dataset.max_length, drafter.config.trained_length or 0)
            drafter.config.loop_exposure = self.args.loop_exposure

    def _open_cache(self, dataset):
        if not self.args.feature_cache:
            return None
        text = self._target.model.config.get_text_config()
        width = (len(self._target.layer_ids) + 1) * text.hidden_size
        size = dataset.tokens * (width * self._target.model.dtype.itemsize + 12) / 1e9
        logger.warning(
            f"Feature cache in {self.args.feature_cache}: {size:.1f} GB for {dataset.tokens} tokens, capped at "
            f"{self.args.feature_cache_gb:.1f} GB."
        )
        facts = {
            "target": text.name_or_path or type(self._target.model).__name__,
            "dtype": str(self._target.model.dtype),
            "layers": self._target.layer_ids,
            "data": dataset.fingerprint(),
        }
        return FeatureCache(self.args.feature_cache, self.args.feature_cache_gb, facts)

    def estimate(self) -> str:
        """Memory and time of the run in words; see [`estimate`]."""
        return estimate(self)

    def train(self, resume_from_checkpoint=None, **kwargs):
        """As transformers' own; a run that is resumed at its end loads its last weights and trains no further."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"There is no checkpoint in {self.args.output_dir} to continue from: train without resuming."
                )
        state = finished_state(resume_from_checkpoint, self.args) if resume_from_checkpoint else None
        if state is not None:
            logger.warning(
                f"{resume_from_checkpoint} is the end of its run, so nothing is trained: ask for more steps."
            )
            self._load_from_checkpoint(resume_from_checkpoint)
            self.state = state
            return TrainOutput(state.global_step, 0.0, {"train_runtime": 0.0})
        if isinstance(self.train_dataset, ChatDataset) and self.args.process_index == 0 and not self.args.skip_estimate:
            logger.warning(self.estimate())
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    # ------------------------------------------------------------------ the step

    def _at(self, split: str) -> Step:
        """The optimizer step at hand, or an evaluation of what it minimises."""
        args, step, steps = self.args, self.state.global_step, self.state.max_steps
        looped = bool(args.loop_exposure) and step >= args.loop_start * steps
        stages = draw_stages(args.seed, step, args.loop_exposure if looped else 0)
        if split == "eval":
            stages = 2 if args.loop_exposure else 1
        return Step(stages, step / steps if steps else 1.0, looped, split)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        step = self._at("train")
        batches = [{**batch, "step": step} for batch in islice(epoch_iterator, num_batches)]
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_train_sampler(self, train_dataset=None):
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return self._sampler(train_dataset or self.train_dataset, self.args.train_batch_size, seed, self._epoch)

    def _get_eval_sampler(self, eval_dataset):
        return self._sampler(eval_dataset, self.args.eval_batch_size)

    def _sampler(self, dataset, batch_size, *key):
        group = batch_size * self.args.world_size
        return KeyedSampler(len(dataset), group, *key, drop_last=self.args.dataloader_drop_last)

    def _epoch(self) -> int:
        return int((self.state.epoch or 0) + 1e-6)

    def _get_num_items_in_batch(self, batch_samples, device):
        """Total loss weights [drafters, 2] of these batches on all processes: of the first and of the last stage."""
        if not batch_samples:
            return None
        total = sum(self._weights(batch) for batch in batch_samples).to(device)
        if self.args.world_size > 1:
            total = self.accelerator.gather(total[None]).sum(0)
        return total

    def _weights(self, batch):
        out = []
        for drafter in self.named.values():
            labels = self._labels(drafter, batch, batch["step"].stages)
            decay = self.args.objective(drafter).decay
            out.append(torch.stack([block_weights(labels[s], decay).sum() for s in (0, -1)]))
        return torch.stack(out)

    def _labels(self, drafter, batch, stages):
        K, anchors = drafter.config.max_block, batch["anchors"]
        if drafter.config.recursive:
            anchors = drafter.usable_anchors(anchors, batch["position_ids"])
        return chain_labels(batch["labels"], batch["position_ids"], anchors, stages * K).split(K, -1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The share of this micro-batch in the loss of its optimizer step, times the number of processes."""
        step = inputs["step"]
        outputs, states = self.states_of(model, inputs)
        totals = self._weights(inputs) if num_items_in_batch is None else num_items_in_batch
        loss = 0.0
        for (name, drafter), total in zip(self.named.items(), totals, strict=True):
            for i, share in enumerate(step.shares(bool(total[1] > 0))):
                blocks = self._blocks(drafter, inputs, outputs, states[name], i, (step.stages - 1) * i)
                sums = self.sums_of(drafter, blocks, step)
                loss = loss + share * sums["loss"] / total[i].clamp(min=1e-9).to(sums["loss"].dtype)
                self._count(step.split, name, i, sums)
        loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def states_of(self, model, inputs):
        """The target's outputs, and each drafter's states of the first and the last stage."""
        outputs, step = self._target_outputs(inputs), inputs["step"]
        kwargs = {k: inputs[k] for k in ("input_ids", "anchors", "position_ids")}
        states = model(features=outputs.features, stages=step.stages, detach_chain=self.args.detach_chain, **kwargs)
        return outputs, states if isinstance(self.model, DrafterGroup) else {"": states}

    def sums_of(self, drafter, blocks: Blocks, step: Step) -> dict:
        """What [`block_losses`] gives for `blocks` at `step`."""
        chunk = max(1, self.args.loss_chunk // drafter.config.max_block)
        logits = self._target.logits_of(drafter)
        return block_losses(drafter, logits, blocks, self.args.objective(drafter), step.progress, chunk)

    def _target_outputs(self, inputs):
        ids, labels = inputs["input_ids"], inputs["labels"]
        split = inputs["step"].split
        if self.cache is not None and split != "eval":
            found = self.cache.load(inputs["documents"], ids.shape, ids.device)
            if found is not None:
                return found
        outputs = self._target(ids, labels, inputs["position_ids"], self.args.pack)
        if self.cache is not None and split == "train":
            self.cache.save(inputs["documents"], outputs)
        return outputs

    def _blocks(self, drafter, inputs, outputs, states, end, stage) -> Blocks:
        """The supervised blocks of one stage, flat."""
        K, anchors = drafter.config.max_block, inputs["anchors"]
        labels = self._labels(drafter, inputs, stage + 1)[stage]
        keep = labels[..., 0] != -100
        index = anchors[..., None] + stage * K + torch.arange(K, device=anchors.device)
        index = index.clamp(0, inputs["input_ids"].shape[1] - 1)[keep]
        row = keep.nonzero()[:, :1].expand_as(index)
        return Blocks(
            hidden=states.hidden[end][keep],
            first=None if states.first is None else states.first[end][keep],
            prev=inputs["input_ids"][row, index],
            labels=labels[keep],
            target_hidden=outputs.hidden[row, index],
            log_normalizer=outputs.log_normalizer[row, index],
            top=outputs.top[row, index],
        )

    # ------------------------------------------------------------------ metrics

    def _count(self, split, name, stage, sums):
        kept = self.sums[split]
        for key, value in sums.items():
            kept[name, stage, key] = kept[name, stage, key] + value.detach().double()

    def _metrics(self, split: str) -> dict[str, float]:
        """Means since the last call, over all processes."""
        kept, self.sums[split] = self.sums[split], defaultdict(float)
        if self.args.world_size > 1:
            kept = {key: self.accelerator.reduce(value.to(self.args.device), "sum") for key, value in kept.items()}
        out, means = {}, defaultdict(list)
        for name, stage in dict.fromkeys((n, i) for n, i, _ in kept):
            s = {key: kept[name, stage, key] for n, i, key in kept if (n, i) == (name, stage)}
            if not s["blocks"]:
                continue
            prefix = ("eval_" if split == "eval" else "") + (f"{name}_" if name else "") + ("loop_" if stage else "")
            parts = ("ce", "kl", "tv", "confidence", "confidence_error")
            values = {f"{key}_loss" if "_" not in key else key: s[key] / s["weight"].clamp(min=1e-9) for key in parts}
            values |= {key: s[key] / s["blocks"].clamp(min=1) for key in ("tau", "greedy_tau")}
            rates = s["accepted"] / s["supervised"].clamp(min=1)
            values |= {f"accept_rate@{k + 1}": rate for k, rate in enumerate(rates)}
            out |= {prefix + key: round(float(value), 5) for key, value in values.items()}
            means[name].append(float(s["loss"] / s["weight"].clamp(min=1e-9)))
        if split == "eval":  # transformers' own is a mean over batches, whatever they weigh
            step = self._at(split)
            shares = {name: step.shares(len(found) > 1) for name, found in means.items()}
            out["eval_loss"] = sum(s * x for name, found in means.items() for s, x in zip(shares[name], found))
        return out

    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs.update(self._metrics("train"))
        super().log(logs, start_time)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self.model.eval()
        self.sums["eval"].clear()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update(self._metrics("eval"))
        if self.decode_check is not None and self.args.process_index == 0:
            for name, drafter in self.named.items():
                found = self.decode_check(drafter)
                output.metrics.update({f"eval_{name}_{k}" if name else f"eval_{k}": v for k, v in found.items()})
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return super().prediction_step(model, {**inputs, "step": self._at("eval")}, True, ignore_keys)

    # ------------------------------------------------------------------ files

    def floating_point_ops(self, inputs):
        return 0  # transformers' formula counts neither the blocks nor the target

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if isinstance(self.model, DrafterGroup) and self.args.should_save:
            for name, drafter in self.named.items():
                drafter.save_pretrained(os.path.join(output_dir or self.args.output_dir, name))
