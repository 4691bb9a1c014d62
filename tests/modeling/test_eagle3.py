"""EAGLE-3 against reference chains, a slow oracle that knows no cache and no mask, and the cache's invariants."""

import pytest
import torch
from golden import load_fixture, target_features
from torch.nn import functional as F

from hf_dspark.modeling import modeling_eagle3

BODIES = {
    "llama": dict(qk_norm=False),
    "qwen3": dict(chain_length=4),
    "eagle3.1": dict(norm_before_residual=True, norm_before_fc=True, norm_output=True, position_offset=1),
    "norm per tap": dict(fc_norm=True, fc_bias=True, attention_bias=True, attention_output_bias=True),
    "no final norm": dict(norm_head=False, embed_scale=4.0, final_logit_softcapping=2.0),
    "three layers": dict(num_hidden_layers=3, norm_output=True),
    "own and reduced": dict(own_embedding=True, own_head=True, draft_vocab_size=11),
}


def all_valid(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.fixture(params=BODIES)
def drafter(request, make_eagle3):
    return make_eagle3(**BODIES[request.param])


# ---------------------------------------------------------------------- reference fixtures


def greedy_chain(drafter, cache, anchor, seed, count):
    """Draft ids and logits of one chain; the cache is left as it was."""
    mark, state, prev, tokens, logits = cache.mark(), drafter.start(cache, anchor, seed), anchor, [], []
    for _ in range(count):
        step, _, state = drafter.step(cache, state, prev)
        prev = drafter.target_ids(step.argmax(-1))
        tokens.append(int(prev))
        logits.append(step[0])
    cache.rollback(mark)
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("name", ["deepspec-eagle3", "safeailab-eagle3-llama"])
def test_chains_of_a_whole_generation_on_one_cache_equal_the_references(name):
    target, drafter, expected, tensors = load_fixture(name)
    cases = [case for case in expected["cases"] if case.get("mode") != "tree"]
    for p, case in enumerate(cases):
        ids, fed, n = case["output_ids"], 0, len(case["prompt"]) + 1
        cache = drafter.new_cache(torch.zeros(1, dtype=torch.long))
        features = target_features(target, ids, drafter.config.target_layer_ids)
        blocks = case.get("verify_blocks") or [r["tokens"] for r in case["rounds"]]
        accepted = case.get("acceptance_lengths_upper") or case["acceptance_lengths"]
        for r, (block, gain) in enumerate(zip(blocks, accepted, strict=True)):
            new = torch.tensor([ids[fed + 1 : n]])
            seed = drafter.extend(cache, features[:, fed : n - 1], new, all_valid(*new.shape))
            assert cache.lengths.tolist() == drafter.expected_length(torch.tensor([n])).tolist()
            tokens, logits = greedy_chain(drafter, cache, torch.tensor([block[0]]), seed, len(block) - 1)
            assert tokens == block[1:], f"prompt {p}, round {r}"
            if f"chain.p{p}.r{r}.step_logits" in tensors:
                first, rest = (tensors[f"chain.p{p}.r{r}.{k}"] for k in ("step0_logits", "step_logits"))
                torch.testing.assert_close(logits, torch.cat([first, rest[:, 0]]), atol=1e-4, rtol=0)
            fed, n = n - 1, n + gain


# ---------------------------------------------------------------------- a slow, obvious oracle


class SlowChain:
    """Slots one at a time, heads one at a time, every slot told which earlier slots it sees. No cache, no mask."""

    def __init__(self, drafter):
        self.drafter, self.config, self.past = drafter, drafter.config, [[] for _ in drafter.layers]

    def norm(self, x, module):
        return module.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean() + self.config.rms_norm_eps)).to(x.dtype)

    def turn(self, x, position):
        half = len(x) // 2
        angle = position * self.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s])

    def attention(self, module, x, layer, position, sees):
        size = self.config.head_dim
        split = lambda y: [part.clone() for part in y.split(size)]  # noqa: E731
        q, k, v = (split(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj))
        if self.config.qk_norm:
            q, k = [self.norm(h, module.q_norm) for h in q], [self.norm(h, module.k_norm) for h in k]
        q, k = [self.turn(h, position) for h in q], [self.turn(h, position) for h in k]
        self.past[layer].append((k, v))
        heads = []
        for h, query in enumerate(q):
            g = h * len(k) // len(q)
            keys, values = (torch.stack([self.past[layer][s][i][g] for s in sees]) for i in (0, 1))
            heads.append(torch.softmax(keys @ query / size**0.5, 0) @ values)
        return module.o_proj(torch.cat(heads))

    def fuse(self, features):
        d, c = self.drafter, self.config
        if c.norm_before_fc:
            features = self.norm(features, d.input_norm)
        if c.fc_norm:
            parts = features.split(c.target_hidden_size)
            features = torch.cat([self.norm(x, m) for x, m in zip(parts, d.fc_norm, strict=True)])
        return d.fc(features)

    def feed(self, hidden, token, position, sees):
        """Output [D] of one slot, which is number len(past) and sees the slots `sees`, itself among them."""
        d, c = self.drafter, self.config
        embedding = (d.embed_tokens if c.own_embedding else d._bound["embedding"]).weight[token] * c.embed_scale
        for i, layer in enumerate(d.layers):
            if i == 0:
                normed = self.norm(hidden, layer.hidden_norm)
                x = normed if c.norm_before_residual else hidden
                y = torch.cat([self.norm(embedding, layer.input_layernorm), normed])
            else:
                y = self.norm(x, layer.input_layernorm)
            x = x + self.attention(layer.self_attn, y, i, position + c.position_offset, sees)
            y, m = self.norm(x, layer.post_attention_layernorm), layer.mlp
            x = x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))
        return self.norm(x, d.norm) if c.norm_output else x

    def logits(self, x):
        d, c = self.drafter, self.config
        x = self.norm(x, d.norm) if c.norm_head and not c.norm_output else x
        logits = (d.lm_head if c.own_head else d._bound["head"])(x)
        cap = c.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_decoding_equals_the_slow_chain(drafter, draw):
    features, tokens = draw(1, 6)
    cache = drafter.new_cache(torch.tensor([3]))
    seed = drafter.extend(cache, features, tokens, all_valid(1, 6))
    slow = SlowChain(drafter)
    for i in range(6):
        output = slow.feed(slow.fuse(features[0, i]), tokens[0, i], 3 + i, range(i + 1))
    close(seed[0], output)
    state, drafts = drafter.start(cache, tokens[:, -1], seed), torch.tensor([8, 3, 5])
    for k in range(4):
        logits, confidence, state = drafter.step(cache, state, tokens[:, -1] if k == 0 else drafts[k - 1 : k])
        if k > 0:
            output = slow.feed(output, drafts[k - 1], 8 + k, range(6 + k))
        close(logits[0], slow.logits(output))
        assert confidence is None


def test_unrolling_equals_the_slow_chain(drafter, draw):
    steps, T = 4, 7
    features, tokens = draw(1, T)
    outputs = drafter.unroll(features, tokens, steps)
    slow = SlowChain(drafter)
    latest = [slow.feed(slow.fuse(features[0, i]), tokens[0, i], i, range(i + 1)) for i in range(T)]
    for j in range(steps):
        if j > 0:
            own = lambda i: [s * T + i for s in range(1, j + 1)]  # noqa: B023, E731
            latest = [slow.feed(latest[i], tokens[0, (i + j) % T], i + j, [*range(i + 1), *own(i)]) for i in range(T)]
        close(outputs[j][0], torch.stack(latest))


@pytest.mark.parametrize(
    "flags, tensors",
    [
        (dict(qk_norm=True), {"layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"}),
        (dict(norm_before_fc=True), {"input_norm.weight"}),
        (dict(fc_norm=True), {"fc_norm.0.weight", "fc_norm.1.weight"}),
        (dict(fc_bias=True), {"fc.bias"}),
        (dict(attention_bias=True), {f"layers.0.self_attn.{p}_proj.bias" for p in "qkv"}),
        (dict(attention_output_bias=True), {"layers.0.self_attn.o_proj.bias"}),
        (dict(own_embedding=True), {"embed_tokens.weight"}),
        (dict(own_head=True), {"lm_head.weight"}),
        (dict(draft_vocab_size=11), {"d2t"}),
        (dict(norm_output=True, norm_before_residual=True, position_offset=1), set()),
    ],
)
def test_a_flag_adds_its_tensors_and_no_others(make_eagle3, flags, tensors):
    plain = dict(qk_norm=False)
    names = set(make_eagle3(**plain).state_dict())
    assert "norm.weight" in names and "norm.weight" not in make_eagle3(norm_head=False).state_dict()
    assert set(make_eagle3(**{**plain, **flags}).state_dict()) - names == tensors


# ---------------------------------------------------------------------- the cache


def entries(cache, row):
    """Keys and values [layers, 2, heads, length, dim] that a row has kept."""
    return torch.stack([torch.stack([b.keys[row], b.values[row]])[:, :, : cache.lengths[row]] for b in cache.layers])


def test_a_prompt_in_one_go_equals_slot_by_slot_and_chunk_by_chunk(drafter, draw, monkeypatch):
    features, tokens = draw(2, 7)
    at = torch.tensor([0, 0])
    whole, single = drafter.new_cache(at), drafter.new_cache(at)
    seed = drafter.extend(whole, features, tokens, all_valid(2, 7))
    for t in range(7):
        last = drafter.extend(single, features[:, t : t + 1], tokens[:, t : t + 1], all_valid(2, 1))
    monkeypatch.setattr(modeling_eagle3, "EXTEND_CHUNK", 3)
    chunked = drafter.new_cache(at)
    close(drafter.extend(chunked, features, tokens, all_valid(2, 7)), seed)
    close(last, seed)
    for row in range(2):
        close(entries(single, row), entries(whole, row))
        close(entries(chunked, row), entries(whole, row))


def test_the_offset_shifts_the_rotary_positions_and_thereby_no_draft(make_eagle3, draw):
    features, tokens = draw(1, 4)
    caches, seeds = [], []
    for offset, first in ((1, 2), (0, 3), (0, 2)):
        drafter = make_eagle3(position_offset=offset)
        caches.append(drafter.new_cache(torch.tensor([first])))
        seeds.append(drafter.extend(caches[-1], features, tokens, all_valid(1, 4)))
    close(entries(caches[0], 0), entries(caches[1], 0))
    assert (entries(caches[0], 0) - entries(caches[2], 0)).abs().max() > 0.1
    close(seeds[0], seeds[2])


@pytest.mark.parametrize("chunk", [2, 512])
def test_ragged_rows_equal_rows_alone(drafter, draw, monkeypatch, chunk):
    monkeypatch.setattr(modeling_eagle3, "EXTEND_CHUNK", chunk)
    counts, firsts, more = [3, 7, 5], [4, 0, 2], [2, 1, 4]
    (features, tokens), (features2, tokens2), (_, drafts) = draw(3, 7), draw(3, 4), draw(3, 3)

    def run(rows):
        valid = lambda n: torch.arange(max(n[r] for r in rows)) < torch.tensor([[n[r]] for r in rows])  # noqa: E731
        cache = drafter.new_cache(torch.tensor([firsts[r] for r in rows]))
        v = valid(counts)
        seed = drafter.extend(cache, features[rows, : v.shape[1]], tokens[rows, : v.shape[1]], v)
        out = [chain(cache, seed, rows)]
        v = valid(more)
        seed = drafter.extend(cache, features2[rows, : v.shape[1]], tokens2[rows, : v.shape[1]], v)
        return [*out, chain(cache, seed, rows)]

    def chain(cache, seed, rows):
        mark, state, logits = cache.mark(), drafter.start(cache, drafts[rows, 0], seed), []
        for k in range(3):
            step, _, state = drafter.step(cache, state, drafts[rows, k])
            logits.append(step)
        cache.rollback(mark)
        return torch.stack(logits, 1)

    together = run([0, 1, 2])
    for row in range(3):
        for a, b in zip(together, run([row]), strict=True):
            close(a[row], b[0])


def test_after_rollback_and_extension_the_cache_is_that_of_a_fresh_prefill(drafter, draw):
    features, tokens = draw(2, 9)
    cache = drafter.new_cache(torch.zeros(2, dtype=torch.long))
    seed = drafter.extend(cache, features[:, :4], tokens[:, :4], all_valid(2, 4))
    mark = cache.mark()
    before = [entries(cache, row) for row in range(2)]
    state = drafter.start(cache, tokens[:, 3], seed)
    for k in range(5):
        _, _, state = drafter.step(cache, state, torch.tensor([k, 2 * k]))
    drafter.start(cache, torch.tensor([5, 5]), None, state.pseudo)
    assert (cache.lengths - mark).tolist() == [5, 5]
    cache.rollback(mark)
    for row in range(2):
        assert torch.equal(entries(cache, row), before[row])
    valid = torch.arange(5) < torch.tensor([[5], [2]])
    seed = drafter.extend(cache, features[:, 4:], tokens[:, 4:], valid)
    for row, count in enumerate([9, 6]):
        fresh = drafter.new_cache(torch.zeros(1, dtype=torch.long))
        one = slice(row, row + 1)
        alone = drafter.extend(fresh, features[one, :count], tokens[one, :count], all_valid(1, count))
        close(entries(cache, row), entries(fresh, 0))
        close(seed[row], alone[0])


def test_a_further_stage_continues_the_chain_and_feeds_its_anchor_only_when_it_starts(drafter, draw):
    features, tokens = draw(2, 4)
    drafts = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])

    def run(stages):
        cache = drafter.new_cache(torch.zeros(2, dtype=torch.long))
        seed, pseudo = drafter.extend(cache, features, tokens, all_valid(2, 4)), None
        logits, prev, k = [], tokens[:, 3], 0
        for count in stages:
            before = cache.lengths
            state = drafter.start(cache, prev, seed, pseudo)
            seed = None
            assert (cache.lengths - before).tolist() == [int(k > 0)] * 2
            for _ in range(count):
                step, _, state = drafter.step(cache, state, prev)
                logits.append(step)
                prev, k = drafts[:, k], k + 1
            pseudo = state.pseudo
            assert pseudo.shape == (2, count, 16)
        return torch.stack(logits, 1)

    close(run([3, 2, 1]), run([6]))


def test_selected_rows_go_on_as_if_alone(drafter, draw):
    features, tokens = draw(3, 5)
    cache = drafter.new_cache(torch.tensor([1, 2, 3]))
    seed = drafter.extend(cache, features, tokens, torch.arange(5) < torch.tensor([[5], [2], [4]]))
    state = drafter.start(cache, tokens[:, -1], seed)
    for prev in ([1, 2, 3], [4, 5, 6]):
        _, _, state = drafter.step(cache, state, torch.tensor(prev))
    rows = torch.tensor([2, 0])
    part, chosen = state.select(rows), cache.select(rows)
    logits, _, _ = drafter.step(cache, state, torch.tensor([7, 8, 9]))
    close(drafter.step(chosen, part, torch.tensor([9, 7]))[0], logits[rows])


# ---------------------------------------------------------------------- training


def test_packed_documents_equal_documents_alone(drafter, draw):
    features, tokens = draw(1, 11)
    cuts = [(0, 4), (4, 11)]
    position_ids = torch.cat([torch.arange(b - a) for a, b in cuts])[None]
    packed = drafter.unroll(features, tokens, 3, position_ids)
    for a, b in cuts:
        for j, alone in enumerate(drafter.unroll(features[:, a:b], tokens[:, a:b], 3)):
            close(packed[j][:, a : b - j], alone[:, : b - a - j])


def test_gradient_checkpointing_changes_no_gradient(make_eagle3, draw):
    features, tokens = draw(1, 6)

    def gradients(checkpointing):
        drafter = make_eagle3(num_hidden_layers=2, own_embedding=True, own_head=True).train()
        if checkpointing:  # transformers 5.24 renamed it
            new = hasattr(drafter, "activation_checkpointing_enable")
            drafter.activation_checkpointing_enable() if new else drafter.gradient_checkpointing_enable()
        with torch.enable_grad():
            outputs = drafter.unroll(features, tokens, 3)
            sum(drafter.logits(output).logsumexp(-1).sum() for output in outputs).backward()
        return {name: p.grad for name, p in drafter.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert all(g is not None and g.abs().sum() > 0 for g in plain.values())
    for name, gradient in plain.items():
        close(checkpointed[name], gradient)
