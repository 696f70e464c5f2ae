"""The package stays small: its modules, its core, its flat modules; one user context; docstrings that open well."""

import ast
from collections.abc import Iterable, Mapping

from tests.architecture.test_floors import CORE, FAMILIES, NOT_COUNTED, Module, is_folder, read_modules

MAX_FLAT_MODULES = 8
MAX_MODULE_LINES = 400
LARGE_MODULE_LINES = 360
MAX_LARGE_MODULES = 3
MAX_CORE_LINES = 11_100  # fewer bits: stored activations 339, codes 598, PowerSGD 520, recipes 366; averages 94
MAX_PACKAGE_LINES = 36_080  # the aim was 20,000; above it: what users meet (data, chats, reports 4,000), experts, bits
MAX_RELATIVE_DOCSTRINGS = 0.02
RELATIVE_WORDS = frozenset(
    ("what", "whether", "which", "where", "how", "why", "when", "who", "that", "whose", "as", "all", "everything")
)


def line_counts(modules: Iterable[Module]) -> dict[str, int]:
    """Module → lines."""
    return {module.name: len(module.source.splitlines()) for module in modules}


def size_problems(modules: Mapping[str, Module]) -> list[str]:
    """Which of the sizes above are exceeded; links to the families are not followed."""
    lines = line_counts(modules.values())
    flat = [name for name in lines if name.count(".") == 1 and not is_folder(name)]
    core = sum(n for name, n in lines.items() if modules[name].folder in set(CORE) - set(NOT_COUNTED))
    large = sorted(f"{name} has {n} lines" for name, n in lines.items() if n > LARGE_MODULE_LINES)
    problems = [f"{name} has {n} lines, above {MAX_MODULE_LINES}" for name, n in lines.items() if n > MAX_MODULE_LINES]
    problems += [f"modules above {LARGE_MODULE_LINES}: {large}"] if len(large) > MAX_LARGE_MODULES else []
    problems += [f"flat modules: {flat}"] if len(flat) > MAX_FLAT_MODULES else []
    problems += [f"the core has {core} lines"] if core > MAX_CORE_LINES else []
    total = sum(lines.values())
    return problems + ([f"the package has {total} lines"] if total > MAX_PACKAGE_LINES else [])


def relative_docstrings(modules: Iterable[Module]) -> tuple[list[str], int]:
    """Docstrings that open with a relative word, and the number of all."""
    found, count = [], 0
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                count += 1
                if text.split()[0].strip("`,.:").lower() in RELATIVE_WORDS:
                    found.append(f"{module.name}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
    return found, count


def user_contexts(modules: Iterable[Module]) -> list[str]:
    """Modules with a call of `jax.make_user_context`, one entry for each call."""
    return [
        module.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "make_user_context"
    ]


def test_sizes() -> None:
    """No bar is exceeded, and the links are not followed."""
    modules = read_modules("spmd")
    assert not [name for name in modules if name.split(".")[1:2] and name.split(".")[1] in FAMILIES]
    assert not size_problems(modules)


def test_control_sizes() -> None:
    """Each bar is reported by a package that is one line or one module above it."""

    def problems(**lines: int) -> list[str]:
        names = {f"spmd.{name.replace('__', '.')}": n for name, n in lines.items()}
        return size_problems({name: Module(name, "\n" * n) for name, n in names.items()})

    assert problems(training__a=400, training__b=361, training__c=361, training__d=360) == []
    assert len(problems(training__a=401)) == 1
    assert len(problems(training__a=361, training__b=361, training__c=361, training__d=361)) == 1
    assert problems(**{f"flat{n}": 1 for n in range(MAX_FLAT_MODULES)}) == []
    assert len(problems(**{f"flat{n}": 1 for n in range(MAX_FLAT_MODULES + 1)})) == 1
    core = {f"training__m{n}": 100 for n in range(MAX_CORE_LINES // 100)} | {"training__last": MAX_CORE_LINES % 100}
    assert problems(**core) == []
    assert problems(**core, training__more=1) == [f"the core has {MAX_CORE_LINES + 1} lines"]
    assert problems(**{f"layers__m{n}": 360 for n in range(30)}) == []
    below = {f"hf__m{n}": 100 for n in range(MAX_PACKAGE_LINES // 100)} | {"hf__last": MAX_PACKAGE_LINES % 100}
    assert problems(**below) == []
    assert problems(**below, hf__more=1) == [f"the package has {MAX_PACKAGE_LINES + 1} lines"]


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """At most 2 % of the docstrings of the package and its families open with a relative word."""
    found, count = relative_docstrings(read_modules("spmd", *(f"spmd/{name}" for name in FAMILIES)).values())
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
