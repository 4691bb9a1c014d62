import itertools
import math
import random

import pytest
from oracles_scheduling import Row, draft_law, emitted_law, random_row, target_law

from hf_dspark.scheduling import (
    AcceptanceHistory,
    DraftState,
    DraftThrottle,
    OnlineCost,
    draft_length,
    next_state,
    worth_drafting,
)


def test_worth_drafting_compares_tokens_per_second():
    assert worth_drafting(2.0, 0.3, 1.2, 1.0)
    assert not worth_drafting(1.4, 0.3, 1.2, 1.0)
    assert not worth_drafting(1.5, 0.3, 1.2, 1.0)  # even is no gain
    assert not worth_drafting(1.6, 0.3, 1.2, 1.0, margin=0.1)


def test_draft_length_equals_brute_force():
    rng = random.Random(0)
    zero = 0
    for _ in range(300):
        chances = sorted((rng.random() for _ in range(rng.randint(1, 6))), reverse=True)
        draft, slope = rng.uniform(0, 0.8), rng.uniform(0, 0.5)
        rates = [1 / (1.0 * 1.03)]
        rates += [(1 + sum(chances[:k])) / (draft + 1 + slope * k) for k in range(1, len(chances) + 1)]
        got = draft_length(chances, [1.0] + [draft + 1 + slope * k for k in range(1, len(chances) + 1)])
        assert rates[got] == pytest.approx(max(rates))
        zero += got == 0
    assert 0 < zero < 300


def test_history_is_conditional_acceptance_with_a_prior():
    history = AcceptanceHistory(3, prior=0.5, weight=2.0, decay=1.0)
    assert history.survival() == pytest.approx([0.5, 0.25, 0.125])
    history.observe([2, 0, 1, 3], [3, 3, 1, 3])
    # Position 1: 3 of 4; position 2: 2 of 2, the third row verified only one; position 3: 1 of 2.
    first = (3 + 1) / (4 + 2)
    second = (2 + 2 * first) / (2 + 2)
    assert history.conditional() == pytest.approx([first, second, (1 + 2 * second) / (2 + 2)])


def test_chances_count_as_the_mean_of_what_becomes_of_the_drafts():
    rng, chances = random.Random(0), [0.8, 0.3, 0.6]
    told, seen = AcceptanceHistory(3, decay=1.0), AcceptanceHistory(3, decay=1.0)
    for _ in range(4000):
        told.expect([chances, chances[:2]])
        for row in (chances, chances[:2]):
            accepted = ([rng.random() < c for c in row] + [False]).index(False)
            seen.observe([accepted], [len(row)])
    assert told.conditional() == pytest.approx(chances, abs=1e-3)
    assert seen.conditional() == pytest.approx(told.conditional(), abs=0.03)
    assert told._reached == pytest.approx(seen._reached, rel=0.03)


def test_optimism_shrinks_with_what_was_seen():
    few, many = AcceptanceHistory(2, decay=1.0), AcceptanceHistory(2, decay=1.0)
    for history, rounds in ((few, 4), (many, 400)):
        for _ in range(rounds):
            history.expect([[0.4, 0.5]])
    hope = [h.survival(1.0)[1] - h.survival()[1] for h in (few, many)]
    assert hope[0] > 5 * hope[1] > 0
    chance, reached = few.conditional()[0], 4 + 2 * 1.0  # the prior weighs two
    assert few.survival(1.0)[0] == pytest.approx(chance + (chance * (1 - chance) / (reached + 2)) ** 0.5)


def test_history_forgets():
    history = AcceptanceHistory(1)
    for accepted in [1] * 200 + [0] * 200:
        history.observe([accepted], [1])
    assert history.survival()[0] < 0.05


def test_gaps_between_probes_grow_geometrically_and_shrink_once_drafting_pays():
    state, lengths = DraftState(4), []
    for _ in range(400):
        state = next_state(state, best=0, probe_length=4, loss=0.1)
        lengths.append(state.length)
    waits = [len(list(run)) for length, run in itertools.groupby(lengths) if length == 0]
    assert waits[:4] == [16, 32, 64, 128] and lengths.count(4) == 4 * 4
    gap = state.gap
    state = next_state(state, best=3, probe_length=4, loss=0.0)
    assert state.length == 3 and state.gap == gap // 2 and state.wait == state.probe == 0


def test_gaps_do_not_grow_while_drafting_may_pay_after_all():
    state, lengths = DraftState(4), []
    for i in range(400):
        state = next_state(state, best=0, probe_length=4, loss=0.1, hopeful=i < 200)
        lengths.append(state.length)
    waits = [len(list(run)) for length, run in itertools.groupby(lengths) if length == 0]
    assert set(waits[:11]) == {math.ceil(4 * 0.1 / 0.03)} and waits[-2] >= 4 * waits[0]


def test_a_dear_probe_waits_longer():
    first = next_state(DraftState(), best=0, probe_length=4, loss=2.0)
    assert 4 * 2.0 / first.gap <= 0.03


class Machine:
    """A simulated decode loop: costs in plain steps, acceptance as a function of the round."""

    def __init__(self, draft, verify, accept, max_length=6, recursive=False, noise=0.05, seed=0):
        self.draft, self.verify, self.accept, self.noise = draft, verify, accept, noise
        self.rng, self.max_length, self.recursive = random.Random(seed), max_length, recursive

    def round(self, length, now):
        accepted = 0
        while accepted < length and self.rng.random() < self.accept(now):
            accepted += 1
        jitter = self.rng.uniform(1 - self.noise, 1 + self.noise)
        draft = self.draft * (length if self.recursive else 1) if length else 0.0
        return accepted, draft * jitter, self.verify(length) * jitter

    def run(self, tokens):
        """Seconds, and the lengths used, for so many tokens under a throttle."""
        cost = OnlineCost(recursive=self.recursive)
        throttle, now, seconds, lengths = DraftThrottle(self.max_length, cost), 0, 0.0, []
        while now < tokens:
            length = throttle.next_length()
            accepted, draft, verify = self.round(length, now)
            cost.record_verify(verify, 1 + length)
            if length:
                cost.record_draft(draft, length)
                throttle.observe([accepted], [length])
            lengths.append(length)
            now, seconds = now + accepted + 1, seconds + draft + verify
        return seconds, lengths

    def always(self, tokens, length):
        now, seconds = 0, 0.0
        while now < tokens:
            accepted, draft, verify = self.round(length, now)
            now, seconds = now + accepted + 1, seconds + draft + verify
        return seconds


def slow_verify(length):
    return 1 + 0.04 * length


@pytest.mark.parametrize("draft", [0.3, 1.5, 5.0])
def test_a_drafter_that_loses_costs_at_most_a_few_percent(draft):
    """It is never right, so the throttled run should take one plain step per token."""
    seconds, lengths = Machine(draft, slow_verify, lambda now: 0.05).run(3000)
    assert seconds / 3000 < 1.04
    assert lengths.count(0) > 0.95 * len(lengths) and lengths[-1] == 0
    assert any(lengths[200:])  # it is still asked now and then


def test_a_drafter_that_wins_is_left_alone():
    machine = Machine(0.2, slow_verify, lambda now: 0.85)
    seconds, lengths = machine.run(3000)
    assert seconds < 1.05 * machine.always(3000, 6)
    assert lengths.count(0) <= 4 + 0.02 * len(lengths)


def test_a_middling_drafter_is_turned_down_before_it_is_turned_off():
    machine = Machine(0.06, lambda length: 1 + 0.2 * length, lambda now: 0.5)
    seconds, lengths = machine.run(3000)
    assert machine.always(3000, 6) > 1.03 * machine.always(3000, 0)  # at full length it loses
    assert seconds < 0.97 * machine.always(3000, 0)
    assert 1 <= sorted(lengths[50:])[len(lengths[50:]) // 2] <= 3


def test_a_recursive_drafter_is_turned_down_for_its_draft_time():
    machine = Machine(0.15, slow_verify, lambda now: 0.6, recursive=True)
    _, lengths = machine.run(3000)
    assert 1 <= sorted(lengths[50:])[len(lengths[50:]) // 2] <= 3


def test_a_drafter_that_recovers_is_found_again():
    machine = Machine(0.2, slow_verify, lambda now: 0.05 if now < 500 else 0.9)
    _, lengths = machine.run(3000)
    assert sum(length > 0 for length in lengths[-200:]) > 190


def test_drafting_is_compared_with_plain_steps_measured_first_and_now_and_then():
    machine = Machine(0.2, slow_verify, lambda now: 0.9)
    _, lengths = machine.run(3000)
    assert lengths[:4] == [0] * 4 and all(lengths[4:68])
    plain = lengths.count(0) - 4
    # A plain step loses up to 0.72 of its time to a drafter this good.
    assert plain >= len(lengths) // 200 and plain * 0.72 < 0.006 * len(lengths) * (0.2 + slow_verify(6))
    # Four plain steps on a busy machine make a losing drafter look good: it is found out nonetheless.
    cost = OnlineCost()
    throttle, lengths = DraftThrottle(6, cost), []
    for width in (1, 1, 1, 1, *range(2, 8), *range(2, 8), *range(2, 8)):
        cost.record_verify(3.0 if width == 1 else slow_verify(width - 1), width)
    for _ in range(1000):
        length = throttle.next_length()
        cost.record_verify(slow_verify(length), 1 + length)
        if length:
            cost.record_draft(0.8, length)
            throttle.observe([0], [length])
        lengths.append(length)
    assert all(lengths[:60]) and lengths[-300:].count(0) > 280


def test_a_probe_outweighs_a_long_bad_past():
    cost, lengths = OnlineCost(), []
    for width in (1, 1, 1, 1, 3, 5, 7):
        cost.record_verify(slow_verify(width - 1), width)
    throttle = DraftThrottle(6, cost)
    for _ in range(200):
        throttle.observe([0], [6])
    while len(lengths) < 300:
        lengths.append(throttle.next_length())
        if lengths[-1]:
            throttle.observe([lengths[-1]], [lengths[-1]])
    first = next(i for i, length in enumerate(lengths) if length)
    assert lengths[first : first + 64].count(0) == 0


def test_lengths_chosen_from_history_are_lossless():
    """Two rounds and more: the second length depends on how many drafts of the first were accepted."""
    world, tokens, lengths_seen = random_row(0, 2, 4), 3, set()

    def law(prefix, past):
        if len(prefix) >= tokens:
            return {prefix[:tokens]: 1}
        history = AcceptanceHistory(2)
        for accepted, verified in past:
            history.observe([accepted], [verified])
        length = draft_length(history.survival(), [1.0, 1.8, 2.0])
        lengths_seen.add(length)
        row = Row(lambda x: world.p(prefix + x), lambda x: world.q(prefix + x), None, length)
        total = {}
        for draft, weight in draft_law(row).items():
            for text, w in emitted_law(row, draft, length).items():
                for final, rest in law(prefix + text, (*past, (len(text) - 1, length))).items():
                    total[final] = total.get(final, 0) + weight * w * rest
        return total

    assert law((), ()) == target_law(world, tokens)
    assert len(lengths_seen) > 1


def test_drafts_that_break_even_are_made_for_few_rows_only():
    lengths = {}
    for rows in (1, 2, 4):
        cost = OnlineCost()
        for _ in range(8):
            cost.record_verify(1.0, rows, rows)
            cost.record_verify(1.3, 2 * rows, rows)
            cost.record_draft(0.1, 1, rows)
        throttle = DraftThrottle(1, cost)
        for _ in range(200):
            throttle.history.expect([[0.41]] * rows)  # 1.41 tokens in 1.4 times a plain step
        lengths[rows] = throttle.next_length(rows)
    assert lengths == {1: 1, 2: 1, 4: 0}
