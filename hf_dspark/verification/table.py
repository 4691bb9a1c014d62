"""The verifiers by the names of `SpeculationConfig.verification`."""

from collections.abc import Callable
from typing import NamedTuple

from . import chain, tree


class Verifier(NamedTuple):
    """Two forms of one verdict, and what the drafts must be drawn with.

    Args:
        lazy: `lazy(scores_at, tokens, q, lengths, noise)`, for processors that look at the prefix; lengths a list.
        dense: `dense(scores, tokens, q, lengths, noise)`, which never waits for the device; lengths a tensor.
        shares_noise: whether drafts are drawn with the target's noise, which makes them deterministic (`q` is None).
    """

    lazy: Callable[..., chain.Verdict]
    dense: Callable[..., chain.Verdict]
    shares_noise: bool


VERIFIERS = {
    "match": Verifier(chain.verify_match, chain.match_all, shares_noise=True),
    "ratio": Verifier(chain.verify_ratio, chain.ratio_all, shares_noise=False),
    "block": Verifier(chain.verify_block, chain.block_all, shares_noise=False),
}

# The same for trees, whose forms take the parents behind the tokens: "ratio" for children drawn from laws.
TREE_VERIFIERS = {
    "match": Verifier(tree.verify_match, tree.match_all, shares_noise=True),
    "ratio": Verifier(tree.verify_ratio, tree.ratio_all, shares_noise=False),
}
