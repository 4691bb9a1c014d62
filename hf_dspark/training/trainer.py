"""`DrafterTrainer`: the frozen target inside the step, drafters' losses over whole optimizer steps, metrics that matter."""

import math
import os
import time
from collections import defaultdict

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from ..modeling.packed_blocks import chain_labels
from .anchors import block_weights, draw_stages
from .arguments import DrafterTrainingArguments
from .data import BlockCollator, ChatDataset
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
            raise ValueError(f"Drafters trained together share the target's features, and these tap {taps}: use equal taps.")
        self.drafters = nn.ModuleDict(drafters)

    def forward(self, **inputs):
        return {name: drafter(**inputs) for name, drafter in self.drafters.items()}

    def activation_checkpointing_enable(self, *args, **kwargs):
        for drafter in self.drafters.values():
            drafter.activation_checkpointing_enable(*args, **kwargs)

    def gradient_checkpointing_enable(self, *args, **kwargs):  # its name before transformers 5.2x
        for drafter in self.drafters.values():
            drafter.gradient_checkpointing_enable(*args, **kwargs)


class _SetEpoch(TrainerCallback):
    """Tells the dataset its epoch, which keys the anchors; loaders do so only with some samplers."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        if hasattr(train_dataloader.dataset, "set_epoch"):
            train_dataloader.dataset.set_epoch(int(state.epoch + 1e-6))


class DrafterTrainer(Trainer):
    """Trains a [`DSparkDrafter`] (any correction head), an [`Eagle3Drafter`] or an [`MTPDrafter`], or several in a dict,
    against a frozen target.

    A step runs the target without gradient, all blocks of all stages in one packed forward each (for recursive drafters the
    chains of the same anchors, step by step), and the losses in chunks.
    Losses are sums, divided by the weights of the whole optimizer step over micro-batches and processes, so how a batch is
    cut up changes nothing. Beside transformers' own, the log has per draft position "accept_rate@k" and "tau", the tokens a
    round would emit (bonus included), teacher-forced at temperature 1; "greedy_tau" the same for argmax drafts; and for
    chains of stages "loop_accept_rate@k" and "loop_tau" of the last stage.

    Args:
        model: a drafter, or `{name: drafter}`; bound to `target` here.
        args ([`DrafterTrainingArguments`]).
        target: the target model, on the device it shall run on; it never enters checkpoints, optimizer or wrappers.
        train_dataset, eval_dataset ([`ChatDataset`]).
        decode_check (callable, *optional*): drafter -> metrics, run at each evaluation; see [`DecodeCheck`].

    Raises:
        ValueError: for sizes that don't fit the target, and packing with a target that keeps a recurrent state.
    """

    def __init__(self, model, args: DrafterTrainingArguments, target, train_dataset=None, *, decode_check=None, **kwargs):
        named = model if isinstance(model, dict) else {"": model}
        for drafter in named.values():
            drafter.bind(target)
        self._target = FrozenTarget(target, next(iter(named.values())).config.target_layer_ids)
        if args.pack and getattr(target, "_is_stateful", False):
            raise ValueError(
                f"pack=True, and {type(target).__name__} carries a recurrent state from one document to the next: set "
                "pack=False."
            )
        kwargs.setdefault("data_collator", BlockCollator(args.num_anchors, args.seed, args.pack, args.max_length))
        model = DrafterGroup(named) if isinstance(model, dict) else model
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        # Else Trainer would divide by the accumulation steps as well; the second is its name before transformers 5.2x.
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True
        self.add_callback(_SetEpoch())
        self.named = named
        self.decode_check, self.stage_override = decode_check, None
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
        """Memory and time of the run in words; runs one micro-batch forward and backward, and forgets it."""
        args, parameters = self.args, sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        widest = max(d.config.draft_vocab_size for d in self.named.values())
        text = self._target.model.config.get_text_config()
        sizes = {
            "target": sum(p.nbytes for p in self._target.model.parameters()),
            "weights, gradients, optimizer": 16 * parameters,
            "logits": 6 * 4 * args.loss_chunk * widest,
            "target's states": args.per_device_train_batch_size
            * min(self.train_dataset.max_length, args.max_length)
            * (len(self._target.layer_ids) + 1)
            * text.hidden_size
            * self._target.model.dtype.itemsize,
        }
        examples = [self.train_dataset[i] for i in range(min(args.per_device_train_batch_size, len(self.train_dataset)))]
        batch = self._prepare_inputs(self.data_collator(examples))
        mean, seconds = 2 + (args.loop_exposure - 1) / 2, {}
        for stages in (1, round(mean))[: 2 if args.loop_exposure else 1]:
            self.model.train()
            self.stage_override, start = stages, time.perf_counter()
            with self.compute_loss_context_manager():
                loss = self.compute_loss(self.model, batch)
            loss.backward()
            seconds[stages] = time.perf_counter() - start
        self.stage_override = None
        self.model.zero_grad()
        self.sums["train"].clear()
        each = seconds[1] * (args.loop_start if args.loop_exposure else 1)
        each += seconds.get(round(mean), 0) * (1 - args.loop_start)
        steps = args.max_steps
        if steps <= 0:
            batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            steps = math.ceil(len(self.train_dataset) / batch_size) * args.num_train_epochs
        listing = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
        total = each * steps * args.gradient_accumulation_steps
        return (
            f"{parameters / 1e6:.1f} M parameters to train; about {sum(sizes.values()) / 1e9:.2f} GB ({listing}); {steps:.0f} "
            f"steps of about {each * args.gradient_accumulation_steps:.2f} s, {total / 60:.1f} minutes without evaluation."
        )

    def train(self, *args, **kwargs):
        if isinstance(self.train_dataset, ChatDataset) and self.args.process_index == 0 and not self.args.skip_estimate:
            logger.warning(self.estimate())
        return super().train(*args, **kwargs)

    # ------------------------------------------------------------------ the step

    @property
    def stages(self) -> int:
        """Stages of the optimizer step at hand."""
        if self.stage_override is not None:
            return self.stage_override
        if not self.model.training:
            return 2 if self.args.loop_exposure else 1
        step = self.state.global_step
        late = step >= self.args.loop_start * self.state.max_steps
        return draw_stages(self.args.seed, step, self.args.loop_exposure if late else 0)

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
            labels = self._labels(drafter, batch, self.stages)
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
        stages = self.stages
        outputs = self._target_outputs(inputs)
        kwargs = {k: inputs[k] for k in ("input_ids", "anchors", "position_ids")}
        states = model(features=outputs.features, stages=stages, detach_chain=self.args.detach_chain, **kwargs)
        if not isinstance(self.model, DrafterGroup):
            states = {"": states}
        totals = self._weights(inputs) if num_items_in_batch is None else num_items_in_batch
        progress = self.state.global_step / max(1, self.state.max_steps) if self.model.training else 1.0
        loss = 0.0
        for (name, drafter), total in zip(self.named.items(), totals, strict=True):
            shares = [0.5, 0.5] if stages > 1 and total[1] > 0 else [1.0, 0.0]
            for i in range(min(stages, 2)):
                blocks = self._blocks(drafter, inputs, outputs, states[name], i, (stages - 1) * i)
                sums = block_losses(
                    drafter,
                    self._target.logits_of(drafter),
                    blocks,
                    self.args.objective(drafter),
                    progress,
                    max(1, self.args.loss_chunk // drafter.config.max_block),
                )
                loss = loss + shares[i] * sums["loss"] / total[i].clamp(min=1e-9).to(sums["loss"].dtype)
                self._count(name, i, sums)
        loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def _target_outputs(self, inputs):
        ids, labels = inputs["input_ids"], inputs["labels"]
        cached = self.cache is not None and self.model.training
        if cached and (found := self.cache.load(inputs["documents"], ids.shape, ids.device)) is not None:
            return found
        outputs = self._target(ids, labels, inputs["position_ids"], self.args.pack)
        if cached:
            self.cache.save(inputs["documents"], outputs)
        return outputs

    def _blocks(self, drafter, inputs, outputs, states, which, stage) -> Blocks:
        """The supervised blocks of one stage, flat."""
        K, anchors = drafter.config.max_block, inputs["anchors"]
        labels = self._labels(drafter, inputs, stage + 1)[stage]
        keep = labels[..., 0] != -100
        index = anchors[..., None] + stage * K + torch.arange(K, device=anchors.device)
        index = index.clamp(0, inputs["input_ids"].shape[1] - 1)[keep]
        row = keep.nonzero()[:, :1].expand_as(index)
        return Blocks(
            hidden=states.hidden[which][keep],
            first=None if states.first is None else states.first[which][keep],
            prev=inputs["input_ids"][row, index],
            labels=labels[keep],
            target_hidden=outputs.hidden[row, index],
            log_normalizer=outputs.log_normalizer[row, index],
            top=outputs.top[row, index],
        )

    # ------------------------------------------------------------------ metrics

    def _count(self, name, which, sums):
        kept = self.sums["train" if self.model.training else "eval"]
        for key, value in sums.items():
            kept[name, which, key] = kept[name, which, key] + value.detach().double()

    def _metrics(self, split: str) -> dict[str, float]:
        """Means since the last call, over all processes."""
        kept, self.sums[split] = self.sums[split], defaultdict(float)
        if self.args.world_size > 1:
            kept = {key: self.accelerator.reduce(value.to(self.args.device), "sum") for key, value in kept.items()}
        out = {}
        for name, which in dict.fromkeys((n, w) for n, w, _ in kept):
            s = {key: kept[name, which, key] for n, w, key in kept if (n, w) == (name, which)}
            if not s["blocks"]:
                continue
            prefix = ("eval_" if split == "eval" else "") + (f"{name}_" if name else "") + ("loop_" if which else "")
            parts = ("ce", "kl", "tv", "confidence", "confidence_error")
            values = {f"{key}_loss" if "_" not in key else key: s[key] / s["weight"].clamp(min=1e-9) for key in parts}
            values |= {key: s[key] / s["blocks"].clamp(min=1) for key in ("tau", "greedy_tau")}
            rates = s["accepted"] / s["supervised"].clamp(min=1)
            values |= {f"accept_rate@{k + 1}": rate for k, rate in enumerate(rates)}
            out |= {prefix + key: round(float(value), 5) for key, value in values.items()}
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
        return super().prediction_step(model, inputs, True, ignore_keys)

    # ------------------------------------------------------------------ files

    def floating_point_ops(self, inputs):
        return 0  # transformers' formula counts neither the blocks nor the target

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if isinstance(self.model, DrafterGroup) and self.args.should_save:
            for name, drafter in self.named.items():
                drafter.save_pretrained(os.path.join(output_dir or self.args.output_dir, name))
