"""Gemma 4's assistant on our cache: its steps against transformers' own model, and texts at any batch size."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from hf_dspark import AssistantDrafter, AutoDrafter, SpeculationConfig
from hf_dspark.decoding.target import FeatureTap
from hf_dspark.hub import export

if "gemma4_assistant" not in CONFIG_MAPPING:
    pytest.skip("no Gemma 4 assistant in this release", allow_module_level=True)

V, WINDOW = 20, 4
ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
BODY = dict(
    vocab_size=V, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1,
    head_dim=8, global_head_dim=12, attention_k_eq_v=True, hidden_size_per_layer_input=0, pad_token_id=0,
    sliding_window=WINDOW, rope_parameters=ROPE, eos_token_id=None, bos_token_id=1,
)  # fmt: skip
TARGET = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
KINDS = {
    "plain head": {},
    "ordered embeddings": dict(use_ordered_embeddings=True, num_centroids=5, centroid_intermediate_top_k=2),
}
PROMPTS = [torch.tensor(p) for p in ([3, 4, 5, 6, 7, 8, 9], [8, 3], [5, 5, 4, 7])]


def save_pair(folder, **options):
    """Folders of a target and an assistant with random weights."""
    target = tiny.redraw(AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "gemma4_text", **BODY, hidden_size=32, num_hidden_layers=4, layer_types=TARGET, num_kv_shared_layers=0,
    )), 3)  # fmt: skip
    text = dict(
        **BODY, model_type="gemma4_text", hidden_size=16, num_hidden_layers=2, layer_types=TARGET[:2],
        vocab_size_per_layer_input=0, num_kv_shared_layers=2,
    )  # fmt: skip
    config = AutoConfig.for_model("gemma4_assistant", text_config=text, backbone_hidden_size=32, **options)
    assistant = tiny.redraw(AutoModelForCausalLM.from_config(config), 4)
    if options:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(V, generator=torch.Generator().manual_seed(5)))
    assistant.generation_config.num_assistant_tokens = 3
    target.save_pretrained(folder / "target")
    assistant.save_pretrained(folder / "assistant")
    return folder / "target", folder / "assistant"


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    """A target, transformers' assistant and ours, in float64."""
    target, assistant = save_pair(tmp_path, **KINDS[request.param])
    loaded = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float64).eval() for p in (target, assistant)]
    return *loaded, AutoDrafter.from_pretrained(assistant, target=loaded[0])


def greedy(target, prompts, drafter=None, **options):
    batch = tiny.padded(prompts)
    out = target.generate(**batch, assistant_model=drafter, max_new_tokens=14, do_sample=False, **options)
    return out[:, batch["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def test_every_step_computes_what_transformers_assistant_does(pair):
    target, theirs, ours = pair
    for prompt in PROMPTS:
        ids, anchor = prompt[None], torch.tensor([11])
        with FeatureTap(target, ours.config.target_layer_ids) as tap:
            out = target(ids, output_hidden_states=True, return_shared_kv_states=True)
            features = tap.features()
        next_tokens = torch.cat([ids[:, 1:], anchor[None]], 1)
        cache = ours.new_cache(torch.zeros(1, dtype=torch.long))
        seed = ours.extend(cache, features, next_tokens, torch.ones_like(next_tokens, dtype=torch.bool))
        shared, hidden, prev = out.shared_kv_states, out.hidden_states[-1][:, -1:], anchor
        for kind, buffer in zip(("full_attention", "sliding_attention"), cache.layers):
            for one, other in zip((buffer.keys, buffer.values), shared[kind]):
                torch.testing.assert_close(one[:1, :, : len(prompt)], other, atol=1e-9, rtol=0)
        state = ours.start(cache, anchor, seed)
        for _ in range(4):
            embedding = target.get_input_embeddings()(prev[:, None])
            expected = theirs(
                inputs_embeds=torch.cat([embedding, hidden], -1), position_ids=torch.tensor([[len(prompt)]]),
                shared_kv_states=shared,
            )  # fmt: skip
            logits, confidence, state = ours.step(cache, state, prev)
            possible = logits[0].isfinite()
            assert confidence is None and int(possible.sum()) in (V, 8)
            torch.testing.assert_close(logits[0, possible], expected.logits[0, 0, possible], atol=1e-6, rtol=0)
            hidden, prev = expected.last_hidden_state, logits.argmax(-1)


def test_texts_are_plain_texts_alone_and_together_and_in_stages(pair):
    target, _, drafter = pair
    assert drafter.config.max_block == 3 and type(drafter) is AssistantDrafter
    plain = greedy(target, PROMPTS)
    assert greedy(target, PROMPTS, drafter) == plain
    assert [greedy(target, [p], drafter)[0] for p in PROMPTS] == plain
    looped = SpeculationConfig(loop_gate=-1e9, max_draft_stages=3)
    assert greedy(target, PROMPTS, drafter, speculation=looped) == plain
    assert max(map(max, drafter.last_speculation.draft_stages)) == 3
    sampled = dict(do_sample=True, max_new_tokens=8, assistant_model=drafter)
    for verification in ("ratio", "match"):
        knobs = SpeculationConfig(verification=verification, seed=3)
        assert target.generate(**tiny.padded(PROMPTS), **sampled, speculation=knobs).shape == (3, 15)


@torch.no_grad()
def test_rows_of_a_batch_draft_as_they_do_alone(pair):
    target, _, drafter = pair
    lengths = torch.tensor([len(p) for p in PROMPTS])
    ids = torch.stack([torch.nn.functional.pad(p, (0, 7 - len(p))) for p in PROMPTS])
    features = torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    valid, anchors = torch.arange(7) < lengths[:, None], torch.tensor([9, 10, 11])

    def chain(rows, width):
        cache = drafter.new_cache(torch.zeros(len(rows), dtype=torch.long))
        seed = drafter.extend(cache, features[rows, :width], ids[rows, :width], valid[rows, :width])
        state, prev, out = drafter.start(cache, anchors[rows], seed), anchors[rows], []
        for _ in range(3):
            logits, _, state = drafter.step(cache, state, prev)
            prev = logits.argmax(-1)
            out.append(logits)
        return torch.stack(out, 1)

    together = chain([0, 1, 2], 7)
    for row, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(chain([row], n)[0], together[row], atol=1e-9, rtol=0)


def test_nothing_of_the_targets_is_registered_and_files_come_back(pair, tmp_path):
    target, theirs, drafter = pair
    assert drafter.state_dict().keys() == {f"body.{name}" for name in theirs.state_dict()}
    assert drafter.sources["embed_tokens.weight"] == "target (borrowed)" and "lm_head.weight" not in drafter.sources
    drafter.save_pretrained(tmp_path / "own")
    again = AutoDrafter.from_pretrained(tmp_path / "own", target=target)
    assert greedy(target, PROMPTS, again) == greedy(target, PROMPTS)
    assert all(torch.equal(t, again.state_dict()[k]) for k, t in drafter.state_dict().items())
    with pytest.raises(ValueError, match="published checkpoint"):
        export(drafter, tmp_path / "out", "speculators")
    with pytest.raises(ValueError, match="can't be trained here"):
        drafter(features=None)


def test_what_does_not_fit_is_refused(tmp_path):
    folders = save_pair(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(folders[0])
    with pytest.raises(ValueError, match="pass target="):
        AutoDrafter.from_pretrained(folders[1])
    with pytest.raises(ValueError, match="full and one with sliding attention"):
        AutoDrafter.from_pretrained(folders[1], target=tiny.make_target())
    with pytest.raises(ValueError, match="no full_attention with keys"):
        AutoDrafter.from_pretrained(folders[1], target=target, key_value_layers=[2, 1])
    weights = load_file(folders[1] / "model.safetensors")
    lost = weights.pop("pre_projection.weight")
    save_file(weights, folders[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing: body.pre_projection.weight"):
        AutoDrafter.from_pretrained(folders[1], target=target)
    assert lost.shape == (16, 64)
    config = json.loads((folders[1] / "config.json").read_text())
    (folders[1] / "config.json").write_text(json.dumps({**config, "backbone_hidden_size": 16}))
    with pytest.raises(ValueError, match="hidden size"):
        AutoDrafter.from_pretrained(folders[1], target=target)
