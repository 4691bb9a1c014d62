"""Many prompts through one batch: a row that ends makes room for the next prompt at once."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from traceback import format_tb

import torch
from transformers import GenerationConfig, GenerationMixin

from hf_dspark.modeling import SpeculationConfig

from .batch import Commit, Request, Settings
from .cache import TargetCache, drafter_key
from .costs import policy_for
from .generate import prepared
from .hook import MARK, attach
from .loop import Cancelled, DecodeLoop
from .outputs import Seconds, SpeculationStats
from .target import FeatureTap, Target

# Arguments of `generate` that belong to the engine.
OURS = ("input_ids", "inputs", "inputs_embeds", "assistant_model", "speculation", "cache", "past_key_values")


@dataclass(kw_only=True)
class EngineRequest:
    """One prompt and how to answer it.

    Args:
        input_ids (`list[int]` or `torch.Tensor`): [n] or [1, n] the prompt's token ids, without pads.
        key (`Hashable`, *optional*): a name of your choice. By default its number in the order of arrival.
        generation_config ([`GenerationConfig`], *optional*): settings of this request alone; by default the target's.
        options (`dict`): further arguments of `generate` for it, such as `max_new_tokens`, `logits_processor`,
            `stopping_criteria`, `stop_strings` with `tokenizer`, `streamer`. A result holds tokens, so `output_scores`
            and similar options have no effect.
        seed (`int`, *optional*): key of its random numbers. With `verification="match"` the tokens are those of a
            `generate` call with that seed. By default the engine's seed plus the number of arrival, or a random one
            without a seed.

    Raises:
        ValueError: a key that can't be looked up.
    """

    input_ids: list[int] | torch.Tensor
    key: Hashable = None
    generation_config: GenerationConfig | None = None
    options: dict = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self):
        if not isinstance(self.key, Hashable):
            raise ValueError(
                f"key={self.key!r} can't be looked up, being unhashable: set a string, a number or a tuple."
            )


@dataclass(kw_only=True)
class EngineResult:
    """The answer to a request.

    Args:
        key (`Hashable`): key of the request.
        tokens (`list[int]`): the new tokens, the stop token included.
        reason (`str`): why it ended: "stop", "length", "criteria", "cancelled" or "error".
        error (`Exception`, *optional*): what this request's own code or options raised; where it was raised is in its
            notes.
        speculation ([`SpeculationStats`]): its rounds. Seconds are 0 here: those of the engine are in `engine.seconds`.
    """

    key: Hashable
    tokens: list[int]
    reason: str
    error: Exception | None = None
    speculation: SpeculationStats


class SpeculativeEngine:
    """Answers many prompts, at most `max_rows` at a time. A prompt that waits takes the row of the next answer that
    ends.

    Greedy results are those of `target.generate(..., assistant_model=drafter)` on each prompt alone, in any order and
    beside any other prompts. With `verification="match"` and a seed this holds for sampled results too. An error in a
    request's own processor, criterion, streamer or options ends that request alone.

    Args:
        target (`PreTrainedModel`): the model to answer with.
        drafter: one of this library's drafters, or [`CopyDrafter`].
        speculation ([`SpeculationConfig`], *optional*): knobs of all requests; by default the drafter's.
        max_rows (`int`, defaults to 8): most rows decoded at the same time.
        max_tokens (`int`, *optional*): bound on the cache: rows at work times the longest prompt and budget among them,
            plus a prefix that is kept. A request waits until it fits; one that never can is refused. Buffers grow in
            steps and may for a while hold twice as much.
        prefill_chunk (`int`, defaults to 512): most prompt tokens read per round, so that a long prompt doesn't delay
            other rows.
        shared_prefix (`int`, *optional*, defaults to 32): prompts that share at least this many first tokens with a row
            at work copy its cache instead of reading them again. `None` never shares.
        observer (`Callable`, *optional*): called with every round.

    Raises:
        ValueError: numbers below 1, or `engine="stock"`, which takes one row. What `generate` refuses of target,
            drafter and settings is every request's result instead.
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
        numbers = dict(
            max_rows=max_rows, max_tokens=max_tokens, prefill_chunk=prefill_chunk, shared_prefix=shared_prefix
        )
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} leaves no room for any request: set at least 1.")
        self.speculation = replace(drafter.speculation if speculation is None else speculation)
        if self.speculation.engine != "own":
            raise ValueError(
                f"engine={self.speculation.engine!r} was set, and transformers' loop has one row that nobody can join: "
                "set engine='own'."
            )
        if not getattr(GenerationMixin._assisted_decoding, MARK, False):
            attach(target)
        self.target, self.drafter = target, drafter.bind(target)
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.prefill_chunk, self.shared_prefix, self.observer = prefill_chunk, shared_prefix, observer
        self.seconds = Seconds()  # of the latest stream
        self._cancelled: set = set()
        self._running = False
        self._clear()

    @property
    def active(self) -> int:
        """Rows at work now."""
        return len(self._rows)

    def generate(self, requests: Iterable) -> list[EngineResult]:
        """Answer all requests.

        Args:
            requests (`Iterable`): each an [`EngineRequest`], or token ids.

        Returns:
            `list` of [`EngineResult`], in the order of the requests.

        Raises:
            ValueError: two requests share a key.
        """
        keyed = list(_keyed(requests))
        if len({r.key for r in keyed}) < len(keyed):
            raise ValueError(
                "Two requests share a key, and results are told apart by it: give every request one of its own."
            )
        results = {result.key: result for result in self.stream(keyed)}
        return [results[request.key] for request in keyed]

    def stream(self, requests: Iterable) -> Iterator[EngineResult]:
        """Answer requests as rows become free.

        Args:
            requests (`Iterable`): each an [`EngineRequest`], or token ids. Read when there is room: it may be a
                generator. It may give `None` where no request waits: the rows at work continue, and it is asked again
                after their next round. An error it raises is raised again when the rows at work have ended.

        Returns:
            Iterator of [`EngineResult`], in the order in which answers end.

        Raises:
            RuntimeError: another `stream` of this engine hasn't ended.
        """
        if self._running:
            raise RuntimeError(
                "This engine is in the middle of another stream, and its rows and bounds hold for one at a time: read "
                "that to its end, close() it, or make a second engine."
            )
        self._running = True
        self.seconds, self._loop, arrivals = Seconds(), self._new_loop(), _Arrivals(_keyed(requests))
        try:
            while True:
                yield from _without_frames(self._fill(arrivals))
                if not self._loop.active and arrivals.ended and not self._ready:
                    break
                yield from _without_frames(self._step())
        finally:
            self._running = False
            self._clear()
        if arrivals.error is not None:
            raise arrivals.error

    def cancel(self, key: Hashable) -> None:
        """End a request of the running stream. Its result holds the tokens so far. May be called from another thread.

        Args:
            key (`Hashable`): key of the request. One that hasn't been read yet ends when it is read.
        """
        if self._running:
            self._cancelled.add(key)

    # ------------------------------------------------------------------ the rows at work

    def _clear(self) -> None:
        self._loop: DecodeLoop | None = None
        self._ready: deque[_Work] = deque()
        self._rows: dict[Hashable, _Work] = {}
        self._prefix: tuple[list[int], TargetCache] | None = None
        self._plain: dict[frozenset, Settings] = {}
        self._cancelled.clear()

    def _new_loop(self) -> DecodeLoop:
        model = Target(self.target, FeatureTap(self.target, self.drafter.config.target_layer_ids))
        knobs, policy = self.speculation, None
        if knobs.measures:
            policy = policy_for(self.drafter, self.target, knobs)
        loop = DecodeLoop(model, self.drafter, knobs, policy, self.observer, self.prefill_chunk)
        loop.seconds = self.seconds
        return loop

    def _step(self) -> Iterator[EngineResult]:
        commits = []
        if self._loop.active:
            with self._loop.target.tap:
                commits = self._loop.step()
        for commit in commits:
            yield from self._take(commit)
        for key in list(self._cancelled):  # others may add to it meanwhile
            if key in self._rows:
                self._cancelled.discard(key)
                self._loop.cancel(key)
                yield self._result(key, "cancelled")

    def _fill(self, arrivals: "_Arrivals") -> Iterator[EngineResult]:
        """Let waiting requests in while there is room; yields those that can't be answered."""
        while self._loop.active < self.max_rows:
            while not self._ready:
                request = arrivals.next()
                if request is None:
                    return
                work = self._prepare(request, arrivals.count - 1)
                if isinstance(work, EngineResult):
                    yield work
                else:
                    self._ready.append(work)
            if self._ready[0].request.key in self._cancelled:
                yield self._leave(self._ready.popleft())
                continue
            if not self._fits(self._ready[0]):
                return
            work = self._ready.popleft()
            self._rows[work.request.key] = work
            self._loop.admit([work.request], lambda request=work.request: self._shared(request))

    def _leave(self, work: "_Work") -> EngineResult:
        """The result of a request that was cancelled before its turn came."""
        self._cancelled.discard(work.request.key)
        self._rows[work.request.key] = work
        return self._result(work.request.key, "cancelled")

    def _fits(self, work: "_Work") -> bool:
        """Whether the cache stays within its bound with one more row; a kept prefix gives way first."""
        if self.max_tokens is None:
            return True
        needed = self._needed(work.size)
        if self._prefix is not None and needed + len(self._prefix[0]) > self.max_tokens:
            self._prefix = None
        return needed <= self.max_tokens

    def _prepare(self, request: EngineRequest, number: int) -> "_Work | EngineResult":
        """The request as `generate` would run it, or the result that says why it can't."""
        try:
            if request.key in self._rows:
                raise ValueError(
                    f"key={request.key!r} is that of a request at work: give every request one of its own."
                )
            reserved = [name for name in OURS if name in request.options]
            if reserved:
                raise ValueError(
                    f"options has {', '.join(reserved)}, which the engine settles for all requests: leave it out."
                )
            ids = self._ids(request.input_ids)
            options = dict(attention_mask=torch.ones_like(ids)) | request.options | dict(return_dict_in_generate=False)
            if request.generation_config is not None:
                options["generation_config"] = request.generation_config
            seed = request.seed
            if seed is None and self.speculation.seed is not None:
                seed = self.speculation.seed + number
            knobs = replace(self.speculation, seed=seed)
            one, *more = prepared(
                self.target, input_ids=ids, assistant_model=self.drafter, speculation=knobs, **options
            )
            if more:
                raise ValueError("num_return_sequences was given, and a request has one answer: send it several times.")
            one.key, one.stream, one.settings = request.key, 0, self._settings(one.settings)
            work = _Work(one, options.get("streamer"))
            self._check_size(work)
            return work
        except Exception as error:
            streamer = request.options.get("streamer") if isinstance(request.options, dict) else None
            with suppress(Exception):
                streamer.end()
            nothing = SpeculationStats.empty(1)
            return EngineResult(key=request.key, tokens=[], reason="error", error=error, speculation=nothing)

    def _ids(self, given) -> torch.Tensor:
        """A prompt as [1, n] on the target's device."""
        ids = torch.as_tensor(given)
        if ids.dim() == 2 and len(ids) == 1:
            ids = ids[0]
        if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(
                f"input_ids is of shape {list(ids.shape)} and {ids.dtype}, and a request is one prompt of at least one "
                "token id: pass a list of integers, or a tensor [n] or [1, n] of them."
            )
        size = self.target.get_input_embeddings().num_embeddings
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"input_ids holds {int(ids.min())} to {int(ids.max())}, and the target knows those from 0 to "
                f"{size - 1}: use its own tokenizer."
            )
        return ids.to(self.target.device, torch.long)[None]

    def _settings(self, settings: Settings) -> Settings:
        """The same object for all requests that decode alike, so that they are judged together."""
        if settings.do_sample or settings.criteria or not settings.scorer.empty:
            return settings
        return self._plain.setdefault(settings.stop_ids, settings)

    def _check_size(self, work: "_Work") -> None:
        prompt, budget = len(work.request.prompt), work.request.budget
        if self.max_tokens is not None and work.size > self.max_tokens:
            raise ValueError(
                f"A prompt of {prompt} tokens with a budget of {budget} needs {work.size} tokens of cache, and "
                f"max_tokens={self.max_tokens}: set a smaller max_new_tokens, or a larger max_tokens for the engine."
            )
        for limit in self._loop.target.limits:
            if work.size - 1 > limit.at:
                raise ValueError(
                    f"A prompt of {prompt} tokens with a budget of {budget} runs past {limit.at} tokens, from where on "
                    f"this target computes a forward by the longest text in it ({limit.cause}), and rows of an engine "
                    "share theirs: stay within, or generate this prompt alone."
                )
        places = self._loop.target.places
        if places is not None and work.size - 1 > places:
            raise ValueError(
                f"A prompt of {prompt} tokens with a budget of {budget} runs past the {places} positions that this "
                "target has learned: shorten the prompt, or set a smaller max_new_tokens."
            )

    def _take(self, commit: Commit) -> Iterator[EngineResult]:
        work = self._rows.get(commit.key)
        if work is None:  # its streamer died earlier in this step
            return
        work.tokens += commit.tokens
        error = commit.error or work.show(commit.tokens)
        if commit.reason is not None or error is not None:
            if commit.reason is None:
                self._loop.cancel(commit.key)
            yield self._result(commit.key, "error" if error is not None else commit.reason, error)

    def _result(self, key, reason: str, error=None) -> EngineResult:
        work = self._rows.pop(key)
        if isinstance(error, Cancelled):
            reason, error = "cancelled", None
        ending = work.end()
        if ending is not None and error is None:
            reason, error = "error", ending
        stats = SpeculationStats.of([work.request.outputs], Seconds(), [])
        return EngineResult(key=key, tokens=work.tokens, reason=reason, error=error, speculation=stats)

    # ------------------------------------------------------------------ prompts that begin alike

    def _shared(self, request: Request) -> TargetCache | None:
        """A cache of the prompt's first tokens, copied from a row at work or kept from one; None where none begins
        alike."""
        if self.shared_prefix is None:
            return None
        batch, kept = self._loop.batch, 0 if self._prefix is None else _common(self._prefix[0], request.prompt)
        live = [(_common(row.request.prompt, request.prompt), i) for i, row in enumerate(batch.rows)]
        longest, i = max(live, default=(0, 0))
        if max(longest, kept) < self.shared_prefix:
            return None
        if longest <= kept:
            return self._prefix[1].first(0, kept, self._prefix[1].draft)
        cache = batch.cache.first(i, longest, batch.proposer.cache)
        cache.drafter = drafter_key(self.drafter)
        if self.max_tokens is None or self._needed() + longest + 1 <= self.max_tokens:
            self._prefix = batch.rows[i].request.prompt[: longest + 1], cache
            cache = cache.first(0, longest, cache.draft)
        return cache

    def _needed(self, *more: int) -> int:
        """Tokens of cache of the rows at work and of rows of the sizes `more`: every row has room for the longest."""
        sizes = [*(w.size for w in self._rows.values()), *more]
        return len(sizes) * max(sizes, default=0)


class _Arrivals:
    """Requests one by one; `ended` once there are no more, with what their iterable raised in `error`."""

    def __init__(self, requests: Iterator):
        self.requests, self.count, self.ended, self.error = requests, 0, False, None

    def next(self) -> EngineRequest | None:
        """The next one, or None where none waits."""
        if self.ended:
            return None
        try:
            request = next(self.requests)
        except StopIteration:
            self.ended = True
            return None
        except Exception as error:
            self.ended, self.error = True, error
            return None
        self.count += request is not None
        return request


@dataclass
class _Work:
    """A request at work, and what it has so far."""

    request: Request
    streamer: object = None
    tokens: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.request.prompt) + self.request.budget

    def show(self, tokens: list[int]) -> Exception | None:
        """Give tokens to the streamer; what it raised."""
        try:
            if self.streamer is not None and tokens:
                self.streamer.put(torch.tensor([tokens]))
        except Exception as error:
            return error

    def end(self) -> Exception | None:
        """Tell the streamer that nothing more comes, so that nobody waits for it; what it raised."""
        try:
            if self.streamer is not None:
                self.streamer.end()
        except Exception as error:
            return error


def _without_frames(results: Iterator[EngineResult]) -> Iterator[EngineResult]:
    """The results, whose errors say in a note where they were raised. A traceback would hold all that was computed
    there."""
    for result in results:
        error = result.error
        while error is not None:
            if error.__traceback__ is not None:
                note = "Raised at:\n" + "".join(format_tb(error.__traceback__))
                error.__notes__ = [*getattr(error, "__notes__", ()), note]
                error.__traceback__ = None
            error = error.__context__
        yield result


def _keyed(requests) -> Iterator[EngineRequest | None]:
    number = 0
    for request in requests:
        if request is not None and not isinstance(request, EngineRequest):
            request = EngineRequest(input_ids=request)
        if request is not None and request.key is None:
            request = replace(request, key=number)
        number += request is not None
        yield request


def _common(one: list[int], other: list[int]) -> int:
    """First tokens whose cached states two prompts share. A drafter also looks at the token behind each, so that must
    be shared as well, and one of `other` is left to read for its logits."""
    count = 0
    for a, b in zip(one, other):
        if a != b:
            break
        count += 1
    return max(count - 1, 0)
