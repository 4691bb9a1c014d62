"""Counts what would make the host wait for a device, on a CPU, where nothing does.

A transfer is a call that needs a tensor's values on the host (`.tolist()`, `.item()`, `float()`, `bool()`, `.cpu()`,
`.to("cpu")`, `.numpy()`), or whose result's size depends on them (`nonzero`, an index by a mask, `masked_select`,
`unique`). `x.to(y.device)` isn't one: on a device it stays there.
"""

import contextlib
import linecache
import sys
from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
METHODS = ("tolist", "cpu", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")


class _Watch(TorchDispatchMode):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in WAITING:
            self.note(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                self.note("mask")
        return function(*args, **(kwargs or {}))


def _matches(where: str, place: str) -> bool:
    file, line = where.rsplit(":", 1)
    name, _, text = place.partition(":")
    return file.endswith(name) and text in linecache.getline(file, int(line))


@contextlib.contextmanager
def counted(ignore=()):
    """A [`Traffic`] of the transfers made inside.

    Args:
        ignore: ends of file names whose calls aren't counted, for code whose tensors live on the host in any case;
            "file.py:text" means the lines of the file that contain the text.
    """
    seen = Traffic()
    inside = []  # a counted method's own operations and calls are part of it

    def note(name):
        if inside:
            return
        frame = sys._getframe(1)
        while frame and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
        if not any(_matches(where, place) for place in ignore):
            seen.append(name)
            seen.places[where] += 1

    def patched(name, original):
        def method(self, *args, **kwargs):
            note(name)
            inside.append(name)
            try:
                return original(self, *args, **kwargs)
            finally:
                inside.pop()

        return method

    def to(self, *args, **kwargs):
        if "cpu" in [x for x in (*args, kwargs.get("device")) if isinstance(x, str)]:
            note("to")
        return original_to(self, *args, **kwargs)

    originals = {name: getattr(torch.Tensor, name) for name in METHODS}
    original_to = torch.Tensor.to
    try:
        for name, original in originals.items():
            setattr(torch.Tensor, name, patched(name, original))
        torch.Tensor.to = to
        with _Watch(note):
            yield seen
    finally:
        torch.Tensor.to = original_to
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


class Traffic(list):
    """Names of transfers in order; `places` counts them by line of code."""

    def __init__(self):
        super().__init__()
        self.places = defaultdict(int)
