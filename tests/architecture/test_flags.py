"""Errors that Python calls reach name arguments, `on_nan="skip"`; the command line makes flags of them.

`spmd.commands.flag_names` is the one place that does. What only a `TrainConfig` reaches may name
flags: reading a corpus, building from a config, and the commands themselves.
"""

import ast
import re

import pytest

from tests.architecture.test_floors import FLOORS, Module, read_modules

FOLDERS = {
    *FLOORS[: FLOORS.index("checkpoint") + 1],
    "generate",
    "resilience",
    "analysis",
    "parity",
}
"""Folders that Python calls reach."""
OF_THE_COMMAND_LINE = {"distributed"}
"""Of these, the arguments are those of `spmd launch` and of XLA."""
OF_RUNS = {
    "run.run",
    "run.run_spec",
    "run.run_dir",
    "run.session",
    "run.record",
    "run.external_state",
}
"""Modules of `run` that `spmd.Run` reaches."""
ALLOWED = ("in Python: ", "spmd import ")
"""What a string with flags contains that says both, or that is a whole command."""

_FLAG = re.compile(r"(?<![\w-])--[a-z]")


def flags(module: Module) -> list[str]:
    """The strings of a module, besides docstrings, that name a flag."""
    known = set()
    found = []
    for node in ast.walk(module.tree):  # breadth first: what is around a string comes before it
        if isinstance(node, ast.Expr):
            known.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            known.update(map(id, node.values))
        is_text = isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
        if id(node) in known or not is_text:
            continue
        text = ast.unparse(node)
        if _FLAG.search(text) and not any(allowed in text for allowed in ALLOWED):
            found.append(text)
    return found


@pytest.mark.parametrize(
    "source", ["", 'fix = f"--steps {steps} or more"'], ids=["spmd", "control"]
)
def test_what_python_reaches_names_arguments(source: str) -> None:
    """No string there names a flag; the control is a module with one."""
    modules = read_modules("spmd")
    named = {}
    if source:
        modules["spmd.training.control"] = Module("spmd.training.control", source)
    for module in modules.values():
        reached = module.folder in FOLDERS - OF_THE_COMMAND_LINE or module.inner in OF_RUNS
        if reached and flags(module):
            named[module.inner] = flags(module)
    assert named == ({"training.control": ["f'--steps {steps} or more'"]} if source else {})
