"""The quickstart of the README runs as it is written."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def first_python_block(text: str) -> str:
    """The code of the first block that is fenced as Python."""
    match = re.search(r"^```python *\n(.*?)^``` *$", text, re.M | re.S)
    assert match, "README.md has no Python block"
    return match[1]


def test_quickstart_runs(tmp_path: Path) -> None:
    """The first Python block of the README, in a fresh interpreter and an empty folder, runs to its end."""
    assert README.is_file(), "README.md is missing"
    quickstart = tmp_path / "quickstart.py"
    quickstart.write_text(first_python_block(README.read_text(encoding="utf-8")), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, quickstart], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    shown = README.read_text(encoding="utf-8").split("It prints the plan", 1)[1].split("```\n")[1]
    assert result.stdout == shown, "what the README shows is not what the quickstart prints"


def test_quickstart_is_short() -> None:
    """The quickstart is at most 25 lines of code."""
    code = first_python_block(README.read_text(encoding="utf-8"))
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


def test_quickstart_control() -> None:
    """The first block is taken whole, blank lines and all, and no other block is."""
    text = "```sh\nmake\n```\n\n```python\na = 1\n\nb = 2\n```\n\n```python\nc = 3\n```\n"
    assert first_python_block(text) == "a = 1\n\nb = 2\n"
