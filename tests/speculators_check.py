"""Run by hand beside `pip install speculators==0.9.0`: `python tests/speculators_check.py [DRAFTER TARGET]`. A minute
on a CPU.

Exports random drafters of every family (or the one given) to the speculators layout, loads each with that package's own
`SpeculatorModel.from_pretrained`, and compares the logits and confidences of its training forward with ours in float32,
each fed the target's states that its own layer ids name. TARGET is a folder: the package reads embedding and head from
there.
"""

import importlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from golden import target_features
from speculators import SpeculatorModel, SpeculatorModelConfig
from tiny import GQA, make_drafter, make_eagle3, make_target
from transformers import AutoModelForCausalLM

from hf_dspark import AutoDrafter
from hf_dspark.hub import export

T, ANCHORS, TOLERANCE = 40, torch.tensor([1, 7, 16, 30]), 1e-4
PLAIN = dict(correction_head="none", confidence_head=False)
BONUS, REDUCED = dict(sample_from_anchor=False), dict(draft_vocab_size=40)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6, window_from="anchor")
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
CASES = {
    "DSpark": (make_drafter, {}),
    "DSpark, reduced vocabulary": (make_drafter, REDUCED),
    "DSpark, bonus anchor, confidence without Markov": (make_drafter, dict(**BONUS, confidence_with_markov=False)),
    "DSpark, gated head": (make_drafter, dict(correction_head="gated")),
    "DSpark, rnn head, bonus anchor, reduced": (make_drafter, dict(correction_head="rnn", **BONUS, **REDUCED)),
    "DSpark, causal sliding layer, yarn": (make_drafter, dict(**SLIDING, causal_block=True, rope_parameters=YARN)),
    "DSpark, two-way sliding layer, embedding tap": (
        make_drafter,
        dict(**SLIDING, causal_block=False, target_layer_ids=[-1, 1]),
    ),
    "DFlash": (make_drafter, PLAIN | BONUS),
    "DFlash, reduced vocabulary": (make_drafter, PLAIN | BONUS | REDUCED),
    "DFlash, anchor samples": (make_drafter, PLAIN),
    "EAGLE-3": (make_eagle3, {}),
    "EAGLE-3, reduced vocabulary, norm_before_residual": (make_eagle3, dict(**REDUCED, norm_before_residual=True)),
    "EAGLE-3.1": (make_eagle3, dict(norm_before_residual=True, norm_before_fc=True, norm_output=True)),
    "EAGLE-3, Qwen3 body, fc_norm, two layers": (make_eagle3, dict(qk_norm=True, fc_norm=True, num_hidden_layers=2)),
}


def theirs(folder, target, tokens, chain):
    """Name of their class, and the arguments of each call of its metrics: logits first, a DSpark's confidences
    third."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the default, flex attention, is for GPUs
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    states = target(tokens[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in model.target_layer_ids], -1)
    mask = torch.zeros(1, T, dtype=torch.bool).index_fill(1, ANCHORS, True)
    call = dict(hidden_states=features, input_ids=tokens[None], verifier_last_hidden_states=states[-1], loss_mask=mask)
    call |= dict(ttt_steps=chain) if chain else dict(max_anchors=len(ANCHORS))
    metrics = mock.Mock(return_value=(torch.zeros(()), {}))
    with mock.patch.object(importlib.import_module(type(model).__module__), "compute_metrics", metrics):
        model(document_ids=torch.zeros(1, T, dtype=torch.long), **call)
    return type(model).__name__, [call.args for call in metrics.call_args_list]


def block(drafter, features, tokens):
    """Our teacher-forced (logits [A, K, Vd], confidences [A, K] or None) by the decoding protocol, every anchor a
    row."""
    rows, valid = len(ANCHORS), torch.arange(T) < ANCHORS[:, None]
    cache = drafter.new_cache(torch.zeros(rows, dtype=torch.long))
    drafter.extend(cache, features.expand(rows, -1, -1), tokens.roll(-1).expand(rows, -1), valid)
    state, out = drafter.start(cache, tokens[ANCHORS]), []
    for k in range(drafter.config.max_block):
        logits, confidence, state = drafter.step(cache, state, tokens[ANCHORS + k])
        out.append([logits] if confidence is None else [logits, confidence])
    return [torch.stack(parts, 1) for parts in zip(*out, strict=True)]


@torch.no_grad()
def check(name, drafter, target, folder):
    export(drafter, folder, "speculators", allow_unservable=True)
    config, chain = drafter.config, getattr(drafter.config, "chain_length", None)
    tokens = torch.randint(0, config.vocab_size - 1, (T,), generator=torch.Generator().manual_seed(3))
    kind, calls = theirs(folder, target, tokens, chain)
    features = target_features(target, tokens, config.target_layer_ids)
    if chain:  # both take `tokens` as those one ahead of the features; the last rows of a step lie behind the end
        steps = drafter.unroll(features, tokens[None], chain)
        pairs = [(drafter.logits(x)[:, : T - j], calls[j][0][:, : T - j]) for j, x in enumerate(steps)]
    else:
        first = config.block_size - config.max_block  # their slot 0 is no draft where the anchor is the bonus token
        wanted = [calls[0][0], calls[0][2]] if config.confidence_head else [calls[0][0]]
        wanted = [x.unflatten(1, (len(ANCHORS), -1))[0, :, first:] for x in wanted]
        pairs = list(zip(block(drafter, features, tokens), wanted, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    worst = max((a - b).abs().max().item() for a, b in pairs)
    size = max(b.abs().max().item() for _, b in pairs)
    print(
        f"{'ok  ' if worst <= TOLERANCE else 'FAIL'} {name} ({kind}): {worst:.1e}, largest logit {size:.0f}", flush=True
    )
    return worst <= TOLERANCE


def given(folder, place):
    target = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    drafter = AutoDrafter.from_pretrained(folder, target=target, dtype=torch.float32)
    drafter.config.target_name = str(Path(place).resolve())
    yield folder, drafter, target


def drawn(scratch):
    for model, tied in (("llama", False), ("qwen3", True)):
        make_target(model, tie_word_embeddings=tied, **GQA).float().save_pretrained(scratch / model)
        target = AutoModelForCausalLM.from_pretrained(scratch / model, dtype=torch.float32).eval()
        for name, (make, changes) in CASES.items():
            yield f"{name}, {model} target", make(target, **changes).float(), target


def main():
    with TemporaryDirectory() as scratch:
        cases = given(*sys.argv[1:]) if sys.argv[1:] else drawn(Path(scratch))
        results = [check(*case, Path(scratch, str(i))) for i, case in enumerate(cases)]
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
