"""Heads out of a target's own checkpoint: what transformers drafts with them, what is read, borrowed and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import padded
from tiny_heads import CARRIERS, make_heads, save_carrier
from transformers import AutoModelForCausalLM
from transformers.generation import GenerationConfig

from hf_dspark import AutoDrafter, EngineRequest, MTPDrafter, SpeculationConfig, SpeculativeEngine
from hf_dspark.hub import export

PROMPTS = [[3, 4, 5, 6, 7], [8, 3, 9], [5, 5, 4, 7], [11, 10, 9, 8, 7, 6]]
NEW = 24
theirs_exist = hasattr(GenerationConfig(), "use_mtp")


@pytest.fixture(params=CARRIERS)
def carrier(request, tmp_path):
    return save_carrier(request.param, tmp_path)


def greedy(target, prompts, **options):
    batch = padded([torch.tensor(p) for p in prompts])
    out = target.generate(**batch, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **options)
    return out[:, batch["input_ids"].shape[1] :].tolist()


# ---------------------------------------------------------------------- transformers' own heads


def theirs(target, prompt, monkeypatch):
    """Text and every round's drafts of transformers' own loop."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    rounds, original = [], MTPCandidateGenerator.get_candidates

    def recording(self, input_ids, *args, **kwargs):
        out = original(self, input_ids, *args, **kwargs)
        if out[1] is not None:
            rounds.append(out[0][0, input_ids.shape[1] :].tolist())
        return out

    with monkeypatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", recording)
        return greedy(target, [prompt], use_mtp=True), rounds


def ours(target, drafter, prompt, monkeypatch):
    rounds, start, step = [], MTPDrafter.start, MTPDrafter.step

    def recording_start(self, *args, **kwargs):
        rounds.append([])
        return start(self, *args, **kwargs)

    def recording_step(self, *args):
        out = step(self, *args)
        rounds[-1].append(int(out[0][0].argmax()))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(MTPDrafter, "start", recording_start)
        patch.setattr(MTPDrafter, "step", recording_step)
        return greedy(target, [prompt], assistant_model=drafter), rounds


@pytest.mark.skipif(not theirs_exist, reason="no multi-token prediction in this release")
def test_drafts_and_texts_are_those_of_transformers_and_go_on_in_a_batch(carrier, monkeypatch):
    drafter, accepted, texts = AutoDrafter.from_target(carrier), 0, []
    for prompt in PROMPTS:
        text, drafts = theirs(carrier, prompt, monkeypatch)
        assert text == greedy(carrier, [prompt])
        mine, own = ours(carrier, drafter, prompt, monkeypatch)
        assert mine == text and len(own) >= len(drafts) - 1
        for one, other in zip(own, drafts):
            assert one == other[: len(one)]
        accepted += sum(n - 1 for n in drafter.last_speculation.acceptance_lengths[0])
        texts += text
    assert accepted, "some drafts are right"
    with pytest.raises(ValueError, match="batch"):
        greedy(carrier, PROMPTS, use_mtp=True)
    assert greedy(carrier, PROMPTS, assistant_model=drafter) == texts


# ---------------------------------------------------------------------- what is read


def test_only_the_shards_that_hold_heads_are_opened(tmp_path):
    target = save_carrier("glm, three heads", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    heads = {k: t for k, t in weights.items() if any(f"layers.{i}." in k for i in (3, 4, 5))}
    shards = {"target.safetensors": {k: t for k, t in weights.items() if k not in heads}, "heads.safetensors": heads}
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name, metadata={"format": "pt"})
    index = {k: name for name, tensors in shards.items() for k in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "target.safetensors").unlink()
    assert AutoDrafter.from_target(target).config.num_hidden_layers == 3


def test_nothing_of_the_targets_size_is_copied_or_registered(tmp_path):
    target = save_carrier("deepseek, latent attention", tmp_path, copies=True)
    drafter = AutoDrafter.from_target(target)
    vocabulary = target.config.vocab_size
    assert all(vocabulary not in t.shape for t in [*drafter.state_dict().values(), *drafter.buffers()])
    assert not {id(p) for p in target.parameters()} & {id(p) for p in drafter.parameters()}
    assert drafter.sources["embed_tokens.weight"] == drafter.sources["lm_head.weight"] == "target (borrowed)"
    block = sum(p.numel() for p in drafter.parameters())
    layer = sum(p.numel() for p in target.model.layers[-1].parameters())
    assert block == layer + 2 * 32 * 32 + 3 * 32, "a layer, a projection and three norms"


def test_what_transformers_keeps_in_float32_stays_so_in_bfloat16(tmp_path):
    target = save_carrier("glm, one head", tmp_path, torch.bfloat16)
    drafter = AutoDrafter.from_target(target)
    gate = drafter.layers[0].block.mlp.gate
    assert drafter.dtype == torch.bfloat16 and gate.e_score_correction_bias.dtype == torch.float32
    assert len(greedy(target, PROMPTS, assistant_model=drafter)[0]) == NEW


def test_an_embedding_that_differs_from_the_targets_is_kept(tmp_path):
    def edit(weights):
        weights["model.layers.3.embed_tokens.weight"] += 1

    drafter = AutoDrafter.from_target(save_carrier("deepseek, latent attention", tmp_path, copies=True, edit=edit))
    assert drafter.config.own_embedding and not drafter.config.own_head
    target = save_carrier("glm, three heads", tmp_path / "b", copies=True, edit=edit)
    with pytest.raises(ValueError, match=r"layers\.3\.embed_tokens\.weight isn't the target's"):
        AutoDrafter.from_target(target)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("model.layers.3.eh_proj.weight"), r"missing: layers\.0\.eh_proj"),
        (lambda w: w.pop("model.layers.3.self_attn.q_proj.weight"), r"missing layers\.0\.self_attn\.q_proj"),
        (lambda w: w.update({"model.layers.3.self_attn.sink": torch.zeros(4)}), r"unknown layers\.0\.self_attn\.sink"),
        (lambda w: [w.pop(k) for k in list(w) if ".layers.3." in k], r"no multi-token-prediction heads"),
    ],
)
def test_a_checkpoint_that_lacks_or_adds_something_is_refused_by_name(edit, message, tmp_path):
    target = save_carrier("glm, one head", tmp_path, edit=edit)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_target(target)


def test_a_target_of_no_checkpoint_has_no_heads():
    import tiny

    with pytest.raises(ValueError, match="built in memory"):
        AutoDrafter.from_target(tiny.make_target())


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["glm, one head", "mellum, window", "deepseek, latent attention"])
def test_speculators_files_bring_back_the_same_drafts(name, tmp_path):
    target = save_carrier(name, tmp_path / "target")
    drafter = AutoDrafter.from_target(target, chain_length=3)
    export(drafter, tmp_path / "out", "speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "mtp" and config["num_nextn_predict_layers"] == 1
    assert config["transformer_layer_config"]["num_hidden_layers"] == 3
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    around = {"hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm"}
    assert {f"mtp_layers.0.{part}.weight" for part in around} < names and "mtp_layers.0.input_layernorm.weight" in names
    again = AutoDrafter.from_pretrained(tmp_path / "out", target=target)
    assert again.config.chain_length == 3 and again.config.target_layer_ids == [3]
    for k, t in drafter.state_dict().items():
        assert torch.equal(t, again.state_dict()[k]), k
    assert greedy(target, PROMPTS, assistant_model=again) == greedy(target, PROMPTS)
    assert AutoDrafter.from_pretrained(tmp_path / "out").config.num_target_layers == 3


def test_what_the_format_cannot_say_is_refused(tmp_path):
    target = save_carrier("glm, three heads", tmp_path / "target")
    drafter = AutoDrafter.from_target(target)
    with pytest.raises(ValueError, match="3 heads"):
        export(drafter, tmp_path / "out", "speculators")
    single = make_heads(target, 1, True, hidden_first=True)
    with pytest.raises(ValueError, match="hidden_first"):
        export(single, tmp_path / "out", "speculators", target=target)
    for layout in ("sglang", "deepspec", "zlab"):
        with pytest.raises(ValueError, match="speculators"):
            export(drafter, tmp_path / "out", layout)


@pytest.mark.parametrize("name", ["glm, three heads", "mellum, experts"])
def test_our_own_files_bring_back_the_same_heads(name, tmp_path):
    target = save_carrier(name, tmp_path / "target")
    drafter = AutoDrafter.from_target(target)
    drafter.speculation = SpeculationConfig(num_draft_tokens=2)
    drafter.save_pretrained(tmp_path / "own")
    again = AutoDrafter.from_pretrained(tmp_path / "own", target=target)
    assert type(again) is MTPDrafter and again.speculation.num_draft_tokens == 2
    assert again.config.to_dict() | {"_name_or_path": ""} == drafter.config.to_dict() | {"_name_or_path": ""}
    assert all(torch.equal(t, again.state_dict()[k]) for k, t in drafter.state_dict().items())


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_heads_of_gated_attention_and_zero_centred_norms_are_built(model_type, tmp_path):
    """Their targets keep a recurrent state and are refused by generate(); the heads themselves are attention only."""
    from transformers import AutoConfig

    from hf_dspark.modeling.configuration_mtp import block_config_of

    config = AutoConfig.for_model(
        model_type, vocab_size=13, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=40, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config)
    drafter = make_heads(target, 1, "moe" in model_type or model_type == "qwen3_next")
    assert drafter.layers[0].block.self_attn.q_proj.weight.shape == (64, 32), "queries and their gates"
    assert block_config_of(config, 1, False)["layer_types"] == ["full_attention"]
    norm = drafter.layers[0].enorm
    with torch.no_grad():
        norm.weight.zero_()
        x = torch.randn(1, 32, dtype=torch.float64)
        torch.testing.assert_close(norm(x).pow(2).mean(), torch.tensor(1.0, dtype=torch.float64), atol=1e-3, rtol=0)


# ---------------------------------------------------------------------- trees, and rows that come and go


@pytest.mark.parametrize("name", ["glm, one head", "glm, three heads"])
def test_heads_make_trees_of_a_chain_drafter(name, tmp_path):
    target = save_carrier(name, tmp_path)
    drafter = AutoDrafter.from_target(target, **({"chain_length": 3} if "one" in name else {}))
    plain = greedy(target, PROMPTS)
    for tree in ("eagle2", "auto"):
        knobs = SpeculationConfig(tree=tree, tree_budget=6)
        assert greedy(target, PROMPTS, assistant_model=drafter, speculation=knobs) == plain
        if tree == "eagle2":  # "auto" goes by measured times
            assert max(map(max, drafter.last_speculation.draft_lengths)) == 6
    with pytest.raises(ValueError, match="drafts token by token.*eagle2"):
        greedy(target, PROMPTS, assistant_model=drafter, speculation=SpeculationConfig(tree="ddtree"))


@pytest.mark.parametrize("shared", [None, 2])
def test_an_engine_admits_and_retires_rows_of_heads(tmp_path, shared):
    target = save_carrier("glm, three heads", tmp_path)
    prompts = [*PROMPTS, [*PROMPTS[0], 3, 9, 4]]
    drafter, plain = AutoDrafter.from_target(target), [greedy(target, [p])[0] for p in prompts]
    lengths = (24, 7, 15, 24, 20)
    requests = [
        EngineRequest(input_ids=p, key=i, options=dict(max_new_tokens=n, eos_token_id=None, do_sample=False))
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    found = SpeculativeEngine(target, drafter, max_rows=2, shared_prefix=shared).generate(requests)
    assert [result.error for result in found] == [None] * 5
    assert [result.tokens for result in found] == [text[:n] for text, n in zip(plain, lengths, strict=True)]
