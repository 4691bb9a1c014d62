"""The notebooks in docs/ run from top to bottom, and carry no outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["train_and_publish", "use"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells)
    names = {"__name__": path.stem}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
