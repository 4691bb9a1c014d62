"""Is what a target says of a token a function of that token's own prefix and position? A few tiny forwards tell.

Drafts are verified several at once. That is exact only where a token's logits don't depend on what else is in the
forward. Encoders break this (a token sees those behind it), and so does int8 with one activation scale for all tokens
of a call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from weakref import WeakKeyDictionary

import torch

from .target import Target, execution_device

SAMPLES = 3  # a router's near tie may turn once; what depends on other tokens shows in every sample
LARGEST_LOGIT = 1e4  # beyond this lie masks, such as those of padded vocabularies
_lock = RLock()
_checked: WeakKeyDictionary = WeakKeyDictionary()


@dataclass(frozen=True)
class SelfCheck:
    """Differences of the target's logits, as parts of the largest logit, in the sample where they were smallest.

    Args:
        together (`float`): tokens fed in one forward, against the same tokens one by one on the same cache.
        ahead (`float`): a forward, against the same forward with another last token, at the tokens before it.
        most_together (`float`): rounding of the target's dtype allows so much of `together`.
        most_ahead (`float`): and so much of `ahead`. Equal shapes take equal kernels, so it is less.
    """

    together: float
    ahead: float
    most_together: float
    most_ahead: float

    @property
    def passed(self) -> bool:
        return self.together <= self.most_together and self.ahead <= self.most_ahead

    def __str__(self) -> str:
        if self.ahead > self.most_ahead:
            return f"with another token behind it, a token's logits change by {self.ahead:.1%} of the largest"
        found = f"fed together and one by one, the same tokens' logits differ by {self.together:.1%} of the largest"
        return f"{found} (rounding explains {self.most_together:.1%})"


def check_forward(model, trust: bool = False) -> None:
    """Refuse a target whose forward fails the self-check.

    Args:
        model: the target. trust (`bool`, defaults to `False`): don't check (`SpeculationConfig(trust_target=True)`).

    Raises:
        ValueError: with what was measured, and the ways out.
    """
    if trust:
        return
    try:
        found = self_check(model)
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} can't run on a cache whose rows have their own lengths ({type(error).__name__}: {error}), "
            "as it reads the cache's tensors in a way of its own: generate without assistant_model."
        ) from error
    if not found.passed:
        raise ValueError(
            f"{type(model).__name__} fails the self-check: {found}. Drafts are verified several in one forward, which "
            "then isn't what plain decoding computes (bidirectional attention and int8 with one activation scale per "
            "call are such cases): load the model as a causal decoder (is_decoder=True) or without that quantisation, "
            "generate without assistant_model, or accept another text with SpeculationConfig(trust_target=True)."
        )


def self_check(model) -> SelfCheck:
    """Measure a target once: its result is kept as long as the model lives and is built of the same modules.

    Costs six forwards of one to three tokens. Leaves no trace: random states, training mode and the frequencies of
    dynamic rotary embeddings are as before; compiled forwards run uncompiled, so nothing is compiled for these shapes.
    """
    with _lock:
        built = _structure(model)
        kept, found = _checked.get(model, (None, None))
        if kept != built:
            found = _measure(model)
            _checked[model] = built, found
    return found


def _structure(model) -> tuple:
    """What decides how a forward computes, without its weights' values."""
    modules = hash(tuple((type(m), id(m.__dict__.get("forward"))) for m in model.modules()))
    config = model.config.get_text_config()
    attention = getattr(model.config, "_attn_implementation", None), getattr(config, "is_decoder", None)
    device = execution_device(model)
    return modules, model.dtype, device, attention, torch.is_autocast_enabled(device.type)


def _measure(model) -> SelfCheck:
    worst = _epsilon(model)
    most_together, most_ahead = min(0.5, 2.0**13 * worst), min(0.25, 2.0**10 * worst)
    tokens, results = _tokens(model), []
    with _undisturbed(model):
        for i in range(SAMPLES):
            results.append(SelfCheck(*_differences(model, tokens[5 * i : 5 * i + 5]), most_together, most_ahead))
            if results[-1].passed:
                return results[-1]
    return min(results, key=lambda r: max(r.together / r.most_together, r.ahead / r.most_ahead))


def _epsilon(model) -> float:
    """Rounding of the coarsest number format at work; float64 models compute some parts in float32."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1} | {
        torch.float32
    }
    kind = execution_device(model).type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    if torch.get_float32_matmul_precision() != "highest":
        dtypes.add(torch.float16)  # TF32 has as many digits
    return max(torch.finfo(d).eps for d in dtypes)


def _tokens(model) -> list[int]:
    """Ids for all samples, none of them special: these may stand for pads or images."""
    configs = (model.config, model.config.get_text_config())
    special = {v for c in configs for k, v in vars(c).items() if "token" in k and isinstance(v, int)}
    size = min(configs[1].vocab_size, model.get_input_embeddings().weight.shape[0])
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    usable = [i for i in order if i not in special] or order
    return [usable[i % len(usable)] for i in range(5 * SAMPLES)]


def _differences(model, tokens: list[int]) -> tuple[float, float]:
    """`together` and `ahead` of one sample: a prompt of one token, three tokens behind it, and another one for the
    last."""
    first, *several, other = tokens
    target = Target(model, None)
    cache = target.new_cache(1)

    def logits(ids: list[int]) -> torch.Tensor:
        return target.forward(torch.tensor([ids]), cache, cache.lengths + len(ids)).logits[0].float()

    logits([first])
    cache.advance(1)
    single = []
    for token in several:
        single.append(logits([token]))
        cache.advance(1)
    cache.lengths = torch.ones_like(cache.lengths)  # the same slots are written again
    whole = logits(several)
    changed = logits([*several[:-1], other])
    return _distance(whole, torch.cat(single)), _distance(whole[:-1], changed[:-1])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    real = (a.abs() < LARGEST_LOGIT) & (b.abs() < LARGEST_LOGIT)
    if not real.any():
        return 0.0
    largest = torch.maximum(a.abs(), b.abs())[real].max().item()
    return ((a - b).abs()[real].max().item() / largest) if largest else 0.0


@contextmanager
def _undisturbed(model) -> Iterator[None]:
    """Evaluation mode and uncompiled forwards inside; afterwards everything is as it was."""
    training = [m for m in model.modules() if m.training]
    # Dynamic rotary embeddings remember the longest text; short tokens would reset them.
    rotary = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules() if "max_seq_len_cached" in vars(m)]
    device = execution_device(model)
    devices = [device] if device.type == "cuda" else []
    try:
        for m in training:
            m.training = False
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for m in training:
            m.training = True
        for m, attributes, buffers in rotary:
            vars(m).update(attributes)
            m._buffers.update(buffers)
