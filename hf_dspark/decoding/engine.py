"""Many prompts through one batch: a row that ends makes room for the next prompt at once."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from transformers import GenerationConfig, GenerationMixin

from hf_dspark.modeling import SpeculationConfig

from .batch import Commit, Request
from .cache import TargetCache, drafter_key
from .costs import policy_for
from .generate import prepared
from .hook import MARK, attach
from .loop import Cancelled, DecodeLoop
from .outputs import Seconds, SpeculationStats
from .target import FeatureTap, Target


@dataclass(kw_only=True)
class EngineRequest:
    """One prompt and how to answer it.

    Args:
        input_ids (`list[int]` or `torch.Tensor`): [n] the prompt's token ids, without pads.
        key (`Hashable`, *optional*): your name for it. By default its number in the order of arrival.
        generation_config ([`GenerationConfig`], *optional*): of this request alone; by default the target's.
        options (`dict`): further arguments of `generate` for it, such as `max_new_tokens`, `logits_processor`,
            `stopping_criteria`, `stop_strings` with `tokenizer`, `streamer`.
        seed (`int`, *optional*): key of its noise. With `verification="match"` it gives the very tokens of its own `generate`
            call with that seed. By default one is drawn.
    """

    input_ids: list[int] | torch.Tensor
    key: Hashable = None
    generation_config: GenerationConfig | None = None
    options: dict = field(default_factory=dict)
    seed: int | None = None


@dataclass(kw_only=True)
class EngineResult:
    """What became of a request.

    Args:
        key (`Hashable`): of the request. tokens (`list[int]`): the new tokens, the stop token included.
        reason (`str`): "stop", "length", "criteria", "cancelled" or "error".
        error (`Exception`, *optional*): what this request's own code or options raised.
        speculation ([`SpeculationStats`]): its rounds; seconds belong to the engine and are 0 here.
    """

    key: Hashable
    tokens: list[int]
    reason: str
    error: Exception | None = None
    speculation: SpeculationStats


class SpeculativeEngine:
    """Answers many prompts with at most `max_rows` at work at a time.

    Greedy results are those of `target.generate(..., assistant_model=drafter)` on each prompt alone, whatever the company, the
    order or the row; with `verification="match"` and a seed sampled ones are too.

    Args:
        target (`PreTrainedModel`): the model to answer with.
        drafter: one of this library's drafters, or [`CopyDrafter`].
        speculation ([`SpeculationConfig`], *optional*): knobs of all requests; by default the drafter's.
        max_rows (`int`, defaults to 8): rows at work.
        max_tokens (`int`, *optional*): bound on the tokens, prompts and budgets, of all rows at work, which bounds the cache. A
            request waits until it fits; one that never can is refused.
        prefill_chunk (`int`, defaults to 512): most prompt tokens of a row per step, so that a long prompt holds nobody up.
        shared_prefix (`int`, *optional*, defaults to 32): prompts that share so many first tokens with a row at work take over
            its cache instead of reading them again. `None` never shares.
        observer (*optional*): shown every round.

    Raises:
        ValueError: numbers below 1; what `generate` refuses of target, drafter and knobs, when the first request comes.
    """

    def __init__(
        self,
        target,
        drafter,
        speculation: SpeculationConfig | None = None,
        max_rows: int = 8,
        max_tokens: int | None = None,
        prefill_chunk: int = 512,
        shared_prefix: int | None = 32,
        observer=None,
    ):
        for name, value in (("max_rows", max_rows), ("max_tokens", max_tokens), ("prefill_chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} leaves no room for any request: set at least 1.")
        if not getattr(GenerationMixin._assisted_decoding, MARK, False):
            attach(target)
        self.target, self.drafter = target, drafter.bind(target)
        self.speculation = replace(drafter.speculation if speculation is None else speculation)
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.prefill_chunk, self.shared_prefix, self.observer = prefill_chunk, shared_prefix, observer
        self.prefix: tuple[list[int], TargetCache] | None = None
        self._rows: dict[Hashable, _Work] = {}
        self._cancelled: set = set()
        self._loop: DecodeLoop | None = None

    @property
    def seconds(self) -> Seconds:
        """Where the time of the latest `stream` went."""
        return Seconds() if self._loop is None else self._loop.seconds

    def generate(self, requests: Iterable) -> list[EngineResult]:
        """Answer all `requests` ([`EngineRequest`] or token ids); the results in their order."""
        keyed = list(self._keyed(requests))
        results = {result.key: result for result in self.stream(keyed)}
        return [results[request.key] for request in keyed]

    def stream(self, requests: Iterable) -> Iterator[EngineResult]:
        """Answer `requests`, an iterable that is read as rows become free; yields each result when it ends."""
        waiting, ready = iter(self._keyed(requests)), deque()
        self._loop = loop = self._new_loop()
        self._rows.clear()
        while True:
            yield from self._fill(loop, waiting, ready)
            if not loop.active:
                return
            with loop.target.tap:
                commits = loop.step()
            for commit in commits:
                yield from self._take(commit)
            yield from self._drop_cancelled(loop)

    def cancel(self, key: Hashable) -> None:
        """End the request of this key; its result comes with what it has. Callable from another thread."""
        self._cancelled.add(key)

    # ------------------------------------------------------------------ the rows at work

    def _keyed(self, requests) -> Iterator[EngineRequest]:
        for number, request in enumerate(requests):
            if not isinstance(request, EngineRequest):
                request = EngineRequest(input_ids=request)
            yield request if request.key is not None else replace(request, key=number)

    def _new_loop(self) -> DecodeLoop:
        model = Target(self.target, FeatureTap(self.target, self.drafter.config.target_layer_ids))
        knobs, policy = self.speculation, None
        if knobs.measures:
            policy = policy_for(self.drafter, self.target, knobs)
        return DecodeLoop(model, self.drafter, knobs, policy, self.observer, self.prefill_chunk)

    def _fill(self, loop, waiting, ready: deque) -> Iterator[EngineResult]:
        """Let waiting requests in while there is room; yields those that can't be answered."""
        while loop.active < self.max_rows:
            while not ready:
                request = next(waiting, None)
                if request is None:
                    return
                work = self._prepare(request)
                if isinstance(work, EngineResult):
                    yield work
                else:
                    ready.append(work)
            if not self._fits(ready[0]):
                return
            work = ready.popleft()
            self._rows[work.request.key] = work
            with loop.target.tap:
                loop.admit([work.request], self._shared(loop, work.request))

    def _fits(self, work: "_Work") -> bool:
        at_work = sum(w.size for w in self._rows.values())
        return self.max_tokens is None or at_work + work.size <= self.max_tokens

    def _prepare(self, request: EngineRequest) -> "_Work | EngineResult":
        """The request as `generate` would run it, or the result that says why it can't."""
        try:
            ids = torch.as_tensor(request.input_ids, dtype=torch.long, device=self.target.device).reshape(1, -1)
            options = dict(request.options)
            if request.generation_config is not None:
                options["generation_config"] = request.generation_config
            options.setdefault("attention_mask", torch.ones_like(ids))
            knobs = replace(self.speculation, seed=request.seed)
            (one,) = prepared(self.target, input_ids=ids, assistant_model=self.drafter, speculation=knobs, **options)
            one.key, one.stream = request.key, 0
            work = _Work(one, options.get("streamer"))
            if self.max_tokens is not None and work.size > self.max_tokens:
                raise ValueError(
                    f"A prompt of {len(one.prompt)} tokens with a budget of {one.budget} needs {work.size} tokens of cache, and "
                    f"max_tokens={self.max_tokens}: set a smaller max_new_tokens, or a larger max_tokens for the engine."
                )
            return work
        except Exception as error:
            nothing = SpeculationStats.empty(1)
            return EngineResult(key=request.key, tokens=[], reason="error", error=error, speculation=nothing)

    def _take(self, commit: Commit) -> Iterator[EngineResult]:
        work = self._rows[commit.key]
        work.tokens += commit.tokens
        error = commit.error or work.stream(commit.tokens, ended=commit.reason is not None)
        if commit.reason is not None or error is not None:
            if commit.reason is None:
                self._loop.cancel(commit.key)
            yield self._result(commit.key, commit.reason or "error", error)

    def _result(self, key, reason: str, error=None) -> EngineResult:
        work = self._rows.pop(key)
        if isinstance(error, Cancelled):
            reason, error = "cancelled", None
        stats = SpeculationStats.of([work.request.outputs], Seconds(), [])
        return EngineResult(key=key, tokens=work.tokens, reason=reason, error=error, speculation=stats)

    def _drop_cancelled(self, loop) -> Iterator[EngineResult]:
        for key in [k for k in self._cancelled if k in self._rows]:
            self._cancelled.discard(key)
            at_work = any(row.request.key == key for row in loop.batch.rows)
            if loop.cancel(key) and at_work:
                yield self._result(key, "cancelled")

    # ------------------------------------------------------------------ prompts that begin alike

    def _shared(self, loop: DecodeLoop, request: Request) -> TargetCache | None:
        """A cache of the first tokens of the prompt, copied from a row at work or kept from one; None where none begins alike."""
        if self.shared_prefix is None:
            return None
        kept = 0 if self.prefix is None else _common(self.prefix[0], request.prompt)
        live = [(_common(row.request.prompt, request.prompt), i) for i, row in enumerate(loop.batch.rows)]
        longest, i = max(live, default=(0, 0))
        if longest > kept and longest >= self.shared_prefix:
            batch = loop.batch
            cache = batch.cache.select([i])
            cache.draft, cache.drafter = batch.proposer.cache.select(torch.tensor([i])), drafter_key(self.drafter)
            self.prefix = list(batch.rows[i].request.prompt[:longest]), _first(cache, longest)
            kept = longest
        if kept < self.shared_prefix:
            return None
        return _first(self.prefix[1].select([0]), kept)


@dataclass
class _Work:
    """A request at work, and what it has so far."""

    request: Request
    streamer: object = None
    tokens: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.request.prompt) + self.request.budget

    def stream(self, tokens: list[int], ended: bool) -> Exception | None:
        """Show tokens to the streamer; what it raised."""
        try:
            if self.streamer is not None and tokens:
                self.streamer.put(torch.tensor([tokens]))
            if self.streamer is not None and ended:
                self.streamer.end()
        except Exception as error:
            return error


def _common(one: list[int], other: list[int]) -> int:
    """First tokens that two prompts share, at least one token of the second left out: it must be read for its logits."""
    count = 0
    for a, b in zip(one, other[:-1]):
        if a != b:
            break
        count += 1
    return count


def _first(cache: TargetCache, count: int) -> TargetCache:
    """`cache`, cut to its rows' first `count` tokens."""
    cache.lengths = torch.full_like(cache.lengths, count)
    if cache.draft is not None:
        if int((cache.draft.first + cache.draft.lengths).min()) < count:
            cache.draft = None
        else:
            cache.draft.lengths = count - cache.draft.first
    return cache
