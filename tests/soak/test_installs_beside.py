"""The package installs beside libraries of a year ago, leaves them as they are, and works with them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAST_YEAR = ("numpy==2.3.5", "pyarrow==22.0.0", "transformers==4.57.1")
"""Newest releases of November 2025."""

pytestmark = pytest.mark.soak


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=900, cwd=ROOT
    )


def test_installs_beside_libraries_of_last_year(tmp_path: Path) -> None:
    """Pip changes none of them, `pip check` finds no conflict, and the unit tests pass. The control is a
    requirement that cannot be met beside them."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    first = run(*pip, "install", "-q", *LAST_YEAR)
    assert first.returncode == 0, first.stderr
    conflict = run(*pip, "install", "-q", "--dry-run", *LAST_YEAR, "tokenizers>=0.23.3")
    assert conflict.returncode != 0
    assert "conflict" in conflict.stderr
    installed = run(*pip, "install", "-q", *LAST_YEAR, f"{ROOT}[test]")
    assert installed.returncode == 0, installed.stderr
    frozen = run(*pip, "freeze").stdout.split()
    assert set(LAST_YEAR) <= set(frozen)
    checked = run(*pip, "check")
    assert checked.returncode == 0, checked.stdout
    tests = run(python, "-m", "pytest", "-q", "-x", "-m", "unit and not soak", "tests/unit")
    assert tests.returncode == 0, tests.stdout[-3000:]
