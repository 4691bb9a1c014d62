"""Slow, obvious scheduling: exact laws of speculative decoding under any length rule, and brute-force lengths.

A toy world has rows, each with a target law p(prefix), a draft law q(prefix) and K drafts. `joint_law` enumerates
every joint draft of all rows, asks the rule for lengths, verifies by the ratio rule (or by match) with probabilities
instead of coins, completes every outcome to K + 1 tokens with the target, and returns the law of the texts as
Fractions.
"""

import itertools
import math
import random
from fractions import Fraction
from functools import lru_cache


class Row:
    """`p` and `q`: prefix tuple -> Fractions over the vocabulary. `c`: the drafts before k -> confidence of draft
    k."""

    def __init__(self, p, q, c, drafts):
        self.p, self.q, self.c, self.drafts = lru_cache(p), lru_cache(q), lru_cache(c), drafts

    def confidence(self, draft):
        return [float(self.c(draft[:k])) for k in range(self.drafts)]


def random_row(seed, vocabulary, drafts, confidences=(0, 0.3, 0.6, 0.9, 1)):
    """Random laws, and confidences that swing with the drafts before them (so a rule that peeks ahead shows)."""

    def law(kind):
        def at(prefix):
            rng = random.Random(f"{seed} {kind} {prefix}")
            weights = [rng.randint(1, 9) for _ in range(vocabulary)]
            return tuple(Fraction(w, sum(weights)) for w in weights)

        return at

    return Row(law("p"), law("q"), lambda x: random.Random(f"{seed} c {x}").choice(confidences), drafts)


def target_law(row, length):
    """{text: probability} of plain sampling."""
    texts = {(): Fraction(1)}
    for _ in range(length):
        texts = {(*x, v): w * p for x, w in texts.items() for v, p in enumerate(row.p(x))}
    return texts


def complete(row, partial, length):
    law = {}
    for start, weight in partial.items():
        texts = {start: weight}
        while len(next(iter(texts))) < length:
            texts = {(*x, v): w * p for x, w in texts.items() for v, p in enumerate(row.p(x)) if p}
        for text, w in texts.items():
            law[text] = law.get(text, 0) + w
    return law


def emitted_law(row, draft, length, match=False):
    """Law of the tokens emitted when the first `length` drafts are verified: the accepted ones and one more."""
    emitted, reach = {}, Fraction(1)
    for k in range(length):
        prefix, x = draft[:k], draft[k]
        p, q = row.p(prefix), row.q(prefix)
        if match:
            accept, rest = p[x], [0 if v == x else p[v] for v in range(len(p))]
        else:
            accept, rest = min(Fraction(1), p[x] / q[x]), [max(a - b, 0) for a, b in zip(p, q, strict=True)]
        if accept < 1:
            for v, w in enumerate(rest):
                if w:
                    text = (*prefix, v)
                    emitted[text] = emitted.get(text, 0) + reach * (1 - accept) * Fraction(w) / sum(rest)
        reach *= accept
    if reach:
        for v, p in enumerate(row.p(draft[:length])):
            text = (*draft[:length], v)
            emitted[text] = emitted.get(text, 0) + reach * p
    return emitted


def draft_law(row):
    drafts = {(): Fraction(1)}
    for _ in range(row.drafts):
        drafts = {(*x, v): w * q for x, w in drafts.items() for v, q in enumerate(row.q(x)) if q}
    return drafts


def joint_law(rows, rule, match=False):
    """Law of the tuple of texts when `rule(drafts, confidences) -> lengths` looks at all rows at once."""

    @lru_cache(None)
    def verified(r, draft, length):
        return tuple(complete(rows[r], emitted_law(rows[r], draft, length, match), rows[r].drafts + 1).items())

    weights = {}  # how often each tuple of (draft, length) arises, so that equal ones are verified once
    for joint in itertools.product(*(draft_law(row).items() for row in rows)):
        drafts = tuple(draft for draft, _ in joint)
        weight = math.prod(w for _, w in joint)
        lengths = rule(drafts, [row.confidence(draft) for row, draft in zip(rows, drafts, strict=True)])
        # Beyond its length a draft has no effect: summing over it is exact.
        key = tuple((draft[:n], n) for draft, n in zip(drafts, map(int, lengths), strict=True))
        weights[key] = weights.get(key, 0) + weight
    law = {}
    for key, weight in weights.items():
        for outcome in itertools.product(*(verified(r, draft, n) for r, (draft, n) in enumerate(key))):
            text = tuple(t for t, _ in outcome)
            law[text] = law.get(text, 0) + weight * math.prod(w for _, w in outcome)
    return law


def plain_law(rows):
    law = {}
    for joint in itertools.product(*(target_law(row, row.drafts + 1).items() for row in rows)):
        law[tuple(text for text, _ in joint)] = math.prod(w for _, w in joint)
    return law


def is_lossless(rows, rule, match=False):
    law = joint_law(rows, rule, match)
    return {k: v for k, v in law.items() if v} == {k: v for k, v in plain_law(rows).items() if v}


def survivals(confidences):
    return [list(itertools.accumulate(row, lambda a, c: a * c)) for row in confidences]


def best_rate(confidences, latency, padded=False):
    """Highest expected tokens per second over every choice of lengths."""
    best = 0.0
    sums = [[0.0, *itertools.accumulate(row)] for row in survivals(confidences)]
    for lengths in itertools.product(*(range(len(row)) for row in sums)):
        tokens = len(sums) * (1 + max(lengths)) if padded else len(sums) + sum(lengths)
        best = max(best, (len(sums) + sum(s[n] for s, n in zip(sums, lengths, strict=True))) / latency(tokens))
    return best


def path_rates(confidences, latency, padded=False):
    """Expected tokens per second after each admission in order of survival."""
    a, rows = survivals(confidences), len(confidences)
    if padded:
        gains = [(sum(column), rows) for column in zip(*a, strict=True)]
    else:
        gains = [(x, 1) for x in sorted((x for row in a for x in row), reverse=True)]
    emitted = tokens = rows
    rates = [emitted / latency(tokens)]
    for gain, added in gains:
        if gain > 0:
            emitted, tokens = emitted + gain, tokens + added
            rates.append(emitted / latency(tokens))
    return rates
