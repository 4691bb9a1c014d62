import runpy
from pathlib import Path


def test_the_families_example_trains_all_four_and_compares_them(monkeypatch, capsys, tmp_path):
    example = Path(__file__).parents[2] / "examples" / "families.py"
    options = ["--tiny", "--minutes", "0.001", "--prompts", "2", "--tokens", "8", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [str(example), *options])
    runpy.run_path(str(example), run_name="__main__")
    table = (tmp_path / "families.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [name for name in ("dspark", "dflash", "domino", "eagle3") for _ in range(4)]
    assert all(1 <= float(row[6]) <= 8 and float(row[7]) > 0 for row in rows)
    assert {(row[4], row[5]) for row in rows} == {("0", "no"), ("0", "yes"), ("1", "no"), ("1", "yes")}
    capsys.readouterr()
    runpy.run_path(str(example), run_name="__main__")  # trained drafters and finished answers are found again
    assert "train_runtime" not in capsys.readouterr().out and (tmp_path / "families.md").read_text() == table
