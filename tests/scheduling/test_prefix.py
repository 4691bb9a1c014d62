import math
import random
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch
from oracles_scheduling import (
    Row,
    best_rate,
    is_lossless,
    joint_law,
    path_rates,
    random_row,
)

from hf_dspark.scheduling import (
    LaggedScheduler,
    LatencyCurve,
    algorithm1,
    allocate,
    capacity,
    confidence_prefix,
    lookahead,
    survival,
    throughput,
)


def latency(tokens):
    """Steep enough that the schedulers stop somewhere in the middle."""
    return 1 + 0.45 * tokens


def jagged(tokens):
    return {1: 1, 2: 2, 3: 2.1, 4: 3.4, 5: 3.5, 6: 3.6, 7: 4.8, 8: 4.9}[tokens]


def ahead(c, latency, rate, lengths=None):
    """[`lookahead`] with drafts that were accepted more and more often in the past, so that a bad one can be worth
    it."""
    offered = torch.full((len(c),), c.shape[1]) if lengths is None else lengths
    return offered.clamp(max=lookahead(c, [0.3, 0.6, 0.9][: c.shape[1]], latency, rate, lengths))


RULES = {
    "threshold": lambda c: confidence_prefix(c, 0.5),
    "cumulative threshold": lambda c: confidence_prefix(c, 0.5, cumulative=True),
    "algorithm 1": lambda c: algorithm1(c, latency),
    "algorithm 1, jagged": lambda c: algorithm1(c, jagged),
    "algorithm 1, padded": lambda c: algorithm1(c, latency, padded=True),
    "algorithm 1, ragged": lambda c: algorithm1(c, latency, torch.tensor([2, 1])[: len(c)]),
    "lookahead": lambda c: ahead(c, latency, 0.5),
    "lookahead, jagged": lambda c: ahead(c, jagged, 0.9),
    "lookahead, ragged": lambda c: ahead(c, jagged, 0.9, torch.tensor([1, 2])[: len(c)]),
    "capacity 1": lambda c: allocate(c, 1),
    "capacity 2": lambda c: allocate(c, 2),
    "capacity 3": lambda c: allocate(c, 3),
    "capacity 3, ragged": lambda c: allocate(c, 3, torch.tensor([1, 2])[: len(c)]),
}


def global_search(c):
    """Both the capacity and the allocation from the drafts at hand: what must not be done."""
    return allocate(c, capacity(c, jagged))


def on_tensors(rule):
    return lambda drafts, confidences: rule(torch.tensor(confidences)).tolist()


def appendix_a():
    """Sampling A makes the second draft look good, and only together do the two drafts pay (arXiv 2607.05147, appendix
    A)."""
    tenth = Fraction(1, 10)
    return Row(
        lambda x: (7 * tenth, 3 * tenth),
        lambda x: (5 * tenth, 5 * tenth),
        lambda x: 0.8 if not x else 0.9 * (x == (0,)),
        2,
    )


def appendix_a_latency(tokens):
    return 1 / {1: 1, 2: 0.5, 3: 0.45}[tokens]


def chance_of_a(rule, match=False):
    law = joint_law([appendix_a()], on_tensors(rule), match)
    return sum(weight for (text,), weight in law.items() if text[0] == 0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", range(4))
def test_a_rule_keeps_the_law_of_two_requests_jointly(rule, seed):
    rows = [random_row(f"{seed} {r}", 2, 2) for r in range(2)]
    assert is_lossless(rows, on_tensors(rule))


@pytest.mark.parametrize("rule", ["algorithm 1", "algorithm 1, padded", "capacity 2"])
def test_a_rule_keeps_the_law_with_three_tokens(rule):
    assert is_lossless([random_row(0, 3, 2), random_row(1, 2, 2)], on_tensors(RULES[rule]))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_keeps_the_law_of_a_longer_block(rule):
    assert is_lossless([random_row(5, 2, 3)], on_tensors(rule))


def test_algorithm_1_keeps_the_law_where_looking_ahead_pays():
    assert chance_of_a(lambda c: algorithm1(c, appendix_a_latency)) == Fraction(7, 10)
    assert is_lossless([appendix_a()], on_tensors(lambda c: algorithm1(c, appendix_a_latency)))


def test_global_search_on_the_current_drafts_is_biased():
    def search(c):
        return allocate(c, capacity(c, appendix_a_latency))

    assert chance_of_a(search) == Fraction(17, 20)
    assert not is_lossless([appendix_a()], on_tensors(search))
    assert is_lossless([appendix_a()], on_tensors(search), match=True)  # which never uses q, so any rule is exact


def own_probability(drop):
    """Stop at the first draft with q(x) < 0.5, and drop or keep that draft itself."""

    def rule(drafts, confidences):
        lengths = []
        for row, draft in zip(LOOKED_AT, drafts, strict=True):
            low = [k for k, x in enumerate(draft) if row.q(draft[:k])[x] < 0.5]
            lengths.append(min(len(draft), low[0] + (not drop)) if low else len(draft))
        return lengths

    return rule


LOOKED_AT = [random_row(2, 2, 2), random_row(3, 2, 2)]


def test_dropping_the_draft_one_has_looked_at_is_biased_and_keeping_it_is_not():
    assert not is_lossless(LOOKED_AT, own_probability(drop=True))
    assert is_lossless(LOOKED_AT, own_probability(drop=True), match=True)
    assert is_lossless(LOOKED_AT, own_probability(drop=False))


def later_confidences_matter(rule):
    """Whether a change of the confidences after draft k, all that x_k can change, ever changes that draft k is
    verified."""
    generator = torch.Generator().manual_seed(0)
    for case in range(600):
        k, c = case % 2, torch.randint(0, 5, (2, 3), generator=generator) / 4
        other = c.clone()
        other[0, k + 1 :] = torch.rand(2 - k, generator=generator)
        if (rule(c)[0] > k) != (rule(other)[0] > k):
            return True
    return False


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_no_rule_lets_a_draft_decide_about_itself(rule):
    assert not later_confidences_matter(rule)


def test_the_global_search_lets_a_draft_decide_about_itself():
    assert later_confidences_matter(global_search)


def test_algorithm_1_equals_brute_force_wherever_the_rate_rises_and_then_falls():
    rng = random.Random(0)
    unimodal = 0
    for case in range(10_000):
        rows, drafts, padded = rng.randint(1, 3), rng.randint(1, 3), case % 4 == 0
        c = [[rng.choice((0, 1, rng.random(), rng.random())) for _ in range(drafts)] for _ in range(rows)]
        seconds, slope = [1.0], rng.choice((0.02, 0.2, 0.6))
        for _ in range(rows * (drafts + 1)):
            seconds.append(seconds[-1] + slope * rng.random())
        rates = path_rates(c, seconds.__getitem__, padded)
        rising = [b > a for a, b in zip(rates, rates[1:], strict=False)]
        if rising != sorted(rising, reverse=True):
            continue
        unimodal += 1
        confidence = torch.tensor(c, dtype=torch.float64)
        chosen = algorithm1(confidence, seconds.__getitem__, padded=padded)
        rate = throughput(confidence, chosen, seconds.__getitem__, padded=padded)
        assert rate == pytest.approx(best_rate(c, seconds.__getitem__, padded), rel=1e-12)
    assert unimodal > 6000


def test_capacity_is_the_global_maximum_of_the_path_and_allocate_takes_the_best():
    rng = random.Random(1)
    for _ in range(500):
        rows, drafts = rng.randint(1, 3), rng.randint(1, 4)
        c = [[rng.random() for _ in range(drafts)] for _ in range(rows)]
        seconds = [1.0 + rng.random() * 3 for _ in range(rows * (drafts + 1) + 1)]
        rates = path_rates(c, seconds.__getitem__)
        count = capacity(torch.tensor(c, dtype=torch.float64), seconds.__getitem__)
        assert rates[count] == max(rates)
        a = survival(torch.tensor(c, dtype=torch.float64))
        kept = torch.arange(drafts) < allocate(torch.tensor(c, dtype=torch.float64), count)[:, None]
        assert a[kept].sum().item() == pytest.approx(a.flatten().topk(count).values.sum().item())


def test_saturated_confidences_are_admitted_in_order_of_depth():
    """With every survival 1.0 a larger depth must not come first, or the row could never grow past it."""
    c = torch.ones(3, 4)
    assert algorithm1(c, lambda tokens: 1.0).tolist() == [4, 4, 4]
    assert allocate(c, 5).tolist() == [2, 2, 1]
    assert allocate(c, 12).tolist() == [4, 4, 4]
    c[1, 2] = 0.5
    assert allocate(c, 10).tolist() == [4, 2, 4]


def test_a_tie_of_rates_stops():
    assert algorithm1(torch.tensor([[1.0, 1.0]]), float).tolist() == [0]
    assert capacity(torch.tensor([[1.0, 1.0]]), float) == 0


def test_nothing_measured_means_nothing_pruned_but_impossible_drafts():
    free = LatencyCurve((1,), (1.0,))
    assert algorithm1(torch.tensor([[0.9, 0.8, 0.7], [0.5, 0.0, 1.0]]), free).tolist() == [3, 1]


def test_ragged_candidates_ignore_what_stands_beyond():
    c = torch.tensor([[0.9, 0.9, float("nan")], [0.9, 0.9, 0.9]])
    lengths = torch.tensor([2, 3])
    assert algorithm1(c, lambda tokens: 1.0, lengths).tolist() == [2, 3]
    assert allocate(c, 4, lengths).tolist() == [2, 2]
    assert confidence_prefix(c, 0.0, torch.tensor([2, 1])).tolist() == [2, 1]
    assert algorithm1(torch.ones(2, 0), float).tolist() == [0, 0]
    assert algorithm1(torch.ones(0, 2), float).tolist() == []


def test_the_threshold_stops_at_the_first_low_confidence():
    c = torch.tensor([[0.9, 0.3, 0.9], [0.1, 1.0, 1.0], [0.9, 0.8, 0.7]])
    assert confidence_prefix(c, 0.5).tolist() == [1, 0, 3]
    assert confidence_prefix(c, 0.7, cumulative=True).tolist() == [1, 0, 2]
    assert confidence_prefix(c, 0.0).tolist() == [3, 3, 3]
    assert confidence_prefix(c, 0.9).tolist() == [1, 0, 1]  # at the threshold is not below it


def test_padding_to_a_captured_size_verifies_the_next_ranked_drafts():
    c = torch.tensor([[0.9, 0.9, 0.9], [0.5, 0.5, 0.5]])

    def worth_one(tokens):
        return tokens if tokens > 3 else 1.0

    assert capacity(c, worth_one) == 1
    assert capacity(c, worth_one, sizes=(2, 4, 8)) == 2
    assert capacity(c, worth_one, sizes=(2,)) == 1  # nothing captured is large enough
    assert allocate(c, 2).tolist() == [2, 0]
    assert allocate(c, 99).tolist() == [3, 3]


def test_a_padded_batch_admits_a_position_for_all_rows():
    c = torch.tensor([[0.9, 0.9, 0.1], [0.8, 0.0, 0.9]])
    # The third position is worth 0.08 tokens, the second 0.81, and each costs the same.
    assert algorithm1(c, lambda tokens: 1 + 0.1 * tokens, padded=True).tolist() == [2, 1]
    assert throughput(c, torch.tensor([2, 1]), float, padded=True) == pytest.approx((2 + 0.9 + 0.81 + 0.8) / 6)
    assert throughput(c, torch.tensor([2, 1]), float) == pytest.approx((2 + 0.9 + 0.81 + 0.8) / 5)


def test_looking_ahead_finds_the_best_length_on_any_latency_if_confidences_are_as_expected():
    rng = random.Random(0)
    stopped, passed = 0, 0
    for _ in range(2000):
        drafts, rows = rng.randint(1, 5), rng.randint(1, 3)
        chances = [rng.random() ** 0.5 for _ in range(drafts)]
        lengths = [rng.randint(0, drafts) for _ in range(rows)]
        seconds = list(accumulate(rng.choice([0.05, 0.1, 1.0]) for _ in range(drafts + 1)))
        rate = rng.uniform(0.1, 2.0)
        values = []
        for length in range(drafts + 1):
            gains = (math.prod(chances[: k + 1]) for n in lengths for k in range(min(n, length)))
            values.append(sum(gains) - rate * (seconds[length] - seconds[0]))
        confidence = torch.tensor([chances] * rows, dtype=torch.float64)
        got = lookahead(
            confidence, chances, lambda t, r=rows, s=seconds: s[t // r - 1], rate, torch.tensor(lengths), lengths
        )
        assert values[got] == pytest.approx(max(values))
        stopped += got < drafts
        passed += any(a > b for a, b in pairwise(values[: got + 1]))
    assert stopped > 200 and passed > 50  # dear drafts stood in the way of better ones


def test_looking_ahead_uses_this_rounds_confidence_once_it_is_reached():
    kinked = LatencyCurve((1, 2, 3, 4), (1.0, 1.5, 1.6, 1.7))
    past = [0.5, 0.5, 0.5]

    def chosen(*confidence):
        return lookahead(torch.tensor([confidence]), past, kinked, 1.0)

    assert chosen(0.1, 0.9, 0.9) == 0  # 0.1 + 0.05 + 0.025 is not worth 0.7 seconds
    assert chosen(0.4, 0.9, 0.9) == 3  # 0.4 + 0.2 + 0.1 is
    assert chosen(0.4, 0.1, 0.9) == 1  # nor is 0.04 + 0.02 worth 0.2 once the second is known to be bad


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan")])
def test_confidences_that_are_no_probabilities_are_refused(value):
    with pytest.raises(ValueError, match="pass numbers in"):
        algorithm1(torch.tensor([[0.5, value]]), float)


def test_survival_never_rises_along_a_row():
    c = torch.rand(200, 64, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.9
    c[:, ::3] = 1.0
    assert (survival(c).diff(dim=1) <= 0).all()


class TestLaggedScheduler:
    def worth_two(self, tokens):
        return 1.0 if tokens <= 4 else 100.0

    def test_everything_is_verified_until_a_round_is_old_enough(self):
        schedule, c = LaggedScheduler(lag=2), torch.full((2, 3), 0.9)
        lengths = [schedule(c, "ab", self.worth_two).tolist() for _ in range(4)]
        assert lengths == [[3, 3], [3, 3], [1, 1], [1, 1]]

    def test_capacity_is_old_and_allocation_is_current(self):
        schedule = LaggedScheduler(lag=1)
        schedule(torch.tensor([[0.9, 0.9], [0.1, 0.1]]), "ab", self.worth_two)
        assert schedule(torch.tensor([[0.1, 0.1], [0.9, 0.9]]), "ab", self.worth_two).tolist() == [0, 2]

    def test_the_past_is_exactly_the_lag_and_each_rows_own(self):
        schedule, now = LaggedScheduler(lag=2), torch.full((2, 2), 0.9)
        schedule(torch.tensor([[0.9, 0.9], [0.0, 0.0]]), "ab", latency)
        schedule(torch.zeros(2, 2), "ab", latency)
        # 0.9 and 0.81 pay here, no third draft does; two rows of the mean, 0.45 and 0.41, would admit four.
        assert schedule(now, "ab", lambda tokens: 1 + 0.3 * tokens).sum() == 2
        assert schedule(now, "ab", lambda tokens: 1 + 0.3 * tokens).sum() == 0

    def test_the_mean_moves_slowly(self):
        schedule = LaggedScheduler(lag=1, decay=0.9)
        for value in (1.0, 0.0, 0.0):
            schedule(torch.tensor([[value]]), "a", latency)
        assert schedule._mean == pytest.approx([0.9])

    def test_a_new_request_is_judged_by_the_mean_and_a_gone_one_forgotten(self):
        schedule, high, none = LaggedScheduler(lag=1, decay=0.5), torch.ones(1, 2), torch.zeros(1, 2)
        free = LatencyCurve((1,), (1.0,))
        for _ in range(2):
            schedule(none, "a", free)
        assert schedule(high, "b", free).tolist() == [0]  # the mean knows only rows without any hope
        assert schedule(high, "b", free).tolist() == [2]  # now it has its own past
        schedule(high, "c", free)
        assert schedule(high, "b", lambda tokens: 1.0).tolist() == [2] and set(schedule._recent) == {"b"}

    def test_rows_may_offer_different_numbers_of_drafts_from_round_to_round(self):
        schedule = LaggedScheduler(lag=1)
        for width in (2, 4, 3):
            lengths = schedule(torch.full((2, width), 0.9), "ab", lambda tokens: 1.0, torch.tensor([width, 1]))
            assert lengths.max() <= width and lengths[1] <= 1

    def test_it_is_lossless_after_any_past(self):
        rows = [random_row(r + 20, 2, 2) for r in range(2)]
        past = [torch.tensor([[0.9, 0.6], [0.6, 0.3]]), torch.tensor([[0.3, 0.3], [0.9, 0.9]])]

        def rule(c):
            schedule = LaggedScheduler(lag=2)
            for old in past:
                schedule(old, "ab", jagged)
            return schedule(c, "ab", jagged)

        assert is_lossless(rows, on_tensors(rule))

    def test_lag_zero_is_refused(self):
        with pytest.raises(ValueError, match="at least 1"):
            LaggedScheduler(lag=0)
