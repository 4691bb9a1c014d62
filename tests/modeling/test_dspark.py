"""The block drafters: decoding equals teacher forcing, and masks and caches equal slow versions."""

import itertools

import pytest
import torch

HEADS = {
    "none": dict(correction_head="none"),
    "markov": dict(correction_head="markov", markov_rank=5),
    "gated": dict(correction_head="gated", markov_rank=5),
    "rnn": dict(correction_head="rnn", markov_rank=5),
    "domino": dict(correction_head="domino", gru_hidden_size=7, correction_size=5, pure_draft_prefix_len=1),
}
CONFIDENCE = {"markov": True, "gated": False, "rnn": True}  # whether the head's own feature goes in
KINDS = ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.fixture(params=itertools.product(HEADS, [True, False]), ids=lambda p: f"{p[0]}-{'anchor' if p[1] else 'bonus'}")
def drafter(request, make_dspark):
    head, from_anchor = request.param
    confidence = dict(confidence_head=head != "domino", confidence_with_markov=CONFIDENCE.get(head, False))
    return make_dspark(**HEADS[head], **confidence, sample_from_anchor=from_anchor, block_size=5, mask_token_id=3)


def valid_for(counts, T):
    return torch.arange(T) < torch.tensor(counts)[:, None]


def walk(drafter, cache, state, prev):
    """Step through `prev` [B, K]: logits [B, K, Vd] and confidence logits [B, K] or None."""
    logits, confidences = [], []
    for k in range(prev.shape[1]):
        step, confidence, state = drafter.step(cache, state, prev[:, k])
        logits.append(step)
        confidences.append(confidence)
    return torch.stack(logits, 1), None if confidences[0] is None else torch.stack(confidences, 1)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


# ---------------------------------------------------------------------- heads


def test_steps_equal_the_block_teacher_forced(drafter, draw):
    features, tokens = draw(2, 6)
    K = drafter.config.max_block
    prev = torch.cat([tokens[:, -1:], draw(2, K - 1)[1]], 1)
    cache = drafter.new_cache(torch.zeros(2, dtype=torch.long))
    drafter.extend(cache, features, tokens, valid_for([6, 6], 6))
    state = drafter.start(cache, tokens[:, -1])
    assert state.base.shape == (2, K, 29)
    logits, confidence = walk(drafter, cache, state, prev)
    base, corrected, confidences = drafter.block_logits(state.hidden, prev, state.first)
    close(base, state.base)
    close(logits, corrected)
    if drafter.config.confidence_head:
        close(confidence, confidences)
    else:
        assert confidence is None and confidences is None
    uncorrected = (
        1 if drafter.config.correction_head == "domino" else K if drafter.config.correction_head == "none" else 0
    )
    changed = (corrected - base).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [k >= uncorrected for k in range(K)]


def test_the_recurrent_head_equals_its_formula(make_dspark, draw):
    drafter = make_dspark(**HEADS["rnn"], block_size=4, sample_from_anchor=False)
    hidden, first, prev = torch.randn(1, 3, 16).double(), torch.randn(1, 16).double(), torch.tensor([[4, 9, 2]])
    head = drafter.correction
    s, biases = torch.zeros(5).double(), []
    for token, h in [
        (4, first[0]),
        *zip([4, 9, 2], hidden[0], strict=True),
    ]:  # slot 0 moves the memory and drafts nothing
        g, c, o = head.joint(torch.cat([s, head.w1.weight[token], h])).split(5)
        s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
        biases.append(head.w2.weight @ torch.tanh(o))
    base, corrected, _ = drafter.block_logits(hidden, prev, first)
    close((corrected - base)[0], torch.stack(biases[1:]))


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_the_state_and_where_asked_the_previous_tokens_row(make_dspark, draw, with_markov):
    drafter = make_dspark(**HEADS["gated"], confidence_head=True, confidence_with_markov=with_markov)
    hidden, prev = torch.randn(2, 7, 16).double(), draw(2, 7)[1]
    read = torch.cat([hidden, drafter.correction.w1.weight[prev]], -1) if with_markov else hidden
    close(drafter.block_logits(hidden, prev)[2], read @ drafter.confidence.weight[0] + drafter.confidence.bias)


def test_a_reduced_vocabulary_reads_previous_tokens_as_target_ids_and_writes_draft_ids(make_dspark, draw):
    drafter = make_dspark(**HEADS["markov"], draft_vocab_size=11)
    drafter.d2t.copy_(torch.tensor([0, 2, 5, 6, 8, 12, 15, 19, 22, 27, 28]) - torch.arange(11))
    hidden, prev = torch.randn(2, 7, 16).double(), draw(2, 7)[1]
    base, corrected, _ = drafter.block_logits(hidden, prev)
    head = drafter.correction
    close(corrected - base, head.w1.weight[prev] @ head.w2.weight.T)
    close(base, drafter._bound["head"](hidden)[..., drafter.target_ids()])


def test_selected_rows_go_on_as_if_alone(drafter, draw):
    features, tokens = draw(3, 6)
    K, rows = drafter.config.max_block, torch.tensor([2, 0])
    prev = draw(3, K)[1]
    cache = drafter.new_cache(torch.zeros(3, dtype=torch.long))
    drafter.extend(cache, features, tokens, valid_for([6, 3, 4], 6))
    state = drafter.start(cache, prev[:, 0])
    whole, _ = walk(drafter, cache, state, prev)
    for k in range(2):
        _, _, state = drafter.step(cache, state, prev[:, k])
    part, _ = walk(drafter, cache.select(rows), state.select(rows), prev[rows, 2:])
    close(part, whole[rows, 2:])


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("window_from", ["slot", "anchor"])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_equal_the_rules_in_words(make_dspark, draw, window_from, causal):
    drafter = make_dspark(
        num_hidden_layers=3,
        layer_types=KINDS,
        sliding_window=4,
        window_from=window_from,
        causal_block=causal,
        block_size=3,
    )
    for counts in ([6, 2, 9], [5, 5]):
        cache = drafter.new_cache(torch.tensor([10] * len(counts)))
        features, tokens = draw(len(counts), 9)
        drafter.extend(cache, features, tokens, valid_for(counts, 9))
        slots = cache.place(3)
        masks = drafter.block_masks(cache)
        for row, p in enumerate(counts):  # p context slots, so that the anchor is slot p
            for k, s in itertools.product(range(3), range(slots.end)):
                exists = s < p + 3  # a longer row's slots lie behind
                oldest = p + k - 4 + 1 if window_from == "slot" else p - 4
                ahead = causal and s > p + k
                full = masks["full_attention"]
                assert (True if full is None else bool(full[row, 0, k, s])) == exists
                assert bool(masks["sliding_attention"][row, 0, k, s]) == (exists and s >= oldest and not ahead)


@pytest.mark.parametrize(
    "layers", [dict(), dict(sliding_window=4), dict(sliding_window=3, window_from="anchor", causal_block=False)]
)
def test_ragged_rows_equal_rows_alone(make_dspark, draw, layers):
    kinds = KINDS if layers else None
    drafter = make_dspark(**HEADS["rnn"], num_hidden_layers=3, layer_types=kinds, block_size=4, **layers)
    counts, firsts, more = [3, 7, 5], [4, 0, 2], [2, 1, 4]
    (features, tokens), (features2, tokens2), (_, prev) = draw(3, 7), draw(3, 4), draw(3, 4)

    def run(rows):
        cache, out = drafter.new_cache(torch.tensor([firsts[r] for r in rows])), []
        for f, t, n in ((features, tokens, counts), (features2, tokens2, more)):
            T = max(n[r] for r in rows)
            drafter.extend(cache, f[rows, :T], t[rows, :T], valid_for([n[r] for r in rows], T))
            mark, state = cache.mark(), drafter.start(cache, prev[rows, 0])
            out.append(walk(drafter, cache, state, prev[rows])[0])
            state = drafter.start(cache, prev[rows, 3], None, state.pseudo)  # a looped stage on top
            out.append(walk(drafter, cache, state, prev[rows])[0])
            cache.rollback(mark)
        return out

    together = run([0, 1, 2])
    for row in range(3):
        for a, b in zip(together, run([row]), strict=True):
            close(a[row], b[0])


def test_the_block_is_bidirectional_and_sees_the_whole_context(make_dspark, draw):
    drafter = make_dspark(correction_head="none", block_size=4)
    features, tokens = draw(1, 5)

    def base(features, mask_id):
        drafter.config.mask_token_id = mask_id
        cache = drafter.new_cache(torch.tensor([0]))
        drafter.extend(cache, features, tokens, valid_for([5], 5))
        return drafter.start(cache, tokens[:, -1]).base

    moved = features.clone()
    moved[0, 0] += 1
    assert ((base(moved, 3) - base(features, 3)).abs().amax(-1) > 1e-6).all()
    assert ((base(features, 4) - base(features, 3)).abs().amax(-1) > 1e-6).all()


# ---------------------------------------------------------------------- rounds and stages


def test_after_rollback_and_extension_the_cache_is_that_of_a_fresh_prefill(drafter, draw):
    features, tokens = draw(2, 9)
    cache = drafter.new_cache(torch.zeros(2, dtype=torch.long))
    drafter.extend(cache, features[:, :4], tokens[:, :4], valid_for([4, 4], 4))
    assert torch.equal(cache.lengths, drafter.expected_length(torch.tensor([5, 5])))
    mark, state = cache.mark(), drafter.start(cache, tokens[:, 3])
    drafter.start(cache, tokens[:, 4], None, state.pseudo)
    cache.rollback(mark)
    drafter.extend(cache, features[:, 4:], tokens[:, 4:], valid_for([5, 2], 5))
    for row, count in enumerate([9, 6]):
        fresh = drafter.new_cache(torch.tensor([0]))
        drafter.extend(fresh, features[row, None, :count], tokens[row, None, :count], valid_for([count], count))
        for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
            close(mine.keys[row, :, :count], theirs.keys[0, :, :count])
            close(mine.values[row, :, :count], theirs.values[0, :, :count])


@pytest.mark.parametrize("from_anchor, alignment", [(True, "prediction"), (False, "prediction"), (False, "position")])
def test_a_shortened_stage_hands_on_as_many_states_as_it_drafted(make_dspark, draw, from_anchor, alignment):
    """Else the next stage's anchor would lie behind its true position, and states of undrafted tokens before it."""
    drafter = make_dspark(**HEADS["markov"], block_size=6, sample_from_anchor=from_anchor, loop_alignment=alignment)
    features, tokens = draw(1, 4)
    cache = drafter.new_cache(torch.tensor([0]))
    drafter.extend(cache, features, tokens, valid_for([4], 4))
    whole, short = drafter.start(cache, tokens[:, -1]), drafter.start(cache, tokens[:, -1], length=2)
    assert short.base.shape[1] == 2
    assert torch.equal(short.pseudo, whole.pseudo[:, :2])
    drafter.start(cache, torch.tensor([8]), None, short.pseudo)
    assert cache.positions("cpu")[0].tolist() == list(range(6, 12))  # the anchor is the second draft, at 4 + 2


@pytest.mark.parametrize("loop_pseudo", ["pre_norm", "post_norm"])
def test_pseudo_context_passes_the_norm_behind_the_fusion_not_the_fusion(make_dspark, loop_pseudo):
    drafter = make_dspark(loop_pseudo=loop_pseudo)
    states = torch.randn(2, 3, 16).double()
    x = drafter.norm(states) if loop_pseudo == "post_norm" else states
    close(drafter.pseudo_context(states), drafter.hidden_norm(x))


def test_position_alignment_takes_the_state_at_the_position_itself(make_dspark, draw):
    features, tokens = draw(1, 4)

    def states(**overrides):
        drafter = make_dspark(correction_head="none", block_size=5, sample_from_anchor=False, **overrides)
        cache = drafter.new_cache(torch.tensor([0]))
        drafter.extend(cache, features, tokens, valid_for([4], 4))
        return drafter.start(cache, tokens[:, -1]).pseudo

    predicted, positioned = states(), states(loop_alignment="position")
    assert predicted.shape == positioned.shape == (1, 4, 16)
    close(positioned[:, 1:], predicted[:, :-1])
