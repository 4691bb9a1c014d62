"""The counter of transfers sees every kind of them once, and nothing else."""

import pytest
import torch
from traffic import counted

X = torch.arange(6).view(2, 3)

WAITS = {
    "tolist": lambda: X.tolist(),
    "item": lambda: X[0, 0].item(),
    "int": lambda: int(X[0, 0]),
    "float": lambda: float(X[0, 0]),
    "bool": lambda: bool(X[0, 0]),
    "branch": lambda: 1 if (X == 0).all() else 0,
    "cpu": lambda: X.cpu(),
    "to cpu": lambda: X.to("cpu"),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 2],
    "masked assignment": lambda: X.clone().__setitem__(X > 2, 0),
    "masked_select": lambda: X.masked_select(X > 2),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
}
STAYS = {
    "gather": lambda: X.gather(1, X[:, :1].clamp_max(2)),
    "index": lambda: X[torch.arange(2), X[:, 0].clamp_max(2)],
    "where": lambda: torch.where(X > 2, X, 0).cumprod(1).sum(1),
    "to device": lambda: X.to(X.device),
    "shape": lambda: [len(X), X.shape[1], X.numel()],
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_counted_once_with_its_line(name):
    with counted() as seen:
        WAITS[name]()
    assert len(seen) == 1
    assert [place.split("/")[-1].split(":")[0] for place in seen.places] == ["test_traffic.py"]
    with counted(ignore=["tests/test_traffic.py"]) as seen:
        WAITS[name]()
    assert not seen


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_on_the_device_is_not_counted(name):
    with counted() as seen:
        STAYS[name]()
    assert not seen
