"""Which of transformers' training arguments are honoured exactly by [`DrafterTrainer`], and which are refused by name."""

from dataclasses import MISSING, fields

from transformers import TrainingArguments

# They touch neither what the model reads nor its loss: files, logs, clocks, hardware, publishing.
BESIDE = frozenset(
    """
    output_dir logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    include_num_input_tokens_seen include_tokens_per_second logging_dir
    eval_strategy eval_steps eval_delay eval_on_start prediction_loss_only eval_do_concat_batches eval_use_gather_object
    eval_accumulation_steps save_only_model save_strategy save_steps save_on_each_node save_total_limit save_safetensors
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better restore_callback_states_from_checkpoint
    resume_from_checkpoint overwrite_output_dir use_cpu use_cache torch_empty_cache_steps debug skip_memory_metrics do_train
    do_eval do_predict local_rank ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context length_column_name
    """.split()
)

# They decide what is read, computed or minimised, and do so exactly as documented.
EXACT = frozenset(
    """
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs max_steps seed data_seed
    full_determinism dataloader_drop_last learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim
    optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules max_grad_norm bf16 fp16 tf32
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    remove_unused_columns label_names ddp_find_unused_parameters
    """.split()
)

# They would be ignored or change a run silently: why, and what to do instead.
REFUSED = {
    "label_smoothing_factor": "the loss compares with the target's distribution, not with labels to smooth: leave it at 0",
    "neftune_noise_alpha": "the embedding belongs to the frozen target, whose states must stay its own: leave it out",
    "average_tokens_across_devices": "losses are always divided by the weights of all processes: leave it on",
    "use_liger_kernel": "its kernels would replace layers of the drafter's own: leave it off",
    "liger_kernel_config": "its kernels would replace layers of the drafter's own: leave it out",
    "torch_compile": "the packed forward of blocks has not been shown to be the same when compiled: leave it off",
    "torch_compile_backend": "it turns compilation on, see torch_compile: leave it out",
    "torch_compile_mode": "it turns compilation on, see torch_compile: leave it out",
    "auto_find_batch_size": "it would change the examples of a step as memory runs out: set per_device_train_batch_size",
    "bf16_full_eval": "evaluation would round the drafter's weights: leave it off and evaluate under bf16",
    "fp16_full_eval": "evaluation would round the drafter's weights: leave it off and evaluate under fp16",
    "include_for_metrics": "the trainer counts its metrics itself and keeps no inputs: leave it out",
    "batch_eval_metrics": "the trainer counts its metrics itself: leave it off",
    "ignore_data_skip": "a resumed run would read examples again and leave others out: leave it off",
    "train_sampling_strategy": "the order is a function of the seed and the epoch: leave it at 'random'",
    "group_by_length": "the order is a function of the seed and the epoch: leave it off",
    "dataloader_in_order": "the order of batches would depend on timing: leave it on",
    "accelerator_config": "only its defaults are known to give every process its own part of a batch: leave it out",
    "parallelism_config": "blocks need whole rows on one device: leave it out",
    "fsdp": "losses use heads outside the wrapped forward, where weights are sharded: use plain processes (DDP)",
    "fsdp_config": "see fsdp: leave it out",
    "deepspeed": "losses use heads outside the wrapped forward: use plain processes (DDP)",
}


def unclassified() -> list[str]:
    """Fields of the installed transformers' `TrainingArguments` that none of the lists above names."""
    return sorted({f.name for f in fields(TrainingArguments)} - BESIDE - EXACT - set(REFUSED))


def check_arguments(given: dict) -> None:
    """Refuse `given` values, by name, of arguments that can't be honoured.

    Raises:
        ValueError: an argument of `REFUSED` differs from transformers' own default.
    """
    for field in fields(TrainingArguments):
        if field.name in REFUSED and given[field.name] != _default(field):
            raise ValueError(
                f"{field.name}={given[field.name]!r} can't be used to train a drafter: {REFUSED[field.name]}."
            )


def _default(field):
    return field.default if field.default_factory is MISSING else field.default_factory()
