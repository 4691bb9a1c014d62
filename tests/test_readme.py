"""The README says what is there."""

import re
from dataclasses import fields
from pathlib import Path

import hf_dspark
from hf_dspark import SpeculationConfig

ROOT = Path(__file__).parents[1]


def test_the_table_of_settings_has_every_field_with_its_default():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.M))
    assert {name: default.replace('"', "'") for name, default in rows.items()} == {
        field.name: repr(field.default) for field in fields(SpeculationConfig)
    }


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    missing = [link for link in links if not link.startswith("https:") and not (ROOT / link).exists()]
    assert links and not missing


def test_the_api_reference_has_every_public_name():
    entries = re.findall(r"^::: hf_dspark\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(encoding="utf-8"), re.M)
    assert sorted(entries) == sorted(set(hf_dspark.__all__) - {"__version__"})
