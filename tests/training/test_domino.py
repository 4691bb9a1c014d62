"""Domino's loss: a mix of base and corrected logits that moves to the corrected ones."""

import sys
from pathlib import Path

import pytest
import torch
from tiny import make_drafter, make_target

sys.path.insert(0, str(Path(__file__).parent))
from tiny_training import make_trainer

from hf_dspark.training import Objective
from hf_dspark.training.losses import Blocks, block_losses
from hf_dspark.training.targets import FrozenTarget

M, K = 6, 4
HEAD = dict(correction_head="domino", gru_hidden_size=7, correction_size=9, confidence_head=False)


@pytest.fixture(scope="module")
def target():
    return make_target()


def make_blocks(target, shifted):
    g = torch.Generator().manual_seed(0)
    hidden, states = (torch.randn(M, K, 32, generator=g, dtype=torch.float64) for _ in range(2))
    first = None if shifted else torch.randn(M, 32, generator=g, dtype=torch.float64)
    ids = torch.randint(1, 61, (M, K), generator=g)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(K) >= torch.randint(1, K + 1, (M, 1), generator=g), -100)
    logits = target.lm_head(states).detach()
    return Blocks(hidden.requires_grad_(), first, ids, labels, states, logits.logsumexp(-1), logits.argmax(-1))


def slow_cross_entropy(drafter, blocks, share, decay):
    """Draft by draft as decoding steps through a block: the GRU reads the anchor and the drafts so far."""
    total = 0.0
    for m in range(M):
        memory = None
        for k in range(K):
            label = int(blocks.labels[m, k])
            if label == -100:
                break
            base = drafter.head(blocks.hidden[m, k])
            bias, memory = drafter.correction.step(
                memory, blocks.prev[m, k, None], blocks.hidden[m, k, None], drafter.embed
            )
            assert bool((bias == 0).all()) == (k < drafter.config.pure_draft_prefix_len)
            final = (base + bias[0]).log_softmax(-1)
            mixed = (1 - share) * -final[label] + share * -base.log_softmax(-1)[label]
            total = total + mixed * torch.exp(torch.tensor(-k / decay, dtype=torch.float64))
    return total


@pytest.mark.parametrize("shifted", [True, False], ids=["slot 0 drafts", "slot 0 doesn't"])
@pytest.mark.parametrize(("progress", "share"), [(0.0, 1.0), (0.2, 0.6), (0.5, 0.0), (1.0, 0.0)])
def test_the_loss_and_its_gradients_equal_a_slow_mix(target, shifted, progress, share):
    sizes = dict(block_size=K if shifted else K + 1, sample_from_anchor=shifted, pure_draft_prefix_len=1)
    drafter, blocks = make_drafter(target, **sizes, **HEAD), make_blocks(target, shifted)
    assert drafter.config.max_block == K
    objective = Objective(ce=1.0, distill=0.0, decay=7.0, base_until=0.5)
    fast = block_losses(drafter, FrozenTarget(target, [0, 1]).logits_of(drafter), blocks, objective, progress, chunk=2)[
        "loss"
    ]
    slow = slow_cross_entropy(drafter, blocks, share, 7.0)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=0)
    wanted = [blocks.hidden, drafter.correction.up.weight, drafter.correction.gru.weight_hh_l0]
    gradients = torch.autograd.grad(fast, wanted)
    for a, b in zip(gradients, torch.autograd.grad(slow, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert (gradients[1].abs().sum() == 0) == (share == 1), "at first the correction learns nothing"


def test_the_mix_is_of_the_distribution_losses_too(target):
    drafter, blocks = make_drafter(target, block_size=K, **HEAD), make_blocks(target, True)
    logits_of = FrozenTarget(target, [0, 1]).logits_of(drafter)
    goal = dict(ce=0.2, distill=0.7, kl_until=0.8, decay=3.0)

    def loss(drafter, **extra):
        return block_losses(drafter, logits_of, blocks, Objective(**goal, **extra), 0.4, chunk=100)["loss"]

    uncorrected = make_drafter(target, block_size=K, **{**HEAD, "correction_head": "none"})
    mixed = 0.25 * loss(drafter) + 0.75 * loss(uncorrected)
    torch.testing.assert_close(loss(drafter, base_until=1.6), mixed, rtol=1e-10, atol=0)


def test_only_domino_mixes_and_the_run_sets_how_long(tmp_path, target):
    trainer = make_trainer(tmp_path, target=target, base_until=0.4)
    assert trainer.args.objective(trainer.model).base_share(0.0) == 0.0  # a Markov head
    objective = trainer.args.objective(make_drafter(target, **HEAD))
    assert [objective.base_share(p) for p in (0.0, 0.1, 0.4, 1.0)] == pytest.approx([1.0, 0.75, 0.0, 0.0])
