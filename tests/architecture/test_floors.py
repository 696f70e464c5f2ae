"""The house stands: imports run downwards, every dependency has its home.

Nothing here runs the framework: each check reads source text, and each has a control, a small piece
of source that breaks the rule and must be reported.
"""

import ast
import dataclasses
import functools
import graphlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = ("models", "partition_rules", "name_maps", "examples")
"""Folders at the top of the repository, which are installed inside of spmd (`spmd/models` is a link to `models`)."""
PACKAGES = ("spmd", *(f"spmd/{name}" for name in FAMILIES), "benchmarks")

CORE = (
    *("errors", "tree", "sharding", "jaxpr", "model_interface"),
    *("optim", "plan", "gradients", "training"),
)
"""What a train step is made of, which names no technique (`test_core.py`)."""
SETTINGS = ("precision", "settings")
"""What a user names in a config, and the techniques that the names lead to."""
NAMED_BY_SETTINGS = ("codecs", "loss_scaling", "delayed_scaling", "coded_comm", "host_memory")
"""These techniques, and `codecs`, of which two are made."""
LIBRARIES = ("chips", "codecs", "layers")
"""What the core uses besides: kinds of chips, arrays in fewer bits, and the head of a language model, for its loss."""

# Folders and flat modules of spmd, from the bottom up: a module imports from its own folder and
# from those before it.
FLOORS = (
    *("errors", "chips", "tree", "storage", "sharding", "distributed", "jaxpr", "codecs"),
    "model_interface",
    "loss_scaling",
    "precision",
    "optim",
    "delayed_scaling",
    "coded_comm",
    "host_memory",
    "settings",
    *("plan", "layers", "gradients", "powersgd", "pipeline", "pipedream", "training"),
    "diloco",
    "lora",
    "checkpoint",
    "data",
    "generate",
    "observe",
    "resilience",
    "analysis",
    "step_time",
    "parity",
    "testing",
    "doctor",
    *("hf", "run", "job_files", "report", "commands", "cli"),
)

# Those that may be imported inside a block. tensorboardX sets a variable of the environment, and
# would import PyTorch, which takes seconds; the others are extras.
IN_BLOCKS = {
    *("tensorboardX", "PIL.Image", "PIL.ImageOps", "IPython.display"),
    *("wandb", "mlflow", "mlflow.environment_variables"),
    *("lm_eval", "lm_eval.api.model", "lm_eval.tasks"),
}

# Where a dependency may be imported; one that is not named here may be imported anywhere.
HOMES = {
    "regex": {"sharding.patterns"},
    "orbax": {"checkpoint.arrays", "distributed.barrier"},
    "tensorstore": {"checkpoint.arrays", "checkpoint.zarr_arrays", "storage.bucket"},
    "grain": {"data.loader", "data.sampler"},
    "pyarrow": {"data.compression", "data.image_tables", "data.tables"},
    "PIL": {"data.images"},
    "tokenizers": {"data.tokenizer"},
    "jinja2": {"data.template_worker"},
    "safetensors": {"hf.safetensors"},
    "tensorboardX": {"observe.tensorboard"},
    "IPython": {"observe.notebook"},
    "wandb": {"observe.wandb_writer"},
    "mlflow": {"observe.mlflow_writer"},
    "rich": {"commands.data", "observe.console", "observe.notebook", "observe.spinner"},
    "tyro": {
        "run.config",
        "commands.parsing",
        "commands.check",
        "commands.data",
        "commands.evaluate",
        "commands.generate",
        "commands.import_hf",
        "commands.export_hf",
        "commands.diff",
        "commands.report",
        "commands.save",
        "commands.status",
    },
}
ENVIRONMENT_MODULES = {"distributed.initialize", "storage.endpoint", "testing"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv", "unsetenv"}

# What the packages beside spmd may import, besides the standard library and themselves.
MODELS_MAY_IMPORT = (
    *("flax", "jax", "jaxtyping", "numpy"),
    "spmd.errors",
    "spmd.layers",
    "spmd.model_interface.model",
    "spmd.model_interface.wrapped_param",
    *("spmd.plan.annotate", "spmd.plan.fsdp", "spmd.plan.manual"),
    *("spmd.sharding.batch", "spmd.sharding.mesh", "spmd.sharding.rules"),
    *("spmd.hf.family", "spmd.hf.fields", "spmd.hf.layout"),
)
PARTITION_RULES_MAY_IMPORT = (
    "jax.sharding",
    *("spmd.layers.router", "spmd.models.decoder"),
    "spmd.sharding.batch",
    "spmd.sharding.mesh",
    "spmd.sharding.rules",
)
NAME_MAPS_MAY_IMPORT = (
    *("spmd.models", "spmd.partition_rules", "spmd.run.config"),
    *("spmd.hf.family", "spmd.hf.fields", "spmd.hf.layout"),
    *("spmd.layers.router", "spmd.sharding.rules"),
)

# Code of others that may raise anything leaves no choice: one handler for each module named here.
ONE_BROAD_EXCEPT = {
    "analysis.explicit_rules": "the error of JAX's rules for Explicit axes has no public name; others are raised again",
    "data.tokenizer": "tokenizers raises `Exception` for a file that is not a tokenizer",
    "data.process_batches": "a loader of others fails with anything, and is raised again after all processes know",
    "run.load_config": "a config is a user's program, whose failures are his, of whatever type",
}

EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "tools"}


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file, by its dotted name; a package goes by its own name."""

    name: str
    source: str

    @property
    def inner(self) -> str:
        """Its name inside of spmd, `plan.context`."""
        return self.name.removeprefix("spmd.")

    @property
    def folder(self) -> str:
        """Its folder, or itself where it is flat."""
        return self.inner.partition(".")[0]

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


def read_modules(*packages: str) -> dict[str, Module]:
    """Dotted name → module; links are not followed, so `spmd` is without the families."""
    modules = {}
    for package in packages:
        for path in sorted((ROOT / package).resolve().rglob("*.py")):
            inner = path.relative_to((ROOT / package).resolve())
            name = ".".join((*Path(package).parts, *inner.with_suffix("").parts)).removesuffix(
                ".__init__"
            )
            modules[name] = Module(name, path.read_text(encoding="utf-8"))
    return modules


def names_of(node: ast.stmt) -> Iterator[str]:
    """What an import statement names, in full: `from a.b import c` names `a.b.c`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def imports(module: Module) -> list[str]:
    return [
        name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.stmt)
        for name in names_of(node)
    ]


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def longest_prefix(name: str, known: set[str]) -> str | None:
    """The module of `known` that an imported name is, or lives in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in known), None)


def check_floor(module: Module) -> Iterator[str]:
    """A module imports from its folder and from those below it: not from above, not `spmd` itself, not relatively."""
    if module.folder not in FLOORS:
        yield f"{module.name} has no floor: give its folder a place in FLOORS"
        return
    below = FLOORS[: FLOORS.index(module.folder) + 1]
    for name in imports(module):
        if name.startswith("."):
            yield f"{module.name} imports {name} relatively"
        elif (
            is_within(name, "spmd")
            and name.removeprefix("spmd").removeprefix(".").partition(".")[0] not in below
        ):
            yield f"{module.name} imports {name}, which is not below it"


def check_imports_on_top(module: Module) -> Iterator[str]:
    """Imports stand at the top level of a module, where a circle cannot hide.

    Those of the package itself are for type checkers: its names are imported at their first use.
    """
    top = {id(node) for node in module.tree.body}
    if module.name == "spmd":
        for_types = (
            n
            for n in module.tree.body
            if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
        )
        top |= {id(node) for block in for_types for node in block.body}
    for node in ast.walk(module.tree):
        is_allowed = (
            isinstance(node, ast.Import) and {alias.name for alias in node.names} <= IN_BLOCKS
        )
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top and not is_allowed:
            yield f"{module.name}:{node.lineno} imports inside a block"


def check_homes(module: Module) -> Iterator[str]:
    """A dependency with a home is imported there and nowhere else."""
    for name in imports(module):
        homes = HOMES.get(name.split(".")[0])
        if homes is not None and module.inner not in homes:
            yield f"{module.name} imports {name}, whose home is {', '.join(sorted(homes))}"


def check_environment(module: Module) -> Iterator[str]:
    """Only three modules read or write environment variables."""
    if module.inner in ENVIRONMENT_MODULES:
        return
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ENVIRONMENT_NAMES
            and ast.unparse(node.value) == "os"
        ):
            yield f"{module.name}:{node.lineno} uses os.{node.attr}"
    yield from (
        f"{module.name} imports {n}"
        for n in imports(module)
        if n.removeprefix("os.") in ENVIRONMENT_NAMES
    )


def check_private(module: Module) -> Iterator[str]:
    """No private module or name of anyone is imported, and no `_src` reached through an attribute."""
    for name in imports(module):
        if any(part.startswith("_") and not part.endswith("__") for part in name.split(".")):
            yield f"{module.name} imports {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            yield f"{module.name}:{node.lineno} reaches {ast.unparse(node)}"


def check_excepts(module: Module) -> Iterator[str]:
    """Every handler names what it expects."""
    broad = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or {"Exception", "BaseException"} & {n.id for n in names_in(node.type)}
        )
    ]
    allowed = 1 if module.inner in ONE_BROAD_EXCEPT else 0
    if len(broad) != allowed:
        yield f"{module.name} catches everything in lines {broad}; {allowed} allowed"


def names_in(node: ast.expr) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name))


def check_name(module: Module) -> Iterator[str]:
    """A module is named for what it holds."""
    yield from (
        f"{module.name} says nothing"
        for part in module.name.split(".")
        if part.strip("_") in EMPTY_NAMES
    )


def check_models(module: Module) -> Iterator[str]:
    """A model sees Flax, JAX, the marks and rows that it declares, and the names of its checkpoints; never a plan.

    The decoder knows no file format, and neither it nor the readers of files know a family.
    """
    own = ("spmd.models",)
    if is_within(module.name, "spmd.models.published"):
        own = ("spmd.models.decoder", "spmd.models.published")
    if is_within(module.name, "spmd.models.decoder"):
        own = ("spmd.models.decoder",)
    yield from outside_of(module, (*own, *MODELS_MAY_IMPORT))


def check_partition_rules(module: Module) -> Iterator[str]:
    """A rule table needs `PartitionSpec`, the names of the axes, `Rules`, and the rows that a decoder declares."""
    yield from outside_of(module, ("spmd.partition_rules", *PARTITION_RULES_MAY_IMPORT))


def check_name_maps(module: Module) -> Iterator[str]:
    """A name map is about one model: its shape, its rule table and the names of its tensors."""
    yield from outside_of(module, ("spmd.name_maps", *NAME_MAPS_MAY_IMPORT))


def outside_of(module: Module, allowed: tuple[str, ...]) -> Iterator[str]:
    for name in imports(module):
        if name.split(".")[0] not in sys.stdlib_module_names and not any(
            is_within(name, a) for a in allowed
        ):
            yield f"{module.name} imports {name}"


def find_circle(modules: Mapping[str, Module]) -> list[str]:
    """The modules of one import circle, or nothing."""
    graph: dict[str, set[str | None]] = {
        name: {longest_prefix(n, set(modules)) for n in imports(module)} - {None}
        for name, module in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


Check = Callable[[Module], Iterator[str]]
SPMD_CHECKS: tuple[Check, ...] = (check_floor, check_homes, check_environment)
GENERAL_CHECKS: tuple[Check, ...] = (check_imports_on_top, check_private, check_excepts, check_name)

# A check, the module that breaks its rule, and what the report must name.
CONTROLS: tuple[tuple[Check, str, str, str], ...] = (
    (
        check_floor,
        "spmd.sharding.mesh",
        "from spmd.plan.plan import make_plan",
        "spmd.plan.plan.make_plan",
    ),
    (check_floor, "spmd.sharding.mesh", "from spmd import plan", "spmd.plan"),
    (check_floor, "spmd.sharding.mesh", "from spmd import make_plan", "spmd.make_plan"),
    (check_floor, "spmd.sharding.mesh", "import spmd", "imports spmd"),
    (check_floor, "spmd.cli", "from spmd.models.llama import PRESETS", "spmd.models.llama"),
    (check_floor, "spmd.sharding.mesh", "from . import errors", "relatively"),
    (check_floor, "spmd.gradients.base", "import spmd.pipeline.executor", "pipeline.executor"),
    (check_floor, "spmd.attic", "", "no floor"),
    (check_homes, "spmd.run.train", "import orbax.checkpoint as ocp", "orbax.checkpoint"),
    (check_homes, "spmd.run.train", "from rich.text import Text", "rich.text.Text"),
    (
        check_environment,
        "spmd.sharding.mesh",
        "import os\nos.environ['A'] = '1'",
        "mesh:2 uses os.environ",
    ),
    (check_environment, "spmd.sharding.mesh", "from os import getenv", "os.getenv"),
    (check_imports_on_top, "spmd.plan.plan", "import os\n\ndef f():\n    import json", "plan:4"),
    (check_imports_on_top, "spmd.plan.plan", "if TYPE_CHECKING:\n    import json", "plan:2"),
    (check_imports_on_top, "spmd", "if __debug__:\n    import json", "spmd:2"),
    (check_imports_on_top, "spmd.plan.plan", "try:\n    import json\nfinally:\n    pass", "plan:2"),
    (check_imports_on_top, "spmd.plan.plan", "def f():\n    import tensorboardX, json", "plan:2"),
    (check_private, "spmd.plan.plan", "from flax._src import core", "flax._src.core"),
    (check_private, "spmd.plan.plan", "import flax\nflax._src.core", "plan:2"),
    (
        check_private,
        "spmd.plan.plan",
        "from spmd.sharding.rules import _match",
        "spmd.sharding.rules._match",
    ),
    (check_excepts, "spmd.plan.plan", "try:\n    f()\nexcept:\n    pass", "[3]"),
    (
        check_excepts,
        "spmd.plan.plan",
        "try:\n    f()\nexcept (KeyError, Exception):\n    pass",
        "[3]",
    ),
    (check_excepts, "spmd.data.tokenizer", "try:\n    f()\nexcept KeyError:\n    pass", "[]"),
    (check_name, "spmd.mesh_utils.utils", "", "says nothing"),
    (
        check_models,
        "spmd.models.llama",
        "from spmd.plan.plan import make_plan",
        "spmd.plan.plan",
    ),
    (check_models, "spmd.models.llama", "import optax", "optax"),
    (
        check_models,
        "spmd.models.decoder.layer",
        "from spmd.models.published.family import layer_names",
        "spmd.models.published.family",
    ),
    (
        check_models,
        "spmd.models.published.family",
        "from spmd.models.llama import PRESETS",
        "spmd.models.llama",
    ),
    (
        check_partition_rules,
        "spmd.partition_rules.llama",
        "from spmd.models.llama import PRESETS",
        "spmd.models.llama",
    ),
    (
        check_name_maps,
        "spmd.name_maps.llama",
        "from spmd.hf.load import load_params",
        "spmd.hf.load",
    ),
)


def read_folders(*packages: str) -> set[str]:
    """The packages and the packages inside them, by dotted name."""
    return {name for name, module in read_modules(*packages).items() if is_folder(name)}


def is_folder(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").exists()


def report(check: Check, modules: Mapping[str, Module]) -> list[str]:
    return [problem for module in modules.values() for problem in check(module)]


@pytest.mark.parametrize("check", SPMD_CHECKS, ids=lambda check: check.__name__)
def test_spmd(check: Check) -> None:
    """Every module of spmd has a floor and keeps to what its floor may know."""
    folders = read_folders("spmd")
    modules = {name: module for name, module in read_modules("spmd").items() if name not in folders}
    assert not report(check, modules)
    assert {module.folder for module in modules.values()} == set(FLOORS), (
        "FLOORS names what does not exist"
    )


@pytest.mark.parametrize("check", GENERAL_CHECKS, ids=lambda check: check.__name__)
def test_every_package(check: Check) -> None:
    """What holds for the framework holds for models, rule tables, examples and benchmarks."""
    assert not report(check, read_modules(*PACKAGES))


def test_folders_import_nothing() -> None:
    """A folder of spmd says what is in it, and imports nothing; `spmd` itself is the public surface."""
    modules = read_modules("spmd")
    folders = read_folders("spmd") - {"spmd"}
    assert {name: imports(modules[name]) for name in folders} == {name: [] for name in folders}


def test_every_folder_is_shipped() -> None:
    """Every package is named in pyproject.toml, so an installed spmd has all of its modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["packages"]) == read_folders(*PACKAGES[:-1])


def described_folders(page: str) -> set[str]:
    """The folders in the first column of the tables of a page."""
    rows = (line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    return {name.strip().strip("`") for row in rows for name in row.split(",")}


def test_every_folder_is_described() -> None:
    """The tables of docs/architecture.md have each floor and each family by its name, and no other."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert described_folders(page) == {*FLOORS, *FAMILIES}
    assert described_folders(page.replace("| `training` |", "| `train` |")) != {*FLOORS, *FAMILIES}


def test_models() -> None:
    """Models import Flax, JAX, NumPy and the marks of spmd, and each other."""
    assert not report(check_models, read_modules("spmd/models"))


def test_partition_rules() -> None:
    """Rule tables import no family."""
    assert not report(check_partition_rules, read_modules("spmd/partition_rules"))


def test_name_maps() -> None:
    """Name maps import the family's model and rule table, and nothing that runs."""
    assert not report(check_name_maps, read_modules("spmd/name_maps"))


def test_no_circle() -> None:
    """No chain of imports returns to where it began."""
    assert not find_circle(read_modules(*PACKAGES))


def test_no_circle_control() -> None:
    """A circle of three modules is found, whichever way its imports are written."""
    sources = {"a.x": "import a.y", "a.y": "from a import z", "a.z": "from a.x import f"}
    assert set(find_circle({n: Module(n, s) for n, s in sources.items()})) == set(sources)
    del sources["a.y"]
    assert not find_circle({n: Module(n, s) for n, s in sources.items()})


@pytest.mark.parametrize(("check", "name", "source", "expected"), CONTROLS)
def test_controls(check: Check, name: str, source: str, expected: str) -> None:
    """Each check reports source that breaks its rule, and has nothing to say about source that keeps it."""
    problems = list(check(Module(name, source)))
    assert len(problems) == 1
    assert expected in problems[0]


def test_every_check_has_a_control() -> None:
    """A check without a control is not a check."""
    assert {control[0] for control in CONTROLS} == {
        *SPMD_CHECKS,
        *GENERAL_CHECKS,
        check_models,
        check_partition_rules,
        check_name_maps,
    }
