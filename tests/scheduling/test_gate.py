import math

import pytest
import torch
from oracles_scheduling import is_lossless, random_row

from hf_dspark.scheduling import OnlineGate, break_even


def test_break_even_of_the_published_latencies():
    """22.45 ms to verify, 3.90 ms to draft, tau 5.47."""
    per_token = (22.45 + 3.90) / 5.47
    assert break_even(3.90, 22.45, 0.0, per_token) == pytest.approx(0.181, abs=1e-3)
    assert break_even(3.90, 22.45, 5.0, per_token) > break_even(3.90, 22.45, 0.0, per_token)


def test_break_even_is_where_both_sides_are_equal():
    f = break_even(2.0, 10.0, 0.5, 3.0)
    assert f * (10.0 - 3.0) == pytest.approx((1 - f) * 2.0 + 0.5)


def test_no_stage_pays_when_a_verification_is_not_worth_saving():
    assert break_even(1.0, 2.0, 0.0, 3.0) == math.inf
    assert break_even(1.0, 2.0, 3.0, 1.0) > 1


def test_before_any_block_the_gate_takes_the_drafter_at_its_word():
    log_prob = torch.tensor([-2.0, -0.5, -0.1])
    for stage in (0, 3, 20):
        assert torch.allclose(OnlineGate().probability(log_prob, stage), log_prob.double().exp())
    chain = OnlineGate().chain_probability(torch.tensor([[-0.5, -0.25]]))
    assert chain.item() == pytest.approx(math.exp(-0.75))


def synthetic(n, slope, intercept, generator):
    log_prob = -2.5 * torch.rand(n, generator=generator, dtype=torch.float64)
    z = log_prob - torch.log(-torch.expm1(log_prob))
    return log_prob, (slope * z + intercept).sigmoid()


@pytest.mark.parametrize(("slope", "intercept"), [(0.5, -1.0), (1.3, 0.8)])
def test_the_gate_learns_a_drafter_that_is_off(slope, intercept):
    generator = torch.Generator().manual_seed(0)
    gate = OnlineGate()
    log_prob, chance = synthetic(1500, slope, intercept, generator)
    full = torch.rand(1500, generator=generator) < chance
    held_out, truth = synthetic(300, slope, intercept, generator)
    before = (gate.probability(held_out, 0) - truth).abs().mean()
    gate.observe(log_prob[:, None], accepted=full * 3, verified=torch.full((1500,), 3), block=3)
    after = (gate.probability(held_out, 0) - truth).abs().mean()
    assert after < 0.04 < 0.09 < before
    # Later stages share the fit until they have evidence of their own.
    assert (gate.probability(held_out, 2) - truth).abs().mean() < before


def test_stages_can_differ():
    generator = torch.Generator().manual_seed(0)
    gate = OnlineGate()
    log_prob, _ = synthetic(400, 1.0, 0.0, generator)
    full = torch.full((400,), 3)
    log_probs = torch.stack([log_prob, log_prob], 1)
    gate.observe(log_probs, accepted=full, verified=2 * full, block=3)  # the second block always fails
    first, second = (gate.probability(torch.tensor([-1.0]), s).item() for s in (0, 1))
    assert first > 0.6 and second < 0.25


def test_blocks_that_were_not_reached_or_cut_short_teach_nothing():
    gate = OnlineGate()
    log_probs = torch.tensor([[-0.5, float("nan")], [-0.5, -0.5]])
    gate.observe(log_probs, accepted=torch.tensor([2, 0]), verified=torch.tensor([2, 0]), block=3)
    assert torch.equal(gate.mean, OnlineGate().mean)
    gate.observe(log_probs, accepted=torch.tensor([1, 2]), verified=torch.tensor([3, 6]), block=3)
    once = OnlineGate()
    once.observe(log_probs[:, :1], accepted=torch.tensor([1, 2]), verified=torch.tensor([3, 3]), block=3)
    assert torch.equal(gate.mean, once.mean) and gate.mean[1] < 0


def test_the_gate_never_freezes():
    gate = OnlineGate(memory=200.0)
    log_prob, ones = torch.full((1500, 1), -0.7), torch.ones(1500, dtype=torch.long)
    gate.observe(log_prob, accepted=ones, verified=ones, block=1)
    assert gate.probability(log_prob[:1, 0], 0) > 0.95
    gate.observe(log_prob, accepted=0 * ones, verified=ones, block=1)
    assert gate.probability(log_prob[:1, 0], 0) < 0.05
    assert torch.linalg.eigvalsh(gate.covariance).min() > 0
    # Stages never seen stay at their prior however long the others run.
    assert torch.allclose(gate.covariance.diagonal()[3:], OnlineGate().covariance.diagonal()[3:])


@pytest.mark.parametrize("withdraw", [False, True])
def test_gating_the_next_stage_is_lossless_and_withdrawing_the_one_looked_at_is_not(withdraw):
    """Two stages of one draft: the gate reads the first one's log q and decides about the second."""
    rows = [random_row(r, 2, 2) for r in (2, 3)]
    gate = OnlineGate()

    def rule(drafts, _):
        first = torch.tensor([[float(row.q(())[draft[0]])] for row, draft in zip(rows, drafts, strict=True)]).log()
        go = gate.chain_probability(first) >= 0.5
        return torch.where(go, 2, 0 if withdraw else 1).tolist()

    assert is_lossless(rows, rule) is not withdraw
