from dataclasses import replace

import pytest
import torch
from tiny import make_drafter, make_target

from hf_dspark.training.losses import Blocks, Divergences, Objective, block_losses
from hf_dspark.training.targets import FrozenTarget

OBJECTIVE = Objective(ce=0.3, distill=0.8, confidence=0.7, kl_until=0.5, decay=2.0)
M, K, D = 7, 3, 32


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module", params=[None, 40], ids=["whole vocabulary", "reduced"])
def drafter(request, target):
    return make_drafter(target, block_size=K, draft_vocab_size=request.param)


def make_blocks(target):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, K, D, generator=g, dtype=torch.float64, requires_grad=True)
    states = torch.randn(M, K, D, generator=g, dtype=torch.float64)
    ids = torch.randint(1, 61, (M, K), generator=g)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(K) >= torch.randint(1, K + 1, (M, 1), generator=g), -100)
    logits = target.lm_head(states).detach()
    return Blocks(hidden, None, ids, labels, states, logits.logsumexp(-1), logits.argmax(-1))


def slow_losses(drafter, target, blocks, objective, progress):
    """Word for word, one draft at a time, over the whole vocabulary with q = 0 outside the drafter's."""
    r, total = min(1.0, progress / objective.kl_until), 0.0
    out = {key: 0.0 for key in ("ce", "kl", "tv", "confidence", "weight", "tau", "greedy_tau")}
    drafted = drafter.target_ids()
    for m in range(M):
        rate, hits, tau, greedy = 1.0, 1.0, 1.0, 1.0
        for k in range(K):
            label = int(blocks.labels[m, k])
            if label == -100:
                break
            _, logits, confidence = drafter.block_logits(blocks.hidden[m : m + 1], blocks.prev[m : m + 1])
            q = logits[0, k].softmax(-1)
            whole = target.lm_head(blocks.target_hidden[m, k]).softmax(-1).detach()
            p = whole[drafted]
            wide = torch.zeros(61, dtype=torch.float64).index_put((drafted,), q)
            tv = (wide - whole).abs().sum()
            kl = (p * (p / q).log()).sum()
            ce = -wide[label].log() if wide[label] > 0 else torch.zeros(())
            accept = torch.minimum(wide, whole).sum().detach()
            sure = confidence[0, k].sigmoid()
            bce = -(accept * sure.log() + (1 - accept) * (1 - sure).log())
            weight = torch.exp(torch.tensor(-k / objective.decay, dtype=torch.float64))
            mix = (1 - r) * kl + r * tv
            total = total + weight * (objective.ce * ce + objective.distill * mix + objective.confidence * bce)
            for key, value in (("ce", ce), ("kl", kl), ("tv", tv), ("confidence", bce), ("weight", torch.ones(()))):
                out[key] += float(weight * value.detach())
            rate, hits = rate * float(accept), hits * float(drafted[q.argmax()] == whole.argmax())
            tau, greedy = tau + rate, greedy + hits
        out["tau"] += tau
        out["greedy_tau"] += greedy
    return total, out


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_losses_and_gradients_equal_a_slow_twin(drafter, target, progress):
    blocks, logits_of = make_blocks(target), FrozenTarget(target, [0, 1]).logits_of(drafter)
    sums = block_losses(drafter, logits_of, blocks, OBJECTIVE, progress, chunk=100)
    objective = replace(OBJECTIVE, detach_confidence=False)
    slow, parts = slow_losses(drafter, target, blocks, OBJECTIVE, progress)
    torch.testing.assert_close(sums["loss"], slow, rtol=1e-10, atol=1e-10)
    for key, value in parts.items():
        assert float(sums[key]) == pytest.approx(value, rel=1e-9), key

    sums = block_losses(drafter, logits_of, blocks, objective, progress, chunk=100)
    wanted = [blocks.hidden, drafter.correction.w1.weight, drafter.correction.w2.weight, drafter.confidence.weight]
    fast_gradients = torch.autograd.grad(sums["loss"], wanted)
    for fast, plain in zip(fast_gradients, torch.autograd.grad(slow, wanted), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-10)


def test_the_handwritten_gradient_is_that_of_finite_differences():
    g = torch.Generator().manual_seed(4)
    logits, theirs = (torch.randn(2, 3, 6, generator=g, dtype=torch.float64) for _ in range(2))
    normalizer = theirs.logsumexp(-1) + 0.3  # part of the target's mass lies outside
    labels = torch.tensor([[0, 5, -100], [2, 2, 1]])
    assert torch.autograd.gradcheck(lambda x: Divergences.apply(x, theirs, normalizer, labels), logits.requires_grad_())


@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_change_neither_sums_nor_gradients(drafter, target, chunk):
    logits_of = FrozenTarget(target, [0, 1]).logits_of(drafter)
    results = []
    for size in (100, chunk):
        blocks = make_blocks(target)
        sums = block_losses(drafter, logits_of, blocks, OBJECTIVE, 0.3, size)
        results.append((sums, torch.autograd.grad(sums["loss"], [blocks.hidden, drafter.correction.w2.weight])))
    for key in results[0][0]:
        torch.testing.assert_close(results[0][0][key], results[1][0][key], rtol=1e-12, atol=1e-12)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("detach", [True, False])
def test_the_confidence_loss_reaches_the_backbone_only_when_told_to(drafter, target, detach):
    blocks = make_blocks(target)
    objective = Objective(ce=0.0, distill=0.0, confidence=1.0, detach_confidence=detach)
    loss = block_losses(drafter, FrozenTarget(target, [0, 1]).logits_of(drafter), blocks, objective, 1.0, 100)["loss"]
    inputs = [blocks.hidden, drafter.correction.w1.weight, drafter.confidence.weight]
    hidden, features, head = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    assert (float(hidden.abs().sum()) == 0) == detach
    assert (float(features.abs().sum()) == 0) == detach
    assert float(head.abs().sum()) > 0


def test_acceptance_counts_the_mass_the_reduced_vocabulary_lacks(target):
    """A drafter that equals the target on its own ids still misses what lies outside; renormalising would hide that."""
    drafter = make_drafter(target, block_size=K, draft_vocab_size=30, correction_head="none", confidence_head=False)
    blocks = make_blocks(target)
    blocks.hidden = blocks.target_hidden
    sums = block_losses(drafter, FrozenTarget(target, [0, 1]).logits_of(drafter), blocks, OBJECTIVE, 1.0, 100)
    inside = target.lm_head(blocks.target_hidden).softmax(-1)[..., drafter.target_ids()].sum(-1)
    expected = (inside * (blocks.labels != -100)).sum(0)
    torch.testing.assert_close(sums["accepted"], expected.detach(), rtol=1e-9, atol=1e-9)


def test_no_blocks_at_all_still_give_a_differentiable_zero(drafter, target):
    blocks = make_blocks(target)
    nothing = Blocks(*(None if x is None else x[:0] for x in vars(blocks).values()))
    sums = block_losses(drafter, FrozenTarget(target, [0, 1]).logits_of(drafter), nothing, OBJECTIVE, 0.3, 2)
    sums["loss"].backward()
    assert sums["loss"] == 0 and drafter.correction.w2.weight.grad.abs().sum() == 0
    drafter.zero_grad()
