"""What `make docs` checks beyond mkdocs' own strictness: each public name has a docstring and an entry in the API
reference."""

import re
from pathlib import Path

import griffe
from mkdocs.exceptions import PluginError

SOURCE = Path("build/docs-source")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#\s]+)\)")
OPTIONAL = {"copies.md", "trees.md", "compiled.md"}  # shown where they exist


def on_config(config):
    docs = Path(config.docs_dir)
    for section in config.nav:
        for title, pages in section.items():
            section[title] = [page for page in pages if _exists(page, docs)]
    _check_public_names(docs)
    return config


def on_page_markdown(markdown, page, config, files):
    """A link to a file of the checkout outside docs/ serves those who read it there; on the site its text remains."""
    docs = Path(config.docs_dir).resolve()

    def plain(match):
        path = (docs / page.file.src_uri).parent.joinpath(match["path"]).resolve()
        return match["text"] if path.exists() and docs not in path.parents else match[0]

    return LINK.sub(plain, markdown)


def _exists(page, docs: Path) -> bool:
    path = page if isinstance(page, str) else next(iter(page.values()))
    return path not in OPTIONAL or (docs / path).exists()


def _check_public_names(docs: Path) -> None:
    package = griffe.load("hf_dspark", search_paths=[SOURCE], try_relative_path=False)
    names = [name for name in package.exports if not str(name).startswith("__")]
    entries = set(re.findall(r"^::: hf_dspark\.(\w+)$", (docs / "reference/api.md").read_text(encoding="utf-8"), re.M))
    faults = [f"{name} has no entry in docs/reference/api.md" for name in names if name not in entries]
    faults += [f"{name} in docs/reference/api.md is no public name" for name in sorted(entries.difference(names))]
    faults += [f"{name} has no docstring" for name in names if not package[name].has_docstring]
    if faults:
        raise PluginError("The API reference is incomplete: " + "; ".join(faults) + ".")
