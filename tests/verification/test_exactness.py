"""Every verifier with every kind of length rule, by enumeration of all outcomes: which pairs give exactly the target's
law."""

import pytest
import torch
from oracles import ToyModel, distance, round_law, text_law
from traffic import counted

from hf_dspark.verification import chain, table
from hf_dspark.verification.noise import Noise

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
    """The paper's example: p = (0.7, 0.3), q = (0.5, 0.5); after token 0 the confidence of draft 2 is 0.9, after 1 it
    is 0."""
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
        return VERIFIERS[verifier](scores_at, *drafts, of, noise)

    together = run(list(range(B)))
    for r in range(B):
        alone = run([r])
        assert (alone.accepted[0], alone.next_token[0]) == (together.accepted[r], together.next_token[r])
    assert set(together.accepted.tolist()) == set(range(L + 1))


# ---------------------------------------------------------------------- dense forms


def world(seed, rows=300, L=4, V=7, one_hot=False, dtype=torch.float32):
    """Random scores [A, L+1, V], drafts, q and ragged lengths: some tokens are impossible, some drafts have no
    chance."""
    g = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(rows, L + 1, V, generator=g, dtype=dtype)
    scores[torch.rand(scores.shape, generator=g) < 0.2] = -torch.inf
    scores[..., 0] = scores[..., 0].clamp_min(-1.0)
    q = (scores[:, :L] + torch.randn(rows, L, V, generator=g)).softmax(-1)
    q[torch.rand(rows, generator=g) < 0.3] = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=dtype)
    q[torch.rand(rows, generator=g) < 0.3] = scores[0, 0].softmax(-1)
    tokens = torch.multinomial(q.reshape(-1, V), 1, generator=g).view(rows, L)
    lengths = torch.randint(0, L + 1, (rows,), generator=g)
    if one_hot:
        q, scores = None, 3 * scores
        tokens = torch.where(torch.rand(rows, L, generator=g) < 0.8, scores[:, :L].argmax(-1), tokens)
    return scores, tokens, q, lengths


def both(name, scores, tokens, q, lengths, noise):
    """The verdict of the dense form, and of the lazy form, which may see a position only after all before it are
    accepted."""
    asked = {r: 0 for r in range(len(lengths))}

    def scores_at(i, rows):
        for r in rows:
            assert asked[r] == i <= lengths[r]
            asked[r] += 1
        return scores[rows, i]

    verifier = table.VERIFIERS[name]
    lazy = verifier.lazy(scores_at, tokens, q, lengths.tolist(), noise)
    assert name == "block" or all(asked[r] <= a + 1 for r, a in enumerate(lazy.accepted.tolist()))
    return verifier.dense(scores, tokens, q, lengths, noise), lazy


def same(dense, lazy):
    assert dense.accepted.equal(lazy.accepted)
    if lazy.possible is None:
        assert dense.possible is None and dense.next_token.equal(lazy.next_token)
    else:
        assert dense.possible.equal(lazy.possible)
        assert dense.next_token[dense.possible].equal(lazy.next_token[lazy.possible])


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("name", [*table.VERIFIERS, "greedy"])
def test_dense_verdicts_equal_lazy_ones(name, one_hot):
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
        scores, tokens, q, lengths = world(seed, one_hot=one_hot, dtype=dtype)
        noise = None if name == "greedy" else Noise(seed, list(range(300)), lengths * 5)
        if name in ("greedy", "match"):
            every = list(range(300))
            drawn = [
                scores[:, i].argmax(-1) if noise is None else noise.sample(scores[:, i], every, i) for i in range(4)
            ]
            tokens = torch.where(torch.rand(300, 4) < 0.7, torch.stack(drawn, 1), tokens)
        dense, lazy = both("match" if name == "greedy" else name, scores, tokens, q, lengths, noise)
        same(dense, lazy)
        assert set(dense.accepted.tolist()) == set(range(5))
        assert (dense.accepted < lengths).sum() > 15


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("name", table.VERIFIERS)
def test_dense_verdicts_without_drafts_or_rows(name, rows):
    scores, tokens, q, lengths = world(1, rows=3)
    noise = Noise(1, list(range(rows)), [0] * rows)
    for L in (0, 2):
        parts = scores[:rows, : L + 1], tokens[:rows], q[:rows], lengths[:rows].clamp_max(L)
        same(*both(name, *parts, noise))


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan, torch.inf])
@pytest.mark.parametrize("name", table.VERIFIERS)
def test_a_row_is_impossible_where_its_accepted_text_leaves_nothing_to_draw(name, bad):
    scores, tokens, q, lengths = world(2)
    scores[torch.arange(300), torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(1))] = bad
    noise = Noise(1, list(range(300)), [3] * 300)
    dense, lazy = both(name, scores, tokens, q, lengths, noise)
    same(dense, lazy)
    able = scores.amax(-1).isfinite()[torch.arange(300), dense.accepted]
    assert dense.possible.equal(able) and 50 < able.sum() < 250
    for verdict in (dense, lazy):
        with pytest.raises(ValueError, match="left no token possible") as error:
            verdict.read()
        assert error.value.rows == (~able).nonzero()[:, 0].tolist()
    clean, others = world(2)[0], able.nonzero()[:, 0]
    untouched = both(name, clean, tokens, q, lengths, noise)[0]
    same_place = others[(scores[others] == clean[others]).flatten(1).all(1)]
    assert dense.next_token[same_place].equal(untouched.next_token[same_place])


def test_everything_forbidden_is_no_error_for_greedy_verdicts():
    scores = torch.full((1, 1, 3), -torch.inf)
    for verdict in both("match", scores, torch.zeros(1, 0, dtype=torch.long), None, torch.tensor([0]), None):
        assert verdict.read() == ([0], [0])


@pytest.mark.parametrize("name", [*table.VERIFIERS, "greedy"])
def test_a_dense_verdict_takes_one_transfer(name):
    scores, tokens, q, lengths = world(3, rows=20)
    noise = None if name == "greedy" else Noise(3, list(range(20)), [0] * 20)
    with counted() as seen:
        verdict = table.VERIFIERS["match" if name == "greedy" else name].dense(scores, tokens, q, lengths, noise)
    assert not seen
    with counted() as seen:
        accepted, following, drafts, length = verdict.read(tokens, lengths)
    assert seen == ["tolist"]
    assert accepted == verdict.accepted.tolist() and following == verdict.next_token.tolist()
    assert drafts == tokens.tolist() and length == lengths.tolist()


@pytest.mark.parametrize("name", table.VERIFIERS)
def test_drafts_without_a_law_are_cut_by_it_alone(name):
    scores, tokens, q, lengths = world(4)
    clean = q.clone()
    bad = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(2))
    for r, i in enumerate(bad.tolist()):
        q[r, i : i + 1, r % 7] = [torch.nan, torch.inf][r % 2]
    usable = chain.usable(q)
    assert usable.equal(torch.arange(4) < bad[:, None])
    with counted() as seen:
        cut = lengths.minimum(chain.usable(q).sum(1))
    assert not seen and cut.equal(lengths.minimum(bad))
    noise = Noise(1, list(range(300)), [3] * 300)
    dense, lazy = both(name, scores, tokens, q, cut, noise)
    same(dense, lazy)
    same(dense, both(name, scores, tokens, clean, cut, noise)[0])
