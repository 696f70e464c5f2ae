"""The quickstart of the README runs as it is written, and imports what it needs alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_floors import CORE, LIBRARIES, NAMED_BY_SETTINGS, SETTINGS

README = Path(__file__).parents[2] / "README.md"


REFUSED = (
    "grain",
    "orbax",
    "tyro",
    "tokenizers",
    "tensorboardX",
    "tensorstore",
    "pyarrow",
    "jinja2",
    "rich",
)
"""What `spmd` must not import for a train step; Flax imports some of them."""
HOOK = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        parts, frame = name.split("."), sys._getframe(1)
        while frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "")
        if importer.split(".")[0] in ("spmd", "__main__") and parts[0] in {REFUSED}:
            raise ImportError(f"{{importer}} imports {{name}}")
        if parts[0] == "spmd" and len(parts) > 1 and parts[1] not in {CORE + SETTINGS + LIBRARIES + NAMED_BY_SETTINGS}:
            raise ImportError(f"{{importer}} imports {{name}}, which is not of the core")

sys.meta_path.insert(0, Refuse())
"""
"""Lines that refuse every import of `spmd` from outside of its core, and those of the libraries above."""


def first_python_block(text: str) -> str:
    """The code of the first block that is fenced as Python."""
    match = re.search(r"^```python *\n(.*?)^``` *$", text, re.M | re.S)
    assert match, "README.md has no Python block"
    return match[1]


def test_quickstart_runs(tmp_path: Path) -> None:
    """The first Python block of the README, in a fresh interpreter and an empty folder, runs to its end.

    It imports nothing from outside of the core, and no library of data, checkpoints or the command
    line.
    """
    assert README.is_file(), "README.md is missing"
    quickstart = tmp_path / "quickstart.py"
    quickstart.write_text(
        HOOK + first_python_block(README.read_text(encoding="utf-8")), encoding="utf-8"
    )
    result = subprocess.run(
        [sys.executable, quickstart],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    shown = README.read_text(encoding="utf-8").split("It prints the plan", 1)[1].split("```\n")[1]
    assert result.stdout == shown, "what the README shows is not what the quickstart prints"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import grain", "__main__ imports grain"),
        ("import spmd; spmd.DataConfig", "imports spmd.data, which is not of the core"),
        ("import spmd.cli", "imports spmd.cli, which is not of the core"),
    ],
)
def test_control_another_import_is_refused(line: str, said: str) -> None:
    """Of a library, and of a module outside of the core, also by a public name."""
    done = subprocess.run(
        [sys.executable, "-c", HOOK + line],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr


def test_quickstart_is_short() -> None:
    """The quickstart is at most 25 lines of code."""
    code = first_python_block(README.read_text(encoding="utf-8"))
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


def test_quickstart_control() -> None:
    """The first block is taken whole, blank lines and all, and no other block is."""
    text = "```sh\nmake\n```\n\n```python\na = 1\n\nb = 2\n```\n\n```python\nc = 3\n```\n"
    assert first_python_block(text) == "a = 1\n\nb = 2\n"
