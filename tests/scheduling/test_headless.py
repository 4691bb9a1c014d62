import json

import pytest
import torch
from oracles_scheduling import is_lossless, random_row

from hf_dspark.scheduling import (
    auroc,
    confidence_prefix,
    draft_features,
    fit_survival,
    legal_features,
    predict_confidence,
    step_features,
    survival_logits,
)


@pytest.fixture(scope="module")
def drafts():
    """Rounds of a drafter whose target is a flatter version of it: log q [J, K, V], tokens, prefix labels by ratio
    coins."""
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.rand(3000, 4, 1, generator=generator) * 4
    log_q = (sharpness * torch.randn(3000, 4, 12, generator=generator)).log_softmax(-1)
    noise = torch.randn(log_q.shape, generator=generator)
    log_p = (0.4 * log_q + 0.3 * noise).log_softmax(-1)
    tokens = torch.multinomial(log_q.exp().flatten(0, 1), 1, generator=generator).view(3000, 4)
    accept = (log_p - log_q).exp().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    coins = torch.rand(accept.shape, generator=generator) < accept
    return log_q, tokens, coins.long().cumprod(-1), log_p


def test_features_have_their_definitions():
    log_q = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    features = step_features(log_q, torch.tensor([[-1.0, -0.5]]))[0].tolist()
    assert features == pytest.approx([0.5, 0.375, 1.5 * 0.6931472, -0.5, -1.5])
    assert step_features(log_q, torch.empty(1, 0))[0, 3:].tolist() == [0.0, 0.0]
    assert list(legal_features()) == ["max_q", "sum_q2", "entropy", "last_log_q", "sum_log_q"]


def test_no_feature_knows_the_token_it_judges(drafts):
    log_q, tokens = drafts[0][:50], drafts[1][:50]
    features = draft_features(log_q, tokens)
    for k in range(4):
        other, other_q = tokens.clone(), log_q.clone()
        other[:, k:] = (other[:, k:] + 1) % 12
        other_q[:, k + 1 :] = other_q[:, k + 1 :].flip(-1)
        assert torch.equal(draft_features(other_q, other)[:, : k + 1], features[:, : k + 1])


def test_the_estimate_is_calibrated_and_tells_drafts_apart(drafts):
    log_q, tokens, labels, log_p = drafts
    features = draft_features(log_q, tokens)
    model = fit_survival(features[:2000], labels[:2000])
    estimate = predict_confidence(model, features[2000:])
    truth = torch.minimum(log_p, log_q).exp().sum(-1)[2000:]  # chance of acceptance before the token is drawn
    assert (estimate - truth).mean().abs() < 0.02
    assert (estimate - truth).abs().mean() < 0.7 * (truth - truth.mean()).abs().mean()
    assert auroc(estimate[:, 0], labels[2000:, 0]) > 0.6


def test_soft_labels_may_be_fitted_and_unreached_positions_are_ignored(drafts):
    log_q, tokens, labels, _ = drafts
    features = draft_features(log_q, tokens)
    broken, garbage = features.clone(), labels[:, :-1].cumprod(-1) == 0
    broken[:, 1:][garbage] = 99.0
    assert fit_survival(broken, labels) == fit_survival(features, labels)
    valid = torch.ones_like(labels, dtype=torch.bool)
    valid[:, 3] = False
    changed = labels.clone()
    changed[:, 3] = 1
    assert fit_survival(features, labels, valid) == fit_survival(features, changed, valid)


def test_the_fit_is_the_optimum_and_repeats(drafts):
    """The gradient of the penalised likelihood vanishes in the intercept: predictions and labels have one mean."""
    log_q, tokens, labels, _ = drafts
    features = draft_features(log_q, tokens)
    model = fit_survival(features, labels)
    assert model == fit_survival(features, labels)
    reached = torch.cat([torch.ones(len(labels), 1), labels[:, :-1]], 1).bool()
    gap = (predict_confidence(model, features) - labels)[reached]
    assert abs(gap.mean().item()) < 1e-4


def test_a_model_survives_json_and_reads_one_column_at_a_time(drafts):
    log_q, tokens, labels, _ = drafts
    features = draft_features(log_q, tokens)
    model = json.loads(json.dumps(fit_survival(features, labels, names=("entropy", "last_log_q"))))
    whole = survival_logits(model, features)
    columns = [survival_logits(model, features[:, k : k + 1], start=k) for k in range(4)]
    assert torch.allclose(torch.cat(columns, 1), whole)
    assert torch.allclose(
        survival_logits(model, features[:, :1], start=9), survival_logits(model, features[:, :1], start=3)
    )


def test_one_class_gives_a_finite_model(drafts):
    features = draft_features(drafts[0][:100], drafts[1][:100])
    model = fit_survival(features, torch.ones(100, 4))
    assert (predict_confidence(model, features) > 0.9).all() and max(model["bias"]) < 15


def test_a_feature_of_the_token_itself_is_refused(drafts):
    with pytest.raises(ValueError, match="biases the output"):
        fit_survival(draft_features(drafts[0], drafts[1]), drafts[2], names=("max_q", "log_q"))


ROWS = [random_row(r, 2, 2) for r in (2, 3)]
MODEL = {"features": ["max_q", "last_log_q"], "weight": [0.5, 4.0], "bias": [2.0, 2.0]}


def estimate_rule(peek):
    """Verify up to the first low estimate; with `peek` the estimate of draft k reads the log q of x_k where it should
    read x_k-1's."""

    def rule(drafts, _):
        lengths = []
        for row, draft in zip(ROWS, drafts, strict=True):
            q = torch.tensor([[[float(x) for x in row.q(draft[:k])] for k in range(2)]])
            features = draft_features(q.log(), torch.tensor([draft]))
            if peek:
                features[..., 3] = q.log().gather(-1, torch.tensor([draft]).unsqueeze(-1)).squeeze(-1)
            lengths += confidence_prefix(predict_confidence(MODEL, features), 0.4).tolist()
        seen.add(tuple(lengths))
        return lengths

    seen = rule.seen = set()
    return rule


def test_the_estimate_is_lossless_and_its_variant_that_looks_at_the_token_is_not():
    honest, peeking = estimate_rule(peek=False), estimate_rule(peek=True)
    assert is_lossless(ROWS, honest) and len(honest.seen) > 1
    assert not is_lossless(ROWS, peeking)
    assert is_lossless(ROWS, peeking, match=True)
