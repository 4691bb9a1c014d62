import random

import pytest
import torch

from hf_dspark.scheduling.correction import Correction


def rounds(count, true, told, seed=0, verified=3):
    """Rounds of three drafts accepted with chances `true(z)`, whose confidence is `told(z)`."""
    rng = random.Random(seed)
    for _ in range(count):
        logits = [rng.gauss(0.5, 1.5) for _ in range(3)]
        accepted = 0
        while accepted < verified and rng.random() < torch.tensor(true(logits[accepted])).sigmoid():
            accepted += 1
        yield torch.tensor([told(z) for z in logits])[None], [verified], [accepted]


def error(correction, true, told):
    z = torch.linspace(-2, 2, 9)
    chances = correction(told(z)[:, None].repeat(1, 3))
    return (chances - true(z).sigmoid()[:, None]).abs().mean().item()


def test_before_any_draft_confidences_are_taken_at_their_word():
    confidence = torch.tensor([[0.2, 0.5, 0.9, 0.99]])
    assert torch.allclose(Correction(2)(confidence.logit()), confidence.double())


@pytest.mark.parametrize("told", [lambda z: 0.4 * z + 1.5, lambda z: 2.5 * z, lambda z: z - 2.0])
def test_heads_that_are_off_are_put_right(told):
    def true(z):
        return z

    correction = Correction(3)
    before = error(correction, true, told)
    for one in rounds(800, true, told):
        correction.observe(*one)
    assert error(correction, true, told) < 0.035 < 0.1 < before


def test_positions_can_differ_and_those_never_verified_follow_the_common_fit():
    correction = Correction(3)
    confidence = torch.full((1, 3), 0.7)
    for _ in range(300):
        correction.observe(confidence, [2], [1])  # the first is always accepted, the second never
    first, second, third = correction(confidence)[0].tolist()
    assert first > 0.9 and second < 0.1 and second < third < first


def test_drafts_that_were_not_judged_teach_nothing():
    correction = Correction(3)
    correction.observe(torch.tensor([[0.5, 0.5, 0.5]]), [0], [0])
    assert torch.equal(correction(torch.tensor([[0.3]])), Correction(3)(torch.tensor([[0.3]])))
    once = Correction(3)
    correction.observe(torch.tensor([[0.5, 0.1, 0.1]]), [3], [0])
    once.observe(torch.tensor([[0.5]]), [1], [0])
    assert correction.offsets == once.offsets and correction.slope == once.slope


def test_the_correction_never_freezes():
    correction = Correction(1, memory=200.0)
    for hit in [1] * 1500 + [0] * 600:
        correction.observe(torch.tensor([[0.6]]), [1], [hit])
    assert correction(torch.tensor([[0.6]])).item() < 0.1
