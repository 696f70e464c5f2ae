"""`spmd diff`."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from spmd.analysis.compiled_difference import PARTS, Limits, compare_compiled
from spmd.commands.parsing import parse_flags
from spmd.errors import ConfigError, Problem
from spmd.observe.spinner import spinner
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.storage.address import is_address

_TITLE = "No two compiled steps to compare:"
_WRITE = "spmd plan CONFIG --topology T --compile --json > FILE.json"
_SOME = Limits()


@dataclasses.dataclass(frozen=True)
class DiffCommand:
    """Compare two compiled steps: memory, bytes on the network, cycles, exposed communication,
    predicted time and the compiler's time, each with the causes of its change.

    A step is a JSON file of `spmd plan --compile --json`, or a config to compile now for --topology.
    REVISION:CONFIG is the config with the code of a revision of its git repository. Flags after --
    are for both configs. Exit with 1 if a total grows by more than its limit.
    """

    steps: tyro.conf.Positional[tuple[str, ...]]
    """The step before and the step after."""
    topology: str = ""
    """Target machine of configs, such as v5e:16x16; it need not be present."""
    limits: Limits = _SOME
    """Percent by which a total may grow."""
    before_python: str = ""
    """Interpreter that compiles the config before, for other versions of libraries."""
    after_python: str = ""
    """Interpreter that compiles the config after."""
    json: bool = False
    """Print one JSON object."""


def run_diff(arguments: list[str]) -> int:
    """Run `spmd diff` and return its exit code."""
    flags: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        flags = arguments[at + 1 :]
        arguments = arguments[:at]
    command = parse_flags(DiffCommand, arguments, "spmd diff")
    if len(command.steps) != 2:
        detail = f"{len(command.steps)} given"
        fix = "spmd diff BEFORE AFTER: files of JSON, or configs"
        raise ConfigError(_TITLE, [Problem("steps", "are not two", detail, fix)])
    before, after = command.steps
    steps = (
        _Step(before, command.before_python, "--before-python"),
        _Step(after, command.after_python, "--after-python"),
    )
    problems = list(_flag_problems(command, steps, flags))
    for step in steps:
        problems += step.problems()
    if problems:  # all of them, before minutes of compilation
        raise ConfigError(_TITLE, problems)
    one, other = (step.record(command.topology, flags) for step in steps)
    found = compare_compiled(one, other, command.limits)
    if command.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(wrap_to_terminal(str(found)))
    return int(found.is_exceeded)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One of the two steps, as it was asked for.

    Attributes:
        flag: The name of the flag of its interpreter.
    """

    text: str
    python: str
    flag: str

    @property
    def is_file(self) -> bool:
        """Whether it is a file of JSON."""
        return self.text.endswith(".json")

    @property
    def revision(self) -> str:
        """The revision of its code; empty without one."""
        revision, colon, _ = self.text.partition(":")
        if not colon or is_address(self.text) or revision.endswith(".py"):  # FILE.py:FUNCTION
            return ""
        return revision

    @property
    def interpreter(self) -> str:
        """The interpreter, with an absolute path."""
        if "/" in self.python:
            return str(Path(self.python).absolute())
        return self.python or sys.executable

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of its names, and of the contents of a file."""
        if self.is_file and self.python:
            what = f"has no effect on {self.text}, which was written before"
            yield Problem(self.flag, what, fix="none")
        elif self.python and shutil.which(self.interpreter) is None:
            yield Problem(self.flag, f"{self.python} is no program", fix="a Python with spmd")
        if self.is_file:
            with _collected() as found:
                _read(Path(self.text))
            yield from found
        elif self.revision:
            with _collected() as found:
                _git("rev-parse", "--verify", f"{self.revision}^{{commit}}")
            yield from found

    def record(self, topology: str, flags: Sequence[str]) -> dict[str, Any]:
        """Return the record of the step, read or compiled."""
        if self.is_file:
            return _read(Path(self.text))
        if not self.revision:
            return _compile(self.text, topology, self.interpreter, flags, Path.cwd())
        _, _, config = self.text.partition(":")
        with _checkout(self.revision) as tree:
            return _compile(config, topology, self.interpreter, flags, tree)


@contextlib.contextmanager
def _collected() -> Iterator[list[Problem]]:
    """Yield a list, and add the problems of an error inside the `with` to it."""
    found: list[Problem] = []
    try:
        yield found
    except ConfigError as error:
        found += error.problems


def _flag_problems(
    command: DiffCommand, steps: Sequence[_Step], flags: Sequence[str]
) -> Iterator[Problem]:
    configs = [step.text for step in steps if not step.is_file]
    if configs and not command.topology:
        fix = "--topology v5e:16x16"
        yield Problem("--topology", f"is needed to compile {configs[0]}", fix=fix)
    if not configs and command.topology:
        fix = "--topology is of configs, which are compiled"
        yield Problem("--topology", "has no effect on files that were written before", fix=fix)
    if not configs and flags:
        fix = "flags are of configs, which are compiled"
        yield Problem(" ".join(flags), "has no effect on files that were written before", fix=fix)


def _read(file: Path) -> dict[str, Any]:
    """Read a record; raise a `ConfigError` for a file without one."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = Problem(str(file), f"cannot be read: {error}", fix=_WRITE)
        raise ConfigError(_TITLE, [problem]) from None
    if not _is_compiled(record):
        problem = Problem(str(file), "is not of a compiled step", fix=_WRITE)
        raise ConfigError(_TITLE, [problem])
    return record


def _is_compiled(record: Any) -> bool:
    """Return whether JSON is a record of a compiled step."""
    if not isinstance(record, dict) or not record.keys() >= set(PARTS):
        return False
    memory = record["memory"]
    return isinstance(memory, dict) and isinstance(memory.get("compiled"), dict)


def _compile(
    config: str, topology: str, python: str, flags: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Compile a config in a process of its own, with the code of a folder."""
    arguments = ["plan", config, "--topology", topology, "--compile", "--json", *flags]
    command = [python, "-m", "spmd_command", *arguments]
    with spinner(f"compiling {config} for {topology}"):
        # Python finds modules in the working folder first.
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    record = None
    with contextlib.suppress(ValueError):
        record = json.loads(done.stdout)
    if not _is_compiled(record):
        last = done.stderr.strip()[-2000:] or "the compiler refuses the step"
        raise ConfigError(
            _TITLE, [Problem(f"spmd {' '.join(arguments)}", "was not compiled", last)]
        )
    return dict(record or {})


@contextlib.contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    """Check out a revision of the repository of the working folder, into a temporary one."""
    inside = _git("rev-parse", "--show-prefix").strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        _git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree / inside
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        said = getattr(error, "stderr", "") or str(error)
        problem = Problem(f"git {' '.join(arguments)}", said.strip(), fix="a revision, in a clone")
        raise ConfigError(_TITLE, [problem]) from None
    return done.stdout
