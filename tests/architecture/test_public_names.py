"""The public surface: what `spmd` exports is listed, documented, and on the page that explains all of it."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spmd

ROOT = Path(__file__).parents[2]
ALL_OF_SPMD = ROOT / "docs" / "all-of-spmd.md"


def is_mentioned(name: str, page: str) -> bool:
    """Whether the page writes the name as code: `name`, or spmd.name."""
    return re.search(rf"(`|\bspmd\.){name}\b", page) is not None


def test_all_is_sorted() -> None:
    """`__all__` has one order."""
    assert spmd.__all__ == sorted(set(spmd.__all__))


def names_for_types(source: str) -> dict[str, str]:
    """Return public name → module, as type checkers read them."""
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: node.module or "" for node in imports for alias in node.names
    }


def test_all_is_what_can_be_imported() -> None:
    """Type checkers and programs find the same names in the same modules, and `__all__` has exactly these."""
    found = {name: home for name, home in vars(spmd)["_HOMES"].items()}
    assert names_for_types(inspect.getsource(spmd)) == found
    assert list(found) == spmd.__all__
    assert set(spmd.__all__) <= set(dir(spmd))


def test_control_another_name_is_none() -> None:
    """It is an error that says so, as in any module."""
    with pytest.raises(AttributeError, match="module 'spmd' has no attribute 'make_plam'"):
        _ = spmd.make_plam  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", spmd.__all__)
def test_has_docstring(name: str) -> None:
    """Every public name says what it is, in words that were written and not generated."""
    text = getattr(spmd, name).__doc__
    assert text, f"spmd.{name} has no docstring"
    assert not text.startswith(f"{name}("), (
        f"spmd.{name} has only the docstring that dataclasses make"
    )


def test_is_documented() -> None:
    """Every public name is on the page that explains all of spmd."""
    assert ALL_OF_SPMD.is_file(), "docs/all-of-spmd.md is missing: it mentions every public name"
    page = ALL_OF_SPMD.read_text(encoding="utf-8")
    assert not [name for name in spmd.__all__ if not is_mentioned(name, page)]


def test_is_documented_control() -> None:
    """A word of prose is not a mention."""
    assert is_mentioned("fit", "call `fit(state)`")
    assert is_mentioned("fit", "    spmd.fit(state)")
    assert not is_mentioned("fit", "rules that fit; `fitted`; spmd.fitted")


PROBE = """
import os
import sys
import jax
before = dict(os.environ)
{action}
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
assert dict(os.environ) == before
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("action", "passes"),
    [
        ("import spmd, spmd.cli", True),
        ("jax.devices()", False),
        ("os.environ['XLA_FLAGS'] = ''", False),
        ("sys.modules['torch'] = os", False),
    ],
    ids=["import", "control-backend", "control-environment", "control-torch"],
)
def test_import_does_nothing(action: str, passes: bool) -> None:
    """Importing spmd starts no JAX backend, changes no environment variable, and waits for no PyTorch where one is."""
    probe = [sys.executable, "-c", PROBE.format(action=action)]
    # Without this process's variables: one that a library has set here would not be seen to be set
    # there.
    environment = {"PATH": os.environ["PATH"]}
    result = subprocess.run(
        probe, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode == 0) is passes, result.stderr
