"""Config files: Python files with a `config`, executed with the user's rights.

A config may import the modules beside it, as a script may. The folder of the config that was loaded
last is searched for them, and its modules stay imported; those of another config are put aside, so
that two configs with modules of equal names do not mix. `copy_config` writes a config with the
modules that it imported, so that a run folder is complete.
"""

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import re
import runpy
import shutil
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.errors import ConfigError, Problem, SpmdError, did_you_mean, nearest_file
from spmd.run.config import TrainConfig
from spmd.storage.address import BucketPath, is_address, parse_address
from spmd.storage.bucket import Bucket
from spmd.storage.download import download
from spmd.training.loop import refuse_training

_MODULE = re.compile(r"[^/]+/[^/]+\.py")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
"""Folder of the configs that ship with the package."""


class ConfigFolder(importlib.abc.MetaPathFinder):
    """Import hook for the modules beside a config, except for names of the standard library.

    Attributes:
        names: Top-level names that were imported from the folder.
        modules: Those modules while another config's are in `sys.modules`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()
        self.modules: dict[str, types.ModuleType] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a top-level module in the folder.

        A plain folder yields to an installed package.
        """
        find = importlib.machinery.PathFinder.find_spec
        if path is not None or name in sys.stdlib_module_names:
            return None
        spec = find(name, [str(self.folder)])
        if spec is None or (not spec.has_location and find(name)):
            return None
        self.names.add(name)
        return spec

    def imported(self) -> dict[str, types.ModuleType]:
        """Return the modules imported from the folder, by name."""
        found = dict[str, types.ModuleType]()
        for name, module in sys.modules.items():
            if name.partition(".")[0] in self.names:
                found[name] = module
        return found

    def activate(self) -> None:
        """Make this the only folder of a config in the search of imports."""
        for other in _active():
            sys.meta_path.remove(other)
            other.modules = other.imported()
            for name in other.modules:
                del sys.modules[name]
        sys.modules.update(self.modules)
        sys.meta_path.insert(0, self)
        importlib.invalidate_caches()


def _active() -> list[ConfigFolder]:
    return [finder for finder in sys.meta_path if isinstance(finder, ConfigFolder)]


@contextlib.contextmanager
def other_config() -> Iterator[None]:
    """Load a config for comparison inside the block.

    At its end, imports search the present config's folder again.
    """
    before = _active()
    try:
        yield
    finally:
        for finder in before:
            finder.activate()


def shipped() -> dict[str, Path]:
    """Return the configs in the package, by name."""
    found = dict[str, Path]()
    for path in sorted(EXAMPLES.glob("*.py")):
        if "\nconfig = " in path.read_text(encoding="utf-8"):
            found[path.stem.replace("_", "-")] = path
    return found


@dataclasses.dataclass(frozen=True)
class UserFile:
    """A file of the user that was executed.

    Attributes:
        names: Its names and their values.
        finder: Finder of the modules imported from its folder.
    """

    path: Path
    names: Mapping[str, Any]
    finder: ConfigFolder

    @property
    def config(self) -> TrainConfig:
        """Its `config`; raise `ConfigError` without one."""
        config = self.names.get("config")
        if not isinstance(config, TrainConfig):
            what = "defines no config" if config is None else f"defines config = {config!r}"
            fix = "config = spmd.TrainConfig(...)"
            if config is None and ("make" in self.names or "step" in self.names):
                what = "has a step of its own, and no config"
                fix = "spmd plan, report, check and search take it, and spmd.Run trains it"
            raise _unreadable(str(self.path), what, fix)
        if "config" in self.finder.names:
            what = "imports a module named config, and a run folder has its own config.py"
            raise _unreadable(str(self.path), what, "give that module another name")
        return config


def load_config(name: str) -> TrainConfig:
    """Execute a config file and return its `config`.

    The file is a path, one in a bucket, or a shipped config such as `demo`.

    Raises:
        ConfigError: The file does not exist, fails, or defines no `TrainConfig` named `config`.
    """
    return read_file(find_file(name)).config


def find_file(name: str) -> Path:
    """Return the path of a file, or of a shipped config such as `demo`.

    Of a file in a bucket, that of its local copy; modules beside it are copied, too.
    """
    if is_address(name):
        return _local_copy(parse_address(name))
    path = Path(name)
    if path.suffix != ".py":
        path = shipped().get(name, path)
    if not path.is_file():
        inside = path / "config.py"
        fix = did_you_mean(name, shipped())
        if inside.is_file():
            fix = f"{inside}, the config of that run"
        problem = Problem(name, "is neither a file nor a shipped config", fix=fix)
        raise ConfigError("Config not found:", [problem])
    return path


def _local_copy(address: BucketPath) -> Path:
    """Download a config with the modules beside it; return its local path.

    Modules in folders beside it are downloaded, too; of a config at the top of a bucket, nothing
    else is.
    """
    title = "Config not found:"
    if not address.name.endswith(".py"):
        fix = f"{address}/config.py, if it is a run"
        raise ConfigError(title, [Problem(str(address), "is no Python file", fix=fix)])
    if not address.parent.key:
        return download(address)
    names = Bucket(address.parent).list()
    folders = {name.partition("/")[0] for name in names if _MODULE.fullmatch(name)}

    def wanted(name: str) -> bool:
        folder, slash, _ = name.partition("/")
        return name.endswith(".py") and (not slash or folder in folders)

    path = download(address.parent, wanted) / address.name
    if not path.is_file():
        raise ConfigError(title, [Problem(str(address), "does not exist")])
    return path


def split_target(target: str) -> tuple[str, str]:
    """Split `FILE.py:FUNCTION`; the function is empty if there is none.

    Options of an address come last.

    Example:
        >>> split_target("step.py:make"), split_target("gs://bucket/step.py"), split_target("demo")
        (('step.py', 'make'), ('gs://bucket/step.py', ''), ('demo', ''))
        >>> split_target("s3://bucket/step.py:make?region=eu-west-1")
        ('s3://bucket/step.py?region=eu-west-1', 'make')
    """
    place, question, options = target, "", ""
    if is_address(target):
        place, question, options = target.partition("?")
    file, _, function = place.rpartition(":")
    if not file.endswith(".py"):
        return target, ""
    return f"{file}{question}{options}", function


def is_python_file(target: str) -> bool:
    """Return whether a target is a Python file, or a function of one.

    Example:
        >>> is_python_file("step.py:make"), is_python_file("s3://b/step.py?region=us-east-1")
        (True, True)
        >>> is_python_file("demo")
        False
    """
    file, _ = split_target(target)
    if is_address(file):
        file, _, _ = file.partition("?")
    return file.endswith(".py")


def local_target(target: str) -> str:
    """Return a target with the local copy of a file in a bucket; others as they are."""
    file, function = split_target(target)
    if not is_address(file):
        return target
    path = str(find_file(file))
    if function:
        return f"{path}:{function}"
    return path


def load_function(target: str) -> Callable[..., Any]:
    """Execute a Python file and return one of its functions; `target` is `FILE.py:FUNCTION`.

    Raises:
        ConfigError: The file does not exist, fails, or does not define the function.
    """
    file, name = split_target(target)
    path = Path(file)
    if not path.is_file():
        problem = Problem(file, "does not exist", fix=nearest_file(path))
        raise ConfigError("File not found:", [problem])
    defined = read_file(path).names
    if not callable(defined.get(name)):
        functions = list[str]()
        for key, value in defined.items():
            if callable(value) and not key.startswith("_"):
                functions.append(key)
        raise _unreadable(str(path), f"defines no function {name!r}", did_you_mean(name, functions))
    return defined[name]


def read_file(path: Path) -> UserFile:
    """Execute a file, with imports from its folder; training while it runs is an error."""
    finder = ConfigFolder(path.resolve().parent)
    finder.activate()
    module = types.ModuleType(f"config {path}")
    with calling_file(path, "Invalid config:"), refuse_training(str(path)):
        vars(module).update(runpy.run_path(str(path), run_name=module.__name__))
    # Where `typing` and `inspect` look for the names in its classes.
    sys.modules[module.__name__] = module
    return UserFile(path, vars(module), finder)


@contextlib.contextmanager
def calling_file(path: Path, title: str) -> Iterator[None]:
    """Turn errors of a user's code in the block into a `ConfigError` with their line.

    Errors of this package are raised as they are.
    """
    try:
        yield
    except (SpmdError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        where = f"{error.filename or path}:{error.lineno}"
        raise ConfigError(title, [Problem(where, f"is not Python: {error.msg}")]) from error
    except BaseException as error:
        problem = Problem(_line_of(error, path), f"fails: {_text(error)}")
        raise ConfigError(title, [problem]) from error


def copy_config(source: Path, folder: Path) -> None:
    """Write a config as `folder/config.py`, and beside it the modules imported from its folder."""
    copy = folder / "config.py"
    if source.resolve() == copy.resolve():
        return
    shutil.copyfile(source, copy)
    for finder in _active():
        files = set[Path]()
        for module in finder.imported().values():
            name = getattr(module, "__file__", None)
            if name and Path(name).is_relative_to(finder.folder):
                files.add(Path(name))
        for file in sorted(files):
            to = folder / file.relative_to(finder.folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to)


def _line_of(error: BaseException, path: Path) -> str:
    """Return file and line of an error's innermost frame in the config's folder, or the file."""
    folder = path.resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).resolve().parent == folder:
            return f"{frame.filename}:{frame.lineno}"
    return str(path)


def _text(error: BaseException) -> str:
    kind = type(error).__name__
    if str(error):
        return f"{kind}: {error}"
    return kind


def _unreadable(where: str, what: str, fix: str = "") -> ConfigError:
    return ConfigError("Invalid config:", [Problem(where, what, fix=fix)])
