"""The core names no technique: no module of it has a word of the list as an identifier or in a string.

Docstrings and comments may say where a technique is; code may not depend on one.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.test_floors import (
    CORE,
    LIBRARIES,
    SETTINGS,
    Module,
    imports,
    longest_prefix,
    read_modules,
)

WORDS = (
    *("loss_?scal", "power_?sgd", "pipe_?dream", "in_?flight", "lora"),
    *("fp8", "delayed", "magnitude", "histor"),
    *("hops?", "secondary", "coded"),
    *("host_?param", "host_?memory", "update_?chunk", "offloaded_?update"),
)
"""Beginnings of words that only techniques have."""
EXCEPT = {
    ("optim.quantized", "magnitude"): "that of a number",
    ("plan.flax_layers", "lora"): "a layer of Flax, whose matrices an optimizer must know",
    (
        "sharding.mesh",
        "host_memory",
    ): "whether devices have any, which an offloaded activation needs, too",
    ("plan.resolve", "host_memory"): "the same question, asked",
}
"""Module and word → why it may be there."""
PATTERN = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})", re.IGNORECASE)


def docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    """The strings that are statements: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def written(module: Module) -> Iterator[str]:
    """The identifiers and strings of a module, imports and names of arguments among them."""
    described = set(map(id, docstrings(module.tree)))
    for node in ast.walk(module.tree):
        if id(node) in described:
            continue
        for _, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            yield from (text for text in values if isinstance(text, str))


def named_techniques(module: Module) -> list[str]:
    """A line of text for each word of a technique in a module."""
    found = []
    for text in written(module):
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
        for match in PATTERN.finditer(snake):
            if (module.inner, match[1].lower()) not in EXCEPT:
                found.append(f"{module.name}: {text!r} has {match[1]!r}")
    return found


def foreign_imports(module: Module, known: set[str]) -> list[str]:
    """What a module of the core imports of `spmd` from outside of the core and of what it may use."""
    found = []
    for name in imports(module):
        home = longest_prefix(name, known)
        if home and Module(home, "").folder not in (*CORE, *SETTINGS, *LIBRARIES, "spmd"):
            found.append(f"{module.name} imports {name}")
    return found


def core_modules() -> list[Module]:
    return [module for module in read_modules("spmd").values() if module.folder in CORE]


def test_the_core_names_no_technique() -> None:
    """Neither by an identifier nor in a string."""
    assert not [line for module in core_modules() for line in named_techniques(module)]


@pytest.mark.parametrize(
    "source",
    [
        "from spmd.powersgd.transform import PowerSGD",
        "def f(plan): return plan.loss_scale",
        "def f(*, fp8_scales): pass",
        "class InFlight: pass",
        "if kind == 'pipedream': pass",
        "title = f'{n} of CodedComm'",
        "global magnitudes",
    ],
)
def test_control_a_core_module_that_names_one(source: str) -> None:
    """Each way to write a name in source is found, and the same in a docstring or a comment is not."""
    assert len(named_techniques(Module("spmd.plan.plan", source))) >= 1
    described = '"""For PowerSGD."""\nx = 1  # of LoRA\n"""As fp8."""\ncolorado = hoping = 0\n'
    assert not [
        line
        for line in named_techniques(Module("spmd.plan.plan", described))
        if "hoping" not in line
    ]


def test_every_exception_has_a_use() -> None:
    """A word that a module no longer has is no exception."""
    texts = {module.inner: " ".join(written(module)).lower() for module in core_modules()}
    for name, word in EXCEPT:
        assert word in texts[name], (name, word)


def test_the_core_imports_the_core() -> None:
    """Besides it the two modules of what a user names, and libraries without a plan; a technique is the control."""
    known = set(read_modules("spmd"))
    assert not [line for module in core_modules() for line in foreign_imports(module, known)]
    control = Module(
        "spmd.training.step",
        "from spmd.pipedream.grad_fn import pipedream\nfrom spmd import tree\n",
    )
    assert foreign_imports(control, known) == [
        "spmd.training.step imports spmd.pipedream.grad_fn.pipedream"
    ]
