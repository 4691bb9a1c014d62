"""Speed under load: many users at once, answered by an engine per way of decoding, all in one interleaved run.

The engines take turns after every answer, and each has a clock that runs only while it does, so whatever else the
machine does falls on all of them alike.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median, quantiles

from hf_dspark.decoding.engine import EngineRequest, SpeculativeEngine
from hf_dspark.drafting.copy_drafter import CopyDrafter
from hf_dspark.modeling import SpeculationConfig

from .timing import Clock


class Nothing(CopyDrafter):
    """Drafts nothing and reads nothing: an engine with it decodes plainly."""

    def __init__(self):
        super().__init__()
        self.config.max_block, self.speculation = 1, SpeculationConfig(num_draft_tokens=0)


@dataclass(frozen=True)
class Load:
    """Users at once. `concurrency`: each asks again when answered (closed loop). `arrival`: requests per second, at
    random (Poisson), of which at most `concurrency` are at work."""

    concurrency: int
    arrival: float | None = None

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.arrival is None else f"{self.arrival:g}/s"


def ways(drafter, settings: dict[str, dict] | None = None) -> dict[str, tuple]:
    """Ways of decoding by name: {name: (drafter, knobs)}, "plain" first.

    Args:
        settings: {name: knobs that differ from the drafter's stored ones}. By default a fixed length, "auto", and
            looped drafting where the drafter has blocks.
    """
    if settings is None:
        fixed = dict(scheduler=None, loop_gate=None, tree=None, copy=None)
        settings = {"fixed": fixed, "auto": fixed | dict(scheduler="auto")}
        if drafter.config.fixed_block:
            settings["looped"] = fixed | dict(scheduler="auto", loop_gate="auto")
    nothing = Nothing()
    return {"plain": (nothing, nothing.speculation)} | {
        name: (drafter, replace(drafter.speculation, **knobs)) for name, knobs in settings.items()
    }


class Running:
    """A clock that stands while others run: `with clock:` lets it go, `skip` moves it on."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.total, self.began = clock, 0.0, None

    def __enter__(self):
        self.began = self.clock()

    def __exit__(self, *exc):
        self.total, self.began = self(), None

    def __call__(self) -> float:
        return self.total if self.began is None else self.total + self.clock() - self.began

    def skip(self, seconds: float) -> None:
        self.total += seconds


@dataclass
class Answer:
    """What one user saw. Seconds on the engine's clock, `waited` from arrival to the first token."""

    tokens: int
    waited: float
    decode_seconds: float
    decode_tokens: int
    verified: list[int]
    emitted: list[int]
    error: str | None = None


@dataclass
class Server:
    """An engine answering `prompts` under a load, one answer per `next`."""

    engine: SpeculativeEngine
    prompts: Sequence[Sequence[int]]
    load: Load
    options: dict
    seed: int = 0
    clock: Running = field(default_factory=Running)

    def __post_init__(self):
        rng = random.Random(self.seed)
        at, self.due = 0.0, []
        for _ in self.prompts:
            self.due.append(at)
            at += rng.expovariate(self.load.arrival) if self.load.arrival else 0.0
        self.streamers = [Clock(self.clock) for _ in self.prompts]
        self.answers: list[Answer] = []
        self.results = self.engine.stream(self._requests())

    def _requests(self) -> Iterator[EngineRequest | None]:
        for i, prompt in enumerate(self.prompts):
            while (wait := self.due[i] - self.clock()) > 0:
                if not self.engine.active:
                    self.clock.skip(wait)  # nothing to do until then
                else:
                    yield None
            options = {**self.options, "streamer": self.streamers[i]}
            yield EngineRequest(input_ids=list(prompt), key=i, options=options, seed=self.seed + i)

    def next(self) -> bool:
        """Work until the next answer; whether there was one."""
        with self.clock:
            result = next(self.results, None)
        if result is None:
            return False
        seen, stats = self.streamers[result.key], result.speculation
        began = self.due[result.key] if self.load.arrival else seen.started
        fine = result.error is None
        self.answers.append(
            Answer(
                tokens=len(result.tokens),
                waited=seen.first - began if fine else 0.0,
                decode_seconds=seen.decode_seconds if fine else 0.0,
                decode_tokens=seen.decode_tokens if fine else 0,
                verified=stats.draft_lengths[0],
                emitted=stats.acceptance_lengths[0],
                error=None if fine else str(result.error),
            )
        )
        return True


def run_loads(
    target,
    methods: dict[str, tuple],
    prompts: Sequence[Sequence[int]],
    loads: Sequence[Load],
    max_new_tokens: int = 128,
    sampling: dict | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """Answer all `prompts` (token ids) under every load and by every way of `methods` (see [`ways`]).

    Args:
        sampling: options of `generate`, such as `do_sample` and `temperature`; greedy without.
        progress: called with (answers so far, in all).

    Returns:
        a dict per load and method, see [`summary`].
    """
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, **(sampling or {})}
    total, count, out = len(loads) * len(methods) * len(prompts), 0, []
    for load in loads:
        servers = {}
        for name, (drafter, knobs) in methods.items():
            engine = SpeculativeEngine(target, drafter, knobs, max_rows=load.concurrency)
            engine.generate(
                [EngineRequest(input_ids=list(p), options={**options, "max_new_tokens": 8}) for p in prompts[:2]]
            )
            servers[name] = Server(engine, prompts, load, options, seed)
        waiting, rng = list(servers), random.Random(seed)
        while waiting:
            for name in rng.sample(waiting, len(waiting)):
                if servers[name].next():
                    count += 1
                else:
                    waiting.remove(name)
                if progress is not None:
                    progress(count, total)
        out += [summary(name, server) for name, server in servers.items()]
    return out


def summary(method: str, server: Server) -> dict:
    """What a way of decoding did under a load.

    Returns:
        dict: `load`, `concurrency`, `arrival`, `method`, `answers`, `failed`; `tokens_per_second` of all users
        together, on the engine's clock; `user_tokens_per_second`, the median over answers of decode tokens over decode
        seconds (prefill left out); `wait_seconds` {"median", "p95"} to the first token; `tau`; `verified`, drafts
        verified per row and round.
    """
    fine = [a for a in server.answers if a.error is None]
    speeds = [a.decode_tokens / a.decode_seconds for a in fine if a.decode_tokens]
    waits = [a.waited for a in fine]
    emitted, verified = ([x for a in fine for x in getattr(a, name)] for name in ("emitted", "verified"))
    return {
        "load": server.load.label,
        **asdict(server.load),
        "method": method,
        "answers": len(fine),
        "failed": len(server.answers) - len(fine),
        "tokens_per_second": sum(a.tokens for a in fine) / server.clock(),
        "user_tokens_per_second": median(speeds) if speeds else float("nan"),
        "wait_seconds": {
            "median": median(waits) if waits else float("nan"),
            "p95": quantiles(waits, n=20)[-1] if len(waits) > 1 else float("nan"),
        },
        "tau": sum(emitted) / len(emitted) if emitted else float("nan"),
        "verified": sum(verified) / len(verified) if verified else float("nan"),
    }
