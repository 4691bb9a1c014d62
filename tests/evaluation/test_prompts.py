"""Reading prompt files."""

from hf_dspark.evaluation.prompts import read_prompts


def test_a_line_ends_at_a_newline_and_at_nothing_else(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"prompt": "one\u2028still one"}\n\n{"prompt": "two"}\n', encoding="utf-8")
    assert [p.turns for p in read_prompts(path)] == [("one\u2028still one",), ("two",)]
