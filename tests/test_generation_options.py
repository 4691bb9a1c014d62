"""docs/generation_options.md says what really becomes of every option."""

import warnings

import generation_options
import pytest
from transformers import GenerationConfig

from hf_dspark.decoding.options import EXACT, FOREIGN, REFUSED, WITHOUT_EFFECT


@pytest.fixture(scope="module")
def table():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about combinations that we refuse
        return generation_options.table()


def test_every_option_is_exact_or_refused(table):
    outcomes = {(name, x) for rows in table.values() for name, *both, _ in rows for x in both}
    assert not [pair for pair in outcomes if pair[1] not in ("exact", "refused", "-")]
    assert len(outcomes) > 40


def test_refusals_say_why(table):
    assert all(
        bool(note) == ("refused" in (greedy, sampled)) for rows in table.values() for _, greedy, sampled, note in rows
    )


def test_the_table_in_the_docs_is_up_to_date(table, monkeypatch):
    monkeypatch.setattr(generation_options, "table", lambda: table)
    assert generation_options.DOC.read_text(encoding="utf-8") == generation_options.markdown(), (
        "run `python tests/generation_options.py`"
    )


def test_a_result_that_differs_is_noticed():
    case = generation_options.tiny.load_case("llama")
    option = generation_options.Option("broken", dict(max_new_tokens=7))
    good = generation_options.tiny.good
    try:
        calls = []

        def other_length(texts, **kwargs):
            calls.append(option.kwargs.update(max_new_tokens=6))  # what is compared differs from here on
            return good(texts, **kwargs)

        generation_options.tiny.good = other_length
        assert generation_options.outcome(case, option, False)[0] == "different"
    finally:
        generation_options.tiny.good = good


def test_every_field_of_a_generation_config_is_classified_once():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | {"speculation"}
    classes = [EXACT, REFUSED, set(FOREIGN), set(WITHOUT_EFFECT)]
    assert not fields - set().union(*classes), "say in hf_dspark/decoding/options.py what becomes of these"
    assert sum(map(len, classes)) == len(set().union(*classes)), "a field is in two classes"
