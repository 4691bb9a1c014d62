"""How new rows come in: their prompts are read, in chunks if asked, until each has logits for its first token."""

from collections.abc import Callable

import torch

from .batch import Batch, Request
from .target import Target


class Prefill:
    """Reads the prompts of `requests` once its turn comes.

    Rows of different lengths write the same number of slots: what lies beyond a short row's end is never attended and
    later overwritten. Each row's last feature waits for the token that follows it.

    Args:
        target: of the loop. requests: whose prompts they are. chunk (`int`, *optional*): most tokens of a row per
            forward.
        begin: gives the requests' [`Batch`] when the reading begins; its cache may hold some of their first tokens.
    """

    # Logits are made at every column where some row ends; from so many on, the last tokens get a forward of their own.
    MANY_ENDS = 8

    def __init__(self, target: Target, requests: list[Request], chunk: int | None, begin: Callable[[], Batch]):
        self.target, self.requests, self.chunk, self.begin = target, requests, chunk, begin
        self.flags = requests[0].outputs.flags
        self.cancelled: dict[int, Exception] = {}  # by row: these leave once all is read
        self.batch: Batch | None = None
        self.windows: list[tuple] = []

    def _begin(self) -> None:
        self.batch = batch = self.begin()
        self.ends = torch.tensor(batch.lengths)
        past, rows = batch.cache.lengths, len(batch.rows)
        rest = self.ends - past
        if (rest < 1).any():
            raise ValueError(
                f"past_key_values already holds {past.tolist()} tokens of prompts of {self.ends.tolist()}, which "
                "leaves nothing to feed: pass input_ids that go on at least one token beyond the cache."
            )
        last_alone = self.last_alone = rows > 1 and len(rest.unique()) > self.MANY_ENDS
        body = rest - 1 if last_alone else rest
        step = self.chunk or int(body.max())
        self.windows = [(past, begin, min(begin + step, int(body.max()))) for begin in range(0, int(body.max()), step)]
        if last_alone:
            self.windows.append((self.ends - 1, 0, 1))
        self.logits: list = [None] * rows
        self.features: list = [None] * rows

    def advance(self):
        """Feed the next chunk; returns the target's output and the chunk's first and end column.

        Raises:
            ValueError: the cache leaves nothing to read.
        """
        if self.batch is None:
            self._begin()
        start, begin, end = self.windows.pop(0)
        batch, target, device = self.batch, self.target, self.batch.device
        first = start + begin
        columns = torch.minimum(first[:, None] + torch.arange(end - begin + 1), self.ends[:, None] - 1).to(device)
        ids = batch.ids.gather(1, columns)
        places = (self.ends - 1 - first).tolist()  # of each row's last token in this chunk
        ending = [r for r, at in enumerate(places) if 0 <= at < end - begin]
        if self.last_alone and self.windows:
            ending = []
        keep = sorted({places[r] for r in ending}) or [0]
        batch.cache.lengths = first
        out = target.forward(
            ids[:, :-1], batch.cache, self.ends.tolist(), torch.tensor(keep, device=device), **self.flags
        )
        tapped = target.tap.features(batch.proposer.drafter.device)
        for r in ending:
            self.logits[r] = out.logits[r, keep.index(places[r])].to(device)
            self.features[r] = tapped[r, places[r]]
        counts = (self.ends - 1 - first).clamp(0, end - begin)
        if counts.any():
            batch.proposer.observe(tapped, ids[:, 1:], counts)
        return out, begin, end

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [A, 1, V] for every row's first token, and the features [A, 1, m*D] it is drafted from."""
        self.batch.cache.lengths = self.ends
        for row, error in self.cancelled.items():
            self.batch.rows[row].error = error
        return torch.stack(self.logits)[:, None], torch.stack(self.features)[:, None]
