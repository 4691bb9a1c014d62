"""The experiments behind docs/NUMBERS.md, on tiny models."""

import argparse
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_the_families_are_trained_and_compared(monkeypatch, capsys, tmp_path):
    options = ["--tiny", "--minutes", "0.001", "--prompts", "2", "--tokens", "8", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [str(HERE / "families.py"), *options])
    runpy.run_path(str(HERE / "families.py"), run_name="__main__")
    table = (tmp_path / "families.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        name for name in ("dspark", "dflash", "domino", "eagle3", "mtp") for _ in range(4)
    ]
    assert all(1 <= float(row[6]) <= 8 and float(row[7]) > 0 for row in rows)
    assert {(row[4], row[5]) for row in rows} == {("0", "no"), ("0", "yes"), ("1", "no"), ("1", "yes")}
    capsys.readouterr()
    runpy.run_path(
        str(HERE / "families.py"), run_name="__main__"
    )  # trained drafters and finished answers are found again
    assert "train_runtime" not in capsys.readouterr().out and (tmp_path / "families.md").read_text() == table


def test_variants_are_read_from_their_names_and_bad_ones_refused():
    example = runpy.run_path(str(HERE / "families.py"))["Variant"].of
    assert example("dspark") == ("dspark", "dspark", 5, 1) and example("dflash-7x2")[1:] == ("dflash", 7, 2)
    for bad in ("dsparkle", "dspark-", "eagle3x2", "domino-x"):
        with pytest.raises(argparse.ArgumentTypeError, match=bad):
            example(bad)


@pytest.mark.slow
def test_every_part_of_looped_drafting_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ablation_dloop.py", "--tiny"])
    runpy.run_path(str(HERE / "ablation_dloop.py"), run_name="__main__")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3 * 2 * 10  # sets, temperatures, arms
    assert all("| 1.00 (1.00 to 1.00) |" in line for line in table if "| base |" in line)


def test_trees_of_every_size_are_counted_against_the_chain(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trees.py", "--tiny", "--budgets", "4", "16"])
    runpy.run_path(str(HERE / "trees.py"), run_name="__main__")
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 2 * (1 + 2 * 2)  # temperatures, the chain and kinds of every budget
    assert all(row[7].strip() == "1.00 (1.00 to 1.00)" for row in rows if row[2].strip() == "chain")
    taus = {(row[1].strip(), row[2].strip()): float(row[4]) for row in rows}
    assert all(taus["0", kind + ", 16"] >= taus["0", kind + ", 4"] >= 1 for kind in ("ddtree", "dartree"))
