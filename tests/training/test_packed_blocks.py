import pytest
import torch
from tiny import make_drafter, make_target, redraw

from hf_dspark.modeling.layers import attend
from hf_dspark.modeling.modeling_dspark import sliding_rule
from hf_dspark.modeling.packed_blocks import (
    block_places,
    chain_labels,
    context_places,
    dense_anchors,
    dense_mask,
    flex_mask,
    may_see,
    packed_masks,
)
from hf_dspark.training.targets import FrozenTarget

# Two documents of 9 and 8 tokens and two tokens of padding.
POSITIONS = torch.tensor([[*range(9), *range(8), 0, 0]])
ANCHORS = torch.tensor([[2, 5, 10, -1]])
HEADS = {
    "none": dict(correction_head="none", confidence_head=False),
    "markov": dict(),
    "gated": dict(correction_head="gated"),
    "rnn": dict(correction_head="rnn"),
    "domino": dict(
        correction_head="domino",
        gru_hidden_size=7,
        correction_size=9,
        pure_draft_prefix_len=1,
        confidence_with_markov=False,
    ),
}


@pytest.fixture(scope="module")
def target():
    return make_target()


def slow_mask(config, stage, sliding):
    """Cell by cell, from the words: a slot of the chain from `a`, in the block at `a + stage * K`."""
    K, B, T = config.max_block, config.block_size, POSITIONS.shape[1]
    document = [0] * 9 + [1] * 8 + [2, 3]
    keys = [("context", t, None) for t in range(T)]
    for s in range(stage):
        keys += [("chain", a + s * K + k, n) for n, a in enumerate(ANCHORS[0].tolist()) for k in range(K)]
    keys += [("chain", a + stage * K + k, n) for n, a in enumerate(ANCHORS[0].tolist()) for k in range(B)]
    rows = []
    for n, a in enumerate(ANCHORS[0].tolist()):
        for k in range(B):
            at, row = a + stage * K + k, []
            for kind, index, owner in keys:
                seen = owner == n if kind == "chain" else a >= 0 and index < a and document[index] == document[a]
                if sliding:
                    seen = seen and index > at - config.sliding_window
                    seen = seen and (index <= at or not config.causal_block)
                row.append(seen)
            rows.append(row)
    return torch.tensor(rows)


def places(config, stage):
    keys = context_places(POSITIONS)
    for s in range(stage):
        keys = keys.followed_by(block_places(POSITIONS, ANCHORS, s * config.max_block, config.max_block))
    block = block_places(POSITIONS, ANCHORS, stage * config.max_block, config.block_size)
    return block, keys.followed_by(block)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_the_mask_equals_a_slow_loop_over_its_cells(target, stage, sample_from_anchor):
    layer_types = ["full_attention", "sliding_attention"]
    drafter = make_drafter(
        target, block_size=3, layer_types=layer_types, sliding_window=4, sample_from_anchor=sample_from_anchor
    )
    query, key = places(drafter.config, stage)
    masks = packed_masks(layer_types, query, key, drafter._sliding)
    for kind in layer_types:
        assert torch.equal(masks[kind][0, 0], slow_mask(drafter.config, stage, kind == "sliding_attention")), kind


def test_a_flex_mask_attends_as_the_dense_one_does(target):
    config = make_drafter(target, block_size=3, sliding_window=4, layer_types=["sliding_attention"] * 2).config
    query, key = places(config, 1)
    for rule in (may_see, lambda q, k: may_see(q, k) & sliding_rule(config, q.index, k.index, q.block_anchor)):
        g = torch.Generator().manual_seed(0)
        q = torch.randn(1, 4, query.index.shape[1], 16, generator=g)
        k, v = (torch.randn(1, 2, key.index.shape[1], 16, generator=g) for _ in range(2))
        dense = attend(q, k, v, dense_mask(rule, query, key), 0.25)
        flex = attend(q, k, v, flex_mask(rule, query, key), 0.25)
        torch.testing.assert_close(dense, flex, atol=1e-5, rtol=1e-5)


def test_labels_stop_at_the_first_hole_and_at_the_document():
    labels = torch.tensor([[-100, 11, 12, -100, 14, 15, 16, 17]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    anchors = torch.tensor([[0, 1, 3, 5, -1]])
    assert chain_labels(labels, positions, anchors, 3)[0].tolist() == [
        [11, 12, -100],
        [12, -100, -100],
        [14, -100, -100],  # 15 begins the next document
        [16, 17, -100],
        [-100, -100, -100],
    ]
    assert dense_anchors(labels, positions).tolist() == [[0, 1, 3, 5, 6]]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_a_token_changes_no_block_whose_anchor_is_before_it(target, stages, dense):
    """Through the target as well, packed: what is after an anchor or in another document can't reach its block."""
    drafter, frozen = make_drafter(target, block_size=2), FrozenTarget(target, [0, 1])
    ids = torch.randint(1, 60, POSITIONS.shape, generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    anchors = dense_anchors(labels, POSITIONS) if dense else torch.tensor([[1, 3, 9, 11]])

    def states(ids):
        features = frozen(ids, labels, POSITIONS, packed=True).features
        return drafter._chains(features, ids, anchors, POSITIONS, stages, False)

    before, starts = states(ids), (POSITIONS == 0).cumsum(1)[0]
    for p in range(17):
        other = ids.clone()
        other[0, p] = 60 - other[0, p]
        after, moved = states(other), 0
        for s in range(stages):
            for n, a in enumerate(anchors[0].tolist()):
                same = torch.equal(before[s][0][0, n], after[s][0][0, n])
                begin = a + s * drafter.config.max_block
                if begin < p or (starts[a] != starts[p] and begin < 17 and starts[begin] != starts[p]):
                    assert same, (p, s, a)
                elif begin == p:
                    assert not same, (p, s, a)
                    moved += 1
        assert moved or not dense or p in (8, 16), "the test would see a leak"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("sample_from_anchor", "alignment"), [(True, "prediction"), (False, "prediction"), (False, "position")]
)
def test_training_and_decoding_give_the_same_logits_in_both_stages(target, head, sample_from_anchor, alignment):
    drafter = make_drafter(
        target, block_size=4, sample_from_anchor=sample_from_anchor, loop_alignment=alignment, draft_vocab_size=40,
        layer_types=["full_attention", "sliding_attention"], sliding_window=6, **HEADS[head],
    )  # fmt: skip
    ids = torch.randint(1, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    features = torch.randn(1, 17, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    anchors, K = torch.tensor([[3, 7]]), drafter.config.max_block
    with torch.no_grad():
        out = drafter(features, ids, anchors=anchors, stages=2)
        for n, a in enumerate(anchors[0].tolist()):
            cache, pseudo = drafter.new_cache(torch.tensor([0])), None
            drafter.extend(cache, features[:, :a], ids[:, 1 : a + 1], torch.ones(1, a, dtype=torch.bool))
            for s in range(2):
                prev = drafter.previous_tokens(ids, anchors, s)
                first = None if out.first is None else out.first[s]
                _, logits, confidence = drafter.block_logits(out.hidden[s], prev, first)
                state = drafter.start(cache, ids[:, a + s * K], pseudo=pseudo)
                for k in range(K):
                    step, sure, state = drafter.step(cache, state, ids[:, a + s * K + k])
                    torch.testing.assert_close(logits[:, n, k], step, atol=1e-10, rtol=1e-10)
                    if confidence is not None:
                        torch.testing.assert_close(confidence[:, n, k], sure, atol=1e-10, rtol=1e-10)
                pseudo = state.pseudo


def test_the_loss_of_forward_is_the_weighted_mean_of_a_slow_loop(target):
    drafter = make_drafter(target, block_size=3, draft_vocab_size=40)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (2, 12), generator=g)
    labels = torch.where(torch.rand(2, 12, generator=g) < 0.3, -100, ids)
    features = torch.randn(2, 12, 64, generator=g, dtype=torch.float64)
    with torch.no_grad():
        loss = drafter(features, ids, labels).loss
        top = bottom = 0.0
        drafted = drafter.target_ids().tolist()
        for r in range(2):
            for a in range(11):
                out = drafter(features[r : r + 1], ids[r : r + 1], anchors=torch.tensor([[a]]))
                prev = drafter.previous_tokens(ids[r : r + 1], torch.tensor([[a]]), 0)
                log_q = drafter.block_logits(out.hidden[0], prev)[1][0, 0].log_softmax(-1)
                for k in range(3):
                    if a + 1 + k > 11 or labels[r, a + 1 + k] == -100:
                        break
                    if int(labels[r, a + 1 + k]) in drafted:
                        weight = torch.exp(torch.tensor(-k / 4.0))
                        top -= weight * log_q[k, drafted.index(int(labels[r, a + 1 + k]))]
                        bottom += weight
    torch.testing.assert_close(loss, top / bottom, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="neither labels nor anchors"):
        drafter(features, ids)


def test_gradients_run_through_the_chain_unless_detached_and_survive_checkpointing(target):
    ids = torch.randint(1, 60, (1, 14), generator=torch.Generator().manual_seed(1))
    features = torch.randn(1, 14, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def gradients(checkpointing=False, **kwargs):
        drafter = redraw(make_drafter(target, block_size=3), 5).train()
        if checkpointing:
            enable = getattr(drafter, "activation_checkpointing_enable", None) or drafter.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        drafter(features, ids, anchors=torch.tensor([[2, 4]]), stages=3, **kwargs).hidden[1].pow(2).sum().backward()
        return torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])

    whole = gradients()
    assert torch.equal(whole, gradients(checkpointing=True))
    assert not torch.allclose(whole, gradients(detach_chain=True))
