"""Which rows copy, how much, and whether the others draft: against a scan of every way, simulated machines, and exact
laws."""

import itertools
import random
from types import SimpleNamespace

import pytest

from hf_dspark.drafting.copying import Copy, CopyIndex
from hf_dspark.scheduling.choice import choose
from hf_dspark.scheduling.cost import CostTable
from hf_dspark.scheduling.policy import Policy


def rate_of(lengths, drafting, copies, drafts, verify, draft_seconds):
    """Expected tokens per second of one way: a row with length 0 drafts if the round does, and is a plain step
    otherwise."""
    expected, width = 0.0, 1
    for length, chances in zip(lengths, copies):
        offered = chances[:length] if length else drafts if drafting else []
        expected += 1 + sum(offered)
        width = max(width, 1 + len(offered))
    return expected / (verify(width) + drafting * draft_seconds)


def scan(copies, drafts, verify, draft_seconds, optional) -> float:
    """The best rate over every combination of copy lengths, with and without the drafter."""
    best = 0.0
    for lengths in itertools.product(*[range(len(c) + 1) for c in copies]):
        for drafting in (False, True) if drafts else (False,):
            if drafting and all(lengths):
                continue  # there's nobody to draft for
            if drafts and not optional and not drafting and not all(lengths):
                continue  # the rest has to be drafted for
            best = max(best, rate_of(lengths, drafting, copies, drafts, verify, draft_seconds))
    return best


def falling(rng, n, top=1.0):
    chances = []
    for _ in range(n):
        top *= rng.choice([0.2, 0.5, 0.9, 1.0])
        chances.append(top)
    return chances


@pytest.mark.parametrize("optional", [True, False])
def test_the_choice_is_as_good_as_the_best_of_all_ways(optional):
    rng, kinds = random.Random(0), set()
    for _ in range(600):
        copies = [falling(rng, rng.choice([0, 1, 2, 3, 4])) for _ in range(rng.choice([1, 2, 3]))]
        drafts = falling(rng, rng.choice([0, 2, 3]))
        step, first = rng.choice([0.02, 0.1, 0.3]), rng.choice([0.0, 0.3])
        verify = lambda width: 1 + step * (width - 1) + first * (width > 1)  # noqa: B023, E731
        draft_seconds = rng.choice([0.0, 0.15, 0.6])
        choice = choose(copies, drafts, verify, draft_seconds, optional)
        assert all(0 <= n <= len(c) for n, c in zip(choice.copies, copies))
        mine = rate_of(choice.copies, choice.drafts, copies, drafts, verify, draft_seconds)
        assert mine == pytest.approx(scan(copies, drafts, verify, draft_seconds, optional))
        kinds.add((choice.drafts, any(choice.copies), all(choice.copies)))
    assert len(kinds) > 3, "rounds of all kinds"


def test_a_copy_that_looks_as_good_as_the_drafter_is_taken_because_it_costs_no_drafting():
    assert choose([[0.6]], [0.6], lambda width: 1.0, 0.1, False) == ([1], False)
    assert choose([[0.5]], [0.6, 0.5], lambda width: 1.0, 0.1, False) == ([0], True)


# ---------------------------------------------------------------------- what the policy makes of it


TABLE = CostTable(
    (1, 4), (0,), (1, 2, 4, 11), (((50.0, 52.0, 56.0, 70.0),), ((80.0, 88.0, 104.0, 160.0),)), ((8.0,), (14.0,))
)


class Text:
    """Decodes known `texts` round by round under a policy, in the costs of `TABLE`. The drafter's `quality` is the
    chance that a draft is right; 0 stands for no drafter."""

    def __init__(self, texts, prompts, quality=0.0, block=3, seed=0):
        self.texts, self.prompts, self.quality, self.block = texts, prompts, quality, block
        self.seed, self.sources = seed, []

    def decode(self, policy, copying=True, scheduled=True, limit=10) -> float:
        """Seconds."""
        at = list(self.prompts)
        indices = [CopyIndex(text[:n], 1) for text, n in zip(self.texts, at)]
        seconds = 0.0
        while live := [i for i, n in enumerate(at) if n < len(self.texts[i])]:
            policy.begin(len(live), 0.0)
            copies = [(indices[i].propose(limit) if copying else Copy([], 0), "copy") for i in live]
            lengths, planned = policy.choose(copies, scheduled)
            seconds += self.round(policy, live, at, indices, copies, lengths, planned)
        return seconds

    def right(self, row, place) -> bool:
        """Whether the drafter knows this token: the same in every run."""
        return random.Random(f"{self.seed} {row} {place}").random() < self.quality

    def round(self, policy, live, at, indices, copies, lengths, planned) -> float:
        """Seconds of one; a row's drafts are right by chance, its copies where the text says so."""
        accepted, committed, verified = [], [], []
        for i, length, (copy, _) in zip(live, lengths, copies):
            rest = self.texts[i][at[i] :]
            offered = length or planned
            if length:
                hits = [a == b for a, b in zip(copy.tokens[:length], rest)]
            else:
                hits = [self.right(i, at[i] + k) for k in range(min(planned, len(rest)))]
            n = next((k for k, hit in enumerate(hits) if not hit), len(hits))
            accepted.append(n)
            verified.append(offered)
            committed.append(rest[: n + 1])
        drafting, width = planned > 0 and not all(lengths), 1 + max(verified)
        sources = ["copy" if n else "drafter" if drafting else "none" for n in lengths]
        self.sources += sources
        draft = SimpleNamespace(
            sources=sources,
            stages=[1] * len(live),
            tokens=SimpleNamespace(shape=(len(live), planned)),
            confidence=None,
            parents=None,
            lengths=verified,
        )
        rows = len(live)
        spent = drafting * TABLE.draft_seconds(rows), TABLE.verify_seconds(rows * width, rows)
        policy.observe(draft, verified, accepted, width, *spent)
        policy.observe_copies(copies, committed)
        for i, tokens in zip(live, committed):
            indices[i].extend(tokens)
            at[i] += len(tokens)
        return sum(spent)


def policy_of(block):
    return Policy(block, 1, TABLE)


def fresh(n, seed=0):
    """Nothing is said twice."""
    return list(range(1000 * seed, 1000 * seed + n))


def common(n, seed=0):
    """Words come again, what followed them doesn't: matches of one token that are nearly always wrong."""
    rng = random.Random(seed)
    return [rng.choice((1, 2, 3)) if k % 2 else rng.randrange(10, 100_000) for k in range(n)]


def log_lines(n, seed=0):
    """The same line with other numbers in it."""
    rng, line, out = random.Random(seed), list(range(100, 117)), []
    while len(out) < n:
        out += [*line, rng.randrange(1000, 2000), *line[:5], rng.randrange(1000, 2000)]
    return out[:n]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("quality", [0.0, 0.5])
@pytest.mark.parametrize("make", [fresh, common])
def test_text_without_repetition_costs_at_most_1_percent(make, quality, rows):
    texts, block = [make(640, seed) for seed in range(rows)], 3 if quality else 0
    seconds = [Text(texts, [40] * rows, quality, block).decode(policy_of(block), copying) for copying in (False, True)]
    assert seconds[1] < 1.01 * seconds[0]


@pytest.mark.parametrize("quality", [0.0, 0.5])
def test_text_that_repeats_is_three_times_as_fast_as_plain_decoding(quality):
    text, block = log_lines(640), 3 if quality else 0
    seconds = Text([text], [60], quality, block).decode(policy_of(block))
    assert 580 * TABLE.verify_seconds(1) > 3 * seconds


def test_two_sources_beat_either_where_a_text_is_half_new():
    rng, text = random.Random(1), []
    while len(text) < 900:
        text += [rng.randrange(10_000) for _ in range(12)]
        start = rng.randrange(max(1, len(text) - 60))
        text += text[start : start + rng.randint(4, 16)]
    both, drafter = (Text([text], [60], 0.5).decode(policy_of(3), copying) for copying in (True, False))
    copies = Text([text], [60], 0.0, 0).decode(policy_of(0))
    assert both < 0.93 * min(drafter, copies)


def test_matches_of_one_token_gain_where_they_are_often_right_and_cost_nothing_where_they_never_are():
    """Index from one or from two tokens on, as copy='auto' and copy=n do, under the policy."""

    class FromTwo(Text):
        def decode(self, policy, **options):
            choose = policy.choose
            short = lambda copies, scheduled: choose(  # noqa: E731
                [(c if c.match > 1 else Copy([], 0), s) for c, s in copies], scheduled
            )
            policy.choose = short
            return super().decode(policy, **options)

    rng = random.Random(2)
    chain = {t: [rng.randrange(400), rng.randrange(400)] for t in range(400)}
    often = [0]
    while len(often) < 1500:
        often.append(chain[often[-1]][rng.random() < 0.3])
    for text, gain in ((often, 1.05), (common(640), 0.99)):
        one, two = (kind([text], [40], block=0).decode(policy_of(0)) for kind in (Text, FromTwo))
        assert two > gain * one


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_with_an_unlucky_start_is_not_left_out_for_ever(seed):
    """Words that come again offer a copy in most rounds; the drafter is worth more than those."""
    policy, text = policy_of(3), Text([common(900, seed)], [40], 0.6, seed=seed)
    for _ in range(6):
        policy.throttle.history.observe([0], [3])
    text.decode(policy)
    assert text.sources[-100:].count("drafter") > 80


def test_what_a_copy_was_worth_is_learnt_without_verifying_it():
    policy = policy_of(0)
    for _ in range(60):
        policy.observe_copies([(Copy([5, 6, 7], 2), "copy"), (Copy([], 0), "copy")], [[5, 6], [9]])
    chances = policy.copying["copy"].expected(2, 3)
    assert chances[0] > 0.85 and chances[1] / chances[0] > 0.85
    assert chances[2] / chances[1] == pytest.approx(policy_of(0).copying["copy"].prior[2][2])
    for _ in range(200):
        policy.observe_copies([(Copy([5, 6, 7], 2), "copy")], [[4]])
    assert policy.copying["copy"].expected(2, 1)[0] < 0.35
    assert policy.copying["memory"].expected(2, 1) == policy_of(0).copying["memory"].expected(2, 1)
