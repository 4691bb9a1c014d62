"""Every verifier with every kind of length rule, by enumeration of all outcomes: which pairs give exactly the target's law."""

import pytest
import torch
from oracles import ToyModel, distance, round_law, text_law

from hf_dspark.verification import chain

VERIFIERS = {"ratio": chain.verify_ratio, "block": chain.verify_block, "match": chain.verify_match}
EXACT = 1e-12


def fixed(tokens, laws, after):
    return len(tokens) < 2 or after


def fixed_three(tokens, laws, after):
    return len(tokens) < 3 or after


def predictable(tokens, laws, after):
    """The second draft is made or not by the first; the third by what they say together."""
    return after or not tokens or (len(tokens) < 3 and (tokens[-1] + len(tokens)) % 3 != 0)


def stop_after_including(tokens, laws, after):
    """Looks at a draft's own probability and keeps it, but stops there if it was low."""
    if after:
        return float(laws[-1][tokens[-1]]) > 0.35
    return len(tokens) < 2


def drop_after_looking(tokens, laws, after):
    """Looks at a draft's own probability and withdraws it if it was low."""
    if after:
        return True if float(laws[-1][tokens[-1]]) > 0.35 else "drop"
    return len(tokens) < 2


RULES = [fixed, fixed_three, predictable, stop_after_including]


def models(seed, **changes):
    return ToyModel(seed), ToyModel(seed + 100, **changes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_rules_that_do_not_foresee_are_exact(verifier, rule):
    for seed in (1, 2):
        target, drafter = models(seed)
        law, _ = round_law(VERIFIERS[verifier], target, drafter, rule)
        assert distance(law, text_law(target, 3)) < EXACT


@pytest.mark.parametrize(("verifier", "exact"), [("ratio", False), ("block", False), ("match", True)])
def test_withdrawing_a_draft_for_its_own_probability_biases_all_but_match(verifier, exact):
    target, drafter = models(1)
    law, _ = round_law(VERIFIERS[verifier], target, drafter, drop_after_looking)
    off = distance(law, text_law(target, 3))
    assert off < EXACT if exact else off > 0.01


@pytest.mark.parametrize("rule", [*RULES, drop_after_looking])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_deterministic_drafts_are_exact_under_any_rule(verifier, rule):
    target, drafter = models(3)
    law, _ = round_law(VERIFIERS[verifier], target, drafter, rule, one_hot=True)
    assert distance(law, text_law(target, 3)) < EXACT


@pytest.mark.parametrize("verifier", ["ratio", "block"])
def test_deterministic_drafts_judged_by_the_softmax_they_topped_are_biased(verifier):
    target, drafter = models(3)
    law, _ = round_law(VERIFIERS[verifier], target, drafter, fixed, one_hot=True, wrong_q="softmax")
    assert distance(law, text_law(target, 3)) > 0.01


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_reduced_draft_vocabulary_leaves_every_token_reachable(verifier):
    target, drafter = models(4, support={0, 2})
    law, _ = round_law(VERIFIERS[verifier], target, drafter, fixed)
    assert distance(law, text_law(target, 3)) < EXACT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_tokens_the_target_forbids_never_pass(verifier):
    for seed in (5, 6):
        target, drafter = ToyModel(seed, zeros=1.0), ToyModel(seed + 100, zeros=0.5)
        law, _ = round_law(VERIFIERS[verifier], target, drafter, predictable)
        assert distance(law, text_law(target, 3)) < EXACT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_perfect_drafter_is_always_accepted_where_draws_are_compared_by_ratio(verifier):
    target = ToyModel(7)
    law, accepted = round_law(VERIFIERS[verifier], target, target, fixed)
    assert distance(law, text_law(target, 3)) < EXACT
    assert abs(accepted - 2) < EXACT if verifier != "match" else 0.2 < accepted < 1.5


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_drafts_that_end_at_a_stop_token_keep_its_law(verifier):
    target, drafter = models(8)
    law, _ = round_law(VERIFIERS[verifier], target, drafter, fixed_three, stop=1)
    assert distance(law, text_law(target, 3, stop=1)) < EXACT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_further_stage_gated_by_the_whole_block_before_it_is_exact(verifier):
    def gated(tokens, laws, after):  # two drafts per stage; another stage while the stage's log-probability is high
        if after or len(tokens) % 2 or not tokens:
            return True
        score = sum(float(q[t].log()) for q, t in zip(laws[-2:], tokens[-2:]))
        return len(tokens) < 4 and score >= -1.5

    target, drafter = models(9)
    target.vocab = drafter.vocab = 2
    law, _ = round_law(VERIFIERS[verifier], target, drafter, gated, length=5)
    assert distance(law, text_law(target, 5)) < EXACT


def test_block_verification_accepts_at_least_as_much_as_ratio():
    gains = []
    for seed in range(20, 32):
        target, drafter = models(seed)
        gains.append(
            round_law(chain.verify_block, target, drafter, fixed)[1]
            - round_law(chain.verify_ratio, target, drafter, fixed)[1]
        )
    assert min(gains) > -EXACT
    assert max(gains) > 0.01


# ---------------------------------------------------------------------- DSpark's Appendix A


class Given:
    def __init__(self, laws, vocab=2):
        self.laws, self.vocab = laws, vocab

    def law(self, prefix):
        return torch.tensor(self.laws.get(prefix[-1:], self.laws[()]), dtype=torch.float64)


def appendix(verify, rule):
    """The paper's example: p = (0.7, 0.3), q = (0.5, 0.5); after token 0 the confidence of draft 2 is 0.9, after 1 it is 0."""
    law, _ = round_law(verify, Given({(): [0.7, 0.3]}), Given({(): [0.5, 0.5]}), rule, length=1)
    return law[(0,)]


def globally_best(tokens, laws, after):
    """Verifies both drafts where two together pay (after token 0), and none where one alone doesn't."""
    if after and len(tokens) == 1:
        return True if tokens == [0] else "drop"
    return len(tokens) < 2 or after


def first_that_does_not_pay(tokens, laws, after):
    return False


def test_searching_all_lengths_by_confidences_of_later_drafts_is_biased_as_in_the_paper():
    for verify in (chain.verify_ratio, chain.verify_block):
        assert abs(appendix(verify, globally_best) - 0.85) < 0.02
        assert abs(appendix(verify, first_that_does_not_pay) - 0.7) < EXACT
    assert abs(appendix(chain.verify_ratio, globally_best) - 0.85) < EXACT
    assert abs(appendix(chain.verify_match, globally_best) - 0.7) < EXACT


# ---------------------------------------------------------------------- several rows


class Recorded:
    """`Noise` by tables, to give a row the same noise in a batch and alone."""

    def __init__(self, seed, rows):
        generator = torch.Generator().manual_seed(seed)
        self.rows = rows
        self.coins = torch.rand(len(rows), 8, generator=generator, dtype=torch.float64)
        self.gumbels = -torch.log(-torch.log(torch.rand(len(rows), 8, 3, generator=generator, dtype=torch.float64)))

    def sample(self, scores, rows, i, domain="target"):
        return (scores + self.gumbels[[self.rows[r] for r in rows], i]).argmax(-1)

    def sample_mass(self, mass, rows, i, domain):
        return (mass.log() + self.gumbels[[self.rows[r] for r in rows], i]).argmax(-1)

    def coin(self, rows, i, device):
        return self.coins[[self.rows[r] for r in rows], i]


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_rows_of_a_batch_are_judged_as_if_alone(verifier, one_hot):
    generator = torch.Generator().manual_seed(1)
    B, L, V = 80, 3, 3
    p = (4 * torch.rand(B, L + 1, V, generator=generator, dtype=torch.float64)).softmax(-1)
    q = torch.rand(B, L, V, generator=generator, dtype=torch.float64).softmax(-1)
    tokens = p[:, :L].argmax(-1)
    lengths = torch.randint(0, L + 1, (B,), generator=generator).tolist()

    def run(rows):
        noise = Recorded(2, list(range(B)))
        noise.rows = rows
        scores_at = lambda i, active: p[[rows[r] for r in active], i].log()  # noqa: E731
        drafts, of = (tokens[rows], None if one_hot else q[rows]), [lengths[r] for r in rows]
        if verifier == "match":
            return chain.verify_match(scores_at, drafts[0], of, noise)
        return VERIFIERS[verifier](scores_at, *drafts, of, noise)

    together = run(list(range(B)))
    for r in range(B):
        alone = run([r])
        assert (alone.accepted[0], alone.next_token[0]) == (together.accepted[r], together.next_token[r])
    assert set(together.accepted.tolist()) == set(range(L + 1))
