"""Few modules stand beside the folders; there is one user context; docstrings open with a verb or a noun."""

import ast
from collections.abc import Iterable

from tests.architecture.test_floors import FAMILIES, Module, is_folder, read_modules

MAX_FLAT_MODULES = 8
MAX_RELATIVE_DOCSTRINGS = 0.02
RELATIVE_WORDS = frozenset(
    (
        "what",
        "whether",
        "which",
        "where",
        "how",
        "why",
        "when",
        "who",
        "that",
        "whose",
        "as",
        "all",
        "everything",
    )
)


def flat_modules(modules: Iterable[str]) -> list[str]:
    """Modules directly in `spmd`, which belong to no folder."""
    return [name for name in modules if name.count(".") == 1 and not is_folder(name)]


def relative_docstrings(modules: Iterable[Module]) -> tuple[list[str], int]:
    """Docstrings that open with a relative word, and the number of all."""
    found, count = [], 0
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                count += 1
                if text.split()[0].strip("`,.:").lower() in RELATIVE_WORDS:
                    found.append(
                        f"{module.name}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
                    )
    return found, count


def user_contexts(modules: Iterable[Module]) -> list[str]:
    """Modules with a call of `jax.make_user_context`, one entry for each call."""
    return [
        module.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "make_user_context"
    ]


def test_modules_are_in_folders() -> None:
    """At most eight modules are in no folder, and links to the families are not followed."""
    modules = read_modules("spmd")
    assert not [name for name in modules if name.split(".")[1:2] and name.split(".")[1] in FAMILIES]
    assert len(flat_modules(modules)) <= MAX_FLAT_MODULES


def test_control_flat_modules() -> None:
    """Modules are counted, folders and what is in them are not."""
    assert flat_modules(["spmd", "spmd.plan", "spmd.plan.plan", "spmd.flat"]) == ["spmd.flat"]


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """At most 2 % of the docstrings of the package and its families open with a relative word."""
    found, count = relative_docstrings(
        read_modules("spmd", *(f"spmd/{name}" for name in FAMILIES)).values()
    )
    assert count > 500
    assert len(found) <= MAX_RELATIVE_DOCSTRINGS * count, "\n".join(found)


def test_control_docstrings() -> None:
    """Relative words are found in a module, a class and a method, and nothing else is."""
    source = '"""What it is."""\nclass A:\n    """Where."""\n    def f(self):\n        """Return what is asked."""\n'
    found, count = relative_docstrings([Module("spmd.a", source)])
    assert (len(found), count) == (2, 3)


def test_one_user_context() -> None:
    """One piece of state is in scope while a step is traced: `jax.make_user_context` is called once."""
    assert len(user_contexts(read_modules("spmd").values())) == 1


def test_control_user_contexts() -> None:
    """Calls are counted, by any name of the module; a mention is none."""
    source = "a = jax.make_user_context()\nb = make_user_context(default_value=None)\n'make_user_context()'\n"
    assert user_contexts([Module("spmd.a", source)]) == ["spmd.a", "spmd.a"]
