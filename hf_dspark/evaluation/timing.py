"""When the tokens came: a streamer that only looks at the clock, the same for every way of generating."""

import time
from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Give it to `generate(streamer=...)` (one row) and read it afterwards.

    `decode_seconds` and `decode_tokens` leave out the prefill and the tokens that came with it, as the papers' timers
    do.
    Example: 1 token after 0.5 s, then 9 more within 0.9 s: prefill 0.5 s, 0.1 s per token.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.started = self.first = self.ended = None
        self.puts: list[int] = []  # tokens that came at once, the prefill's first

    def put(self, value) -> None:
        if self.started is None:  # generate puts the prompt before it does anything else
            self.started = self.clock()
            return
        if not self.puts:
            self.first = self.clock()
        self.puts.append(value.numel())

    def end(self) -> None:
        self.ended = self.clock()

    @property
    def tokens(self) -> int:
        return sum(self.puts)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def prefill_seconds(self) -> float:
        return self.first - self.started

    @property
    def decode_seconds(self) -> float:
        return self.ended - self.first

    @property
    def decode_tokens(self) -> int:
        return sum(self.puts[1:])

    @property
    def seconds_per_token(self) -> float:
        return self.decode_seconds / self.decode_tokens if self.decode_tokens else float("nan")


class Busy:
    """How much of the CPU this process got while it wanted all of it; times taken on a busy machine mean little.

    `with Busy() as busy: ...`, then `busy.share`: processor time over wall time and threads. It says nothing about
    GPUs.
    """

    def __enter__(self) -> "Busy":
        self.began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc) -> None:
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        self.share = cpu / max(wall * torch.get_num_threads(), 1e-9)

    def warning(self, device: torch.device) -> list[str]:
        """What to say about it, if anything."""
        if device.type != "cpu" or self.share > 0.6:
            return []
        return [
            f"This process got {self.share:.0%} of the processor time it could have used: something else is running, "
            "and the times above are too long and uneven. Measure again on a quiet machine."
        ]
