import pickle
import random

import pytest

from hf_dspark.scheduling.copying import PRIOR, CopyExpectation


def test_before_any_round_the_expectation_is_the_prior():
    for least, chances in PRIOR.items():
        survival = CopyExpectation().expected(least, 7)
        conditional = [now / before for before, now in zip([1.0, *survival], survival)]
        assert conditional == pytest.approx([*chances, chances[-1], chances[-1]])


def test_the_prior_expects_more_of_longer_matches():
    for shorter, longer in zip(list(PRIOR.values()), list(PRIOR.values())[1:]):
        assert all(a <= b for a, b in zip(shorter, longer))


@pytest.mark.parametrize(
    ("match", "least"), [(1, 1), (4, 4), (5, 5), (8, 5), (9, 9), (16, 9), (17, 17), (32, 17), (33, 33), (64, 33)]
)
def test_match_lengths_fall_into_classes(match, least):
    assert CopyExpectation().expected(match, 3) == CopyExpectation().expected(least, 3)
    expectation = CopyExpectation()
    expectation.observe(match, 3, 0)
    for other in PRIOR:
        assert (expectation.expected(other, 3) == CopyExpectation().expected(other, 3)) == (other != least)


def test_chances_equal_the_weighted_history_of_each_position():
    rng, expectation, history = random.Random(0), CopyExpectation(weight=7.0, memory=20.0), {}
    for _ in range(600):
        match, verified = rng.choice((1, 2, 6, 40)), rng.randrange(9)
        accepted = min(verified, int(rng.expovariate(0.4)))
        expectation.observe(match, verified, accepted)
        for k in range(verified):
            if k <= accepted:
                history.setdefault((match, min(k, 4)), []).append(k < accepted)
    for match, least in ((1, 1), (2, 2), (6, 5), (40, 33)):
        survival, expected = 1.0, []
        for k in range(8):
            outcomes = history[match, min(k, 4)]
            weights = [(1 - 1 / 20.0) ** age for age in reversed(range(len(outcomes)))]
            hits = sum(weight for weight, hit in zip(weights, outcomes) if hit)
            survival *= (7.0 * PRIOR[least][min(k, 4)] + hits) / (7.0 + sum(weights))
            expected.append(survival)
        assert expectation.expected(match, 8) == pytest.approx(expected)


def test_drafts_behind_a_rejection_teach_nothing():
    expectation = CopyExpectation()
    expectation.observe(2, 5, 2)
    chances, prior = expectation.expected(2, 5), CopyExpectation().expected(2, 5)
    assert chances[0] > prior[0]
    assert chances[2] / chances[1] < prior[2] / prior[1]
    assert chances[3] / chances[2] == pytest.approx(prior[3] / prior[2])
    assert chances[4] / chances[3] == pytest.approx(prior[4] / prior[3])


def test_a_text_that_changes_is_followed_and_nothing_is_ever_certain():
    expectation = CopyExpectation(memory=100.0)
    for _ in range(3000):
        expectation.observe(2, 4, 4)
    assert 0.9 < expectation.expected(2, 1)[0] < 1
    for _ in range(300):
        expectation.observe(2, 4, 0)
    assert 0 < expectation.expected(2, 1)[0] < 0.15


def test_the_chances_that_drafts_have_are_found():
    rng, expectation, truth = random.Random(0), CopyExpectation(), (0.8, 0.3, 0.9, 0.5, 0.7, 0.7)
    for _ in range(4000):
        accepted = next((k for k, chance in enumerate(truth) if rng.random() > chance), len(truth))
        expectation.observe(3, len(truth), accepted)
    survival = expectation.expected(3, 6)
    conditional = [now / before for before, now in zip([1.0, *survival], survival)]
    assert conditional == pytest.approx(truth, abs=0.07)


def test_asking_changes_nothing_and_nothing_is_expected_without_a_match():
    expectation = CopyExpectation()
    expectation.observe(0, 0, 0)
    expectation.observe(4, 3, 1)
    before = pickle.dumps(expectation)
    assert expectation.expected(4, 10) == expectation.expected(4, 10)
    assert expectation.expected(4, 10)[:3] == expectation.expected(4, 3)
    assert expectation.expected(0, 3) == [0.0] * 3
    assert expectation.expected(4, 0) == []
    assert pickle.dumps(expectation) == before


def test_two_expectations_share_nothing():
    CopyExpectation().observe(2, 3, 0)
    assert CopyExpectation().expected(2, 1) == [pytest.approx(PRIOR[2][0])]


@pytest.mark.parametrize("observed", [(2, 1, 2), (2, 3, -1), (0, 3, 1)])
def test_an_impossible_round_is_refused(observed):
    with pytest.raises(ValueError, match="is no round"):
        CopyExpectation().observe(*observed)
