"""Multi-token-prediction heads against recorded runs, and against themselves without a cache."""

import pytest
import tiny
import torch
from golden import expected_of, load_target, load_tensors, target_features

from hf_dspark import AutoDrafter, MTPConfig, MTPDrafter
from hf_dspark.decoding.target import FeatureTap
from hf_dspark.modeling.modeling_eagle3 import ChainKeys

FIXTURES = ["mtp-glm4moe-n1", "mtp-glm4moe-n2"]


def loaded(name):
    target = load_target(name)
    return target, AutoDrafter.from_target(target), expected_of(name), load_tensors(name)


def all_valid(*shape):
    return torch.ones(shape, dtype=torch.bool)


def chain(drafter, cache, anchor, seed, count, pseudo=None):
    """Draft ids [B, count], logits [B, count, V] and the last state of one stage."""
    state, prev, tokens, logits = drafter.start(cache, anchor, seed, pseudo, count), anchor, [], []
    for _ in range(count):
        step, _, state = drafter.step(cache, state, prev)
        prev = step.argmax(-1)
        tokens.append(prev)
        logits.append(step)
    return torch.stack(tokens, 1), torch.stack(logits, 1), state


# ---------------------------------------------------------------------- recorded runs


@pytest.mark.parametrize("name", FIXTURES)
def test_candidates_and_logits_of_a_whole_generation_equal_the_recorded_ones(name):
    target, drafter, expected, tensors = loaded(name)
    for p, case in enumerate(expected["cases"]):
        ids, fed = case["output_ids"], 0
        cache = drafter.new_cache(torch.zeros(1, dtype=torch.long))
        features = target(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        for r, reference in enumerate(case["rounds"]):
            n = reference["context_len"]
            assert reference["last_token"] == ids[n - 1]
            new = torch.tensor([ids[fed + 1 : n]])
            seed = drafter.extend(cache, features[:, fed : n - 1], new, all_valid(*new.shape))
            assert cache.lengths.tolist() == drafter.expected_length(torch.tensor([n])).tolist()
            mark = cache.mark()
            tokens, logits, _ = chain(drafter, cache, torch.tensor([ids[n - 1]]), seed, drafter.config.max_block)
            cache.rollback(mark)
            assert tokens[0].tolist() == reference["candidates"], f"prompt {p}, round {r}"
            if f"p{p}.r{r}.logits" in tensors:
                torch.testing.assert_close(logits[0], tensors[f"p{p}.r{r}.logits"], atol=1e-4, rtol=0)
            fed = n - 1


@pytest.mark.parametrize("name", FIXTURES)
def test_the_heads_over_true_tokens_equal_the_recorded_forward(name):
    target, drafter, _, tensors = loaded(name)
    ids, hidden = tensors["tf.input_ids"][None], tensors["tf.last_hidden"][None]
    torch.testing.assert_close(target_features(target, ids, [2]), hidden, atol=1e-5, rtol=0)
    heads = drafter.config.num_hidden_layers
    outputs = drafter.unroll(hidden, ids.roll(-1, 1), heads)
    for k, output in enumerate(outputs):
        theirs = tensors[f"tf.layer{k}.logits"]
        torch.testing.assert_close(drafter.logits(output)[0, : len(theirs)], theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("name", FIXTURES)
def test_generate_gives_the_recorded_texts_and_rounds(name, batched):
    target, drafter, expected, _ = loaded(name)
    cases = expected["cases"]
    for group in [cases] if batched else [[case] for case in cases]:
        batch = tiny.padded([torch.tensor(case["prompt"]) for case in group])
        out = target.generate(**batch, assistant_model=drafter, max_new_tokens=40, do_sample=False, eos_token_id=None)
        for row, case in enumerate(group):
            assert case["prompt"] + out[row, batch["input_ids"].shape[1] :].tolist() == case["output_ids"]
            ours = drafter.last_speculation.acceptance_lengths[row]
            gained = [r["tokens_gained"] for r in case["rounds"]]
            assert ours[:-1] == gained[: len(ours) - 1] and sum(ours) == sum(gained) == 39


# ---------------------------------------------------------------------- without a cache

HEADS = {
    "one": dict(chain_length=3),
    "one, state first, raw": dict(chain_length=3, hidden_first=True, norm_output=False, tap_final_norm=False),
    "one, window": dict(chain_length=3, block=dict(model_type="mistral", sliding_window=3)),
    "two": dict(heads=2),
    "three": dict(heads=3),
    "three, windows": dict(heads=3, block=dict(
        model_type="qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1,
    )),
    "two, own, reduced": dict(heads=2, own_embedding=True, own_head=True, draft_vocab_size=20),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny.make_target(seed=5, **tiny.GQA)


@pytest.fixture(params=HEADS)
def drafter(request, target):
    return tiny.make_mtp(target, seed=7, **HEADS[request.param])


def slow_outputs(drafter, features, tokens):
    """Outputs [slots, D] of every head, slot by slot over whole sequences: no cache, every earlier slot computed again.

    `features` [S, D] and `tokens` [S]: slot i is the pair (features[i], tokens[i]).
    """
    S, size = len(tokens), features.shape[-1]
    hidden, out = features, []
    for j, window in enumerate(drafter.windows):
        rows = torch.zeros(S, size, dtype=features.dtype)
        for s in range(j, S):
            first = j if window is None else max(j, s - window + 1)
            # Keys don't depend on the query, so the slots that this one sees are fed as they stand.
            part = slice(first, s + 1)
            mask = torch.ones(s + 1 - first, s + 1 - first, dtype=torch.bool).tril()[None, None]
            output = drafter.backbone(
                hidden[None, part], tokens[None, part], torch.arange(S)[None, part], ChainKeys({}), mask, j
            )
            rows[s] = output[0, -1]
        out.append(rows)
        hidden = torch.cat([torch.zeros(1, size, dtype=features.dtype), rows[:-1]])
    return out


def slow_drafts(drafter, features, ids, stages):
    """Greedy drafts of `stages` stages behind the committed `ids`, whose features (but the anchor's) are known."""
    K, tokens, drafts = drafter.config.max_block, ids[1:].tolist(), []
    features = drafter.project(features)
    single = len(drafter.windows) == 1
    for _ in range(stages):
        pseudo = []
        for k in range(K):
            if single:  # the recursion is one long chain of slots
                known = torch.cat([features, *[p[None] for p in pseudo]])
                output = slow_outputs(drafter, known, torch.tensor(tokens))[0][-1]
            else:
                blind = torch.cat([features, torch.zeros(k, features.shape[-1], dtype=features.dtype)])
                output = slow_outputs(drafter, blind, torch.tensor(tokens))[k][-1]
            pseudo.append(output)
            token = int(drafter.target_ids(drafter.logits(output).argmax(-1)))
            drafts.append(token)
            tokens.append(token)
        features = torch.cat([features, torch.stack(pseudo)])
    return drafts


@torch.no_grad()
def test_ragged_rounds_and_stages_draft_what_a_computation_without_cache_drafts(drafter):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, tiny.V, (3, 16), generator=generator)
    features = torch.randn(3, 16, tiny.HIDDEN, generator=generator, dtype=torch.float64)
    fed, K = torch.zeros(3, dtype=torch.long), drafter.config.max_block
    cache = drafter.new_cache(fed)
    for committed in ([7, 2, 4], [9, 5, 5], [10, 6, 8]):
        n = torch.tensor(committed)
        counts = n - 1 - fed
        width = int(counts.max())
        index = (fed[:, None] + torch.arange(width)).clamp(max=15)
        rows = torch.arange(3)[:, None]
        valid = torch.arange(width) < counts[:, None]
        seed = drafter.extend(cache, features[rows, index], ids[rows, (index + 1).clamp(max=15)], valid)
        mark, anchors, pseudo, drafts = cache.mark(), ids[torch.arange(3), n - 1], None, []
        for stage in range(2):
            state, prev = drafter.start(cache, anchors, None if stage else seed, pseudo, K), anchors
            for _ in range(K):
                logits, _, state = drafter.step(cache, state, prev)
                prev = drafter.target_ids(logits.argmax(-1))
                drafts.append(prev)
            anchors, pseudo = prev, state.pseudo
        cache.rollback(mark)
        for row, length in enumerate(committed):
            slow = slow_drafts(drafter, features[row, : length - 1], ids[row, :length], 2)
            assert torch.stack(drafts, 1)[row].tolist() == slow, (committed, row)
        fed = n - 1


@torch.no_grad()
def test_training_computes_the_states_that_decoding_does(drafter):
    if any(drafter.windows):
        with pytest.raises(ValueError, match="full attention"):
            drafter.unroll(torch.zeros(1, 4, tiny.HIDDEN), torch.zeros(1, 4, dtype=torch.long), 1)
        return
    generator, K = torch.Generator().manual_seed(4), drafter.config.max_block
    ids = torch.randint(3, tiny.V, (1, 12), generator=generator)
    features = torch.randn(1, 12, tiny.HIDDEN, generator=generator, dtype=torch.float64)
    for a in (1, 2, 6):
        cache = drafter.new_cache(torch.zeros(1, dtype=torch.long))
        seed = drafter.extend(cache, features[:, :a], ids[:, 1 : a + 1], all_valid(1, a))
        state, decoded = drafter.start(cache, ids[:, a], seed, None, K), []
        for k in range(K):
            logits, _, state = drafter.step(cache, state, ids[:, a + k])
            decoded.append(logits)
        trained = drafter(features, ids, anchors=torch.tensor([[a]])).hidden[0]
        torch.testing.assert_close(drafter.logits(trained[:, 0]), torch.stack(decoded, 1), atol=1e-9, rtol=0)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(target):
    for drafter in (tiny.make_mtp(target, chain_length=2), tiny.make_mtp(target, heads=3)):
        generator, K = torch.Generator().manual_seed(4), drafter.config.max_block
        ids = torch.randint(3, tiny.V, (1, 14), generator=generator)
        features = torch.randn(1, 14, tiny.HIDDEN, generator=generator, dtype=torch.float64)
        positions = torch.cat([torch.arange(6), torch.arange(8)])[None]
        both = drafter.unroll(features, ids.roll(-1, 1), K, positions)
        alone = drafter.unroll(features[:, 6:], ids[:, 6:].roll(-1, 1), K)
        last = 8 - K
        for one, other in zip(both, alone, strict=True):
            torch.testing.assert_close(one[:, 6 : 6 + last], other[:, :last], atol=1e-9, rtol=0)


@torch.no_grad()
def test_options_of_a_head_do_what_they_say(target):
    """The order of the projection's inputs, the norm before the head whatever is fed back, the two last states."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, tiny.V, (1, 6), generator=generator)
    features = torch.randn(1, 6, tiny.HIDDEN, generator=generator, dtype=torch.float64)

    def chain_of(**changes):
        drafter = tiny.make_mtp(target, seed=7, **changes)
        if drafter.config.hidden_first:
            weight = drafter.layers[0].eh_proj.weight
            weight.copy_(weight.roll(tiny.HIDDEN, 1))
        cache = drafter.new_cache(torch.zeros(1, dtype=torch.long))
        seed = drafter.extend(cache, features, ids, all_valid(1, 6))
        return chain(drafter, cache, ids[:, -1], seed, 2)[1][0]

    plain, swapped, raw = chain_of(), chain_of(hidden_first=True), chain_of(norm_output=False)
    torch.testing.assert_close(swapped, plain, atol=1e-9, rtol=0)
    torch.testing.assert_close(raw[0], plain[0], atol=1e-9, rtol=0)
    assert not torch.allclose(raw[1], plain[1])


def test_the_last_state_is_tapped_behind_the_final_norm_or_before():
    for name in ("llama", "gpt2"):
        target = tiny.load_case(name).target
        N, ids = target.config.num_hidden_layers, torch.tensor([[3, 4, 5]])
        with torch.no_grad(), FeatureTap(target, [N - 1, N]) as tap:
            normed = target(ids, output_hidden_states=True).hidden_states[-1]
            raw, found = tap.features().chunk(2, -1)
            decoder = target.get_decoder()
            norm = decoder.norm if hasattr(decoder, "norm") else decoder.ln_f
            assert torch.equal(found, normed) and torch.equal(norm(raw), normed)


# ---------------------------------------------------------------------- configuration


def test_a_configuration_is_the_blocks(target):
    config = MTPConfig(dict(model_type="qwen3", hidden_size=64, num_hidden_layers=2, head_dim=4, vocab_size=7))
    assert (config.hidden_size, config.head_dim, config.vocab_size, config.max_block) == (64, 4, 7, 2)
    assert config.fixed_block and not MTPConfig(chain_length=5).fixed_block and MTPConfig(chain_length=5).max_block == 5
    again = MTPConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert MTPConfig(num_target_layers=9).target_layer_ids == [9]
    assert MTPConfig(num_target_layers=9, tap_final_norm=False).target_layer_ids == [8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(chain_length=0), "chain_length=0 drafts nothing"),
        (dict(heads=2, chain_length=3), "3 with 2 heads.*loop_gate"),
        (dict(heads=2, norm_output=False), "norm_output=False with 2 heads"),
        (dict(block=dict(model_type="gpt2", n_embd=32, n_head=4, n_layer=1)), "don't rotate by position"),
    ],
)
def test_what_cannot_draft_is_refused(target, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny.make_mtp(target, **changes)


def test_several_heads_are_trained_without_loops(target):
    drafter, ids = tiny.make_mtp(target, heads=2), torch.arange(3, 11)[None]
    with pytest.raises(ValueError, match="loop_exposure=0"):
        drafter(torch.zeros(1, 8, tiny.HIDDEN), ids, labels=ids, stages=2)


def test_random_heads_have_finite_weights_and_grow_nothing(target):
    block = dict(model_type="mixtral", hidden_size=32, num_hidden_layers=1, num_local_experts=2, intermediate_size=8)
    config = MTPConfig(block)
    weights = MTPDrafter(config).state_dict()
    assert all(t.isfinite().all() and t.abs().max() < 2 for t in weights.values())
