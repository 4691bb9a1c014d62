"""A confidence for drafters without a confidence head: a logistic estimate from what the drafter computed anyway.

Whether draft k is verified may depend on its whole distribution q_k and on the drafts before it, never on the drawn
x_k: with `ratio` or `block` verification a rule that looks at q_k(x_k) and then withdraws x_k changes the output's
distribution.
"""

import torch
from torch import Tensor

# Every entry is known before x_k is drawn.
_FEATURES = {
    "max_q": "largest probability of q_k",
    "sum_q2": "sum of squares of q_k, the chance that two draws agree",
    "entropy": "entropy of q_k in nats",
    "last_log_q": "log q of the draft before k (0 for the first)",
    "sum_log_q": "summed log q of all drafts before k, at least -20",
}


def legal_features() -> dict[str, str]:
    """The features an estimate may use (besides the position k), by name, with what each looks at."""
    return dict(_FEATURES)


def step_features(log_q: Tensor, previous: Tensor) -> Tensor:
    """Features of one draft position, available before its token is drawn.

    Args:
        log_q: `[B, V]` log-probabilities of the position at temperature 1 (float32, unwarped, corrected logits).
        previous: `[B, k-1]` log-probabilities the drafter gave to the tokens it drew before, `[B, 0]` at the first
            position.

    Returns:
        `[B, 5]` in the order of `legal_features()`.
    """
    q = log_q.exp()
    entropy = -(q * log_q.clamp(min=-1e4)).sum(-1)  # a masked token has log q = -inf and adds nothing
    last = previous[:, -1].clamp(min=-20.0) if previous.shape[1] else torch.zeros_like(entropy)
    return torch.stack([q.amax(-1), q.square().sum(-1), entropy, last, previous.sum(-1).clamp(min=-20.0)], -1)


def draft_features(log_q: Tensor, tokens: Tensor) -> Tensor:
    """`step_features` of a whole block: log_q `[B, K, V]`, tokens `[B, K]` (ids of that vocabulary) -> `[B, K, 5]`."""
    chosen = log_q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.stack([step_features(log_q[:, k], chosen[:, :k]) for k in range(tokens.shape[1])], 1)


def fit_survival(
    features: Tensor,
    labels: Tensor,
    valid: Tensor | None = None,
    names: tuple[str, ...] = tuple(_FEATURES),
    ridge: float = 1.0,
) -> dict:
    """Logistic regression of "draft k is accepted, given that the drafts before it were", deterministic, in float64.

    Args:
        features: `[J, K, 5]` from `draft_features`.
        labels: `[J, K]`, 1 iff drafts 1..k were all accepted.
        valid: `[J, K]` bool, default all.
        names: features to use, among `legal_features()`.
        ridge: penalty on standardised weights and on the positions' offsets from the common intercept.

    Returns:
        A JSON-able model for `predict_confidence`: `{"features": names, "weight": [...], "bias": [K numbers]}`.
    """
    if illegal := [name for name in names if name not in _FEATURES]:
        raise ValueError(
            f"features {illegal} are not known before the token they judge is drawn, and an estimate that looks at "
            f"the token biases the output: use some of {list(_FEATURES)}."
        )
    labels = labels.cpu().double()
    reached = torch.cat([torch.ones_like(labels[:, :1]), labels[:, :-1]], 1).bool()
    keep = reached if valid is None else reached & valid.cpu().bool()
    x, y = features.cpu().double()[..., [list(_FEATURES).index(name) for name in names]][keep], labels[keep]
    position = torch.arange(labels.shape[1]).expand_as(labels)[keep]
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    x = (x - mean) / scale

    weight = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    offset = torch.zeros(labels.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias, offset], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        logits = x @ weight + bias + offset[position]
        total = torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        # The tiny pull on the intercept keeps the optimum finite when every label is the same.
        total = (
            total + ridge / 2 * (weight.square().sum() + offset.square().sum()) + 1e-3 * bias.square().sum()
        ) / max(1, len(y))
        total.backward()
        return total

    optimizer.step(loss)
    weight = weight.detach() / scale
    return {"features": list(names), "weight": weight.tolist(), "bias": (bias + offset - mean @ weight).tolist()}


def survival_logits(model: dict, features: Tensor, start: int = 0) -> Tensor:
    """Logits `[B, K]` (float32) of acceptance given that the earlier drafts were accepted.

    Args:
        model: what `fit_survival` returned.
        features: `[B, K, 5]`, or one column of it.
        start: 0-based position of the first column. Positions beyond the fitted ones use the last one's intercept.
    """
    names = list(_FEATURES)
    columns = features.float()[..., [names.index(name) for name in model["features"]]]
    bias = torch.tensor(model["bias"], device=features.device)
    position = (start + torch.arange(features.shape[1], device=features.device)).clamp(max=len(bias) - 1)
    return columns @ torch.tensor(model["weight"], device=features.device) + bias[position]


def predict_confidence(model: dict, features: Tensor, start: int = 0) -> Tensor:
    """`survival_logits` as probabilities: the `confidence` the prefix rules take."""
    return survival_logits(model, features, start).sigmoid()


def survival_estimate(drafter):
    """`estimate(log_probs, before, k)`, logits, of a calibrated drafter without a confidence head
    (`config.survival_model`), or None."""
    model = getattr(drafter.config, "survival_model", None)
    if model is None or getattr(drafter.config, "confidence_head", False):
        return None
    return lambda log_probs, before, k: survival_logits(model, step_features(log_probs, before)[:, None], k)[:, 0]
