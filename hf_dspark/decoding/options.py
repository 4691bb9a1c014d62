"""What becomes of every field of a `GenerationConfig` beside a drafter: each is exact, refused or without effect.

A test fails when transformers adds a field that isn't listed here; docs/generation_options.md is written from it.
"""

from hf_dspark.verification.probabilities import DEFAULTS

# Read as plain generation reads them; tried one by one by tests/generation_options.py.
EXACT = frozenset(
    """max_new_tokens max_length min_length min_new_tokens eos_token_id pad_token_id stop_strings max_time do_sample temperature
    top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff renormalize_logits num_return_sequences repetition_penalty
    encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty remove_invalid_values
    token_healing prefill_chunk_size output_scores output_logits output_hidden_states output_attentions
    return_dict_in_generate bos_token_id num_assistant_tokens assistant_confidence_threshold""".split()
)
# Refused where set, by `check_call`, by the scorer (processors that keep a state), or by transformers itself.
REFUSED = frozenset(
    """num_beams use_cache cache_implementation guidance_scale watermarking_config prompt_lookup_num_tokens dola_layers
    assistant_early_exit assistant_ensemble_weight use_mtp constraints force_words_ids penalty_alpha num_beam_groups
    diversity_penalty""".split()
)
# They steer another way of drafting: refused here, each with what to set instead.
FOREIGN = {
    "num_assistant_tokens_schedule": "set SpeculationConfig(scheduler='auto') to adapt the number of drafts",
    "assistant_lookbehind": "leave it out, as a drafter shares its target's tokenizer",
    "target_lookbehind": "leave it out, as a drafter shares its target's tokenizer",
    "max_matching_ngram_size": "leave it out, as it belongs to prompt_lookup_num_tokens",
    "speculation_type": "leave it out, as a drafter's own configuration says how it drafts",
}
# Nothing that they could change exists in a drafted call.
WITHOUT_EFFECT = {
    "decoder_start_token_id": "encoder-decoder models only",
    "early_stopping": "beam search only",
    "length_penalty": "beam search only",
    "low_memory": "beam search only",
    "cache_config": "read for quantized caches, which are refused",
    "max_cache_len": "sizes a static cache; drafts are verified in a cache that grows",
    "compile_config": "plain generation compiles for static caches only",
    "disable_compile": "plain generation compiles for static caches only",
    "continuous_batching_config": "read by generate_batch() only",
    "is_assistant": "set on a drafter by transformers' own loop",
    "transformers_version": "a note in the file",
    "speculation": "this library's own knobs",
}


def check_options(config) -> None:
    """Refuse options that steer another way of drafting; a value that equals transformers' default counts as not set.

    Raises:
        ValueError: naming the option and what to set instead.
    """
    for name, advice in FOREIGN.items():
        value = getattr(config, name, None)
        if value is not None and value != DEFAULTS.get(name):
            raise ValueError(
                f"{name}={value!r} steers transformers' own ways of drafting, and no drafter reads it: {advice}."
            )
