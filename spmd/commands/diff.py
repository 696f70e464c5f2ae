"""`spmd diff`."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from spmd.analysis.compiled_difference import Limits, compare_compiled
from spmd.commands.parsing import parse_flags
from spmd.errors import ConfigError, Problem
from spmd.observe.spinner import spinner
from spmd.observe.wrap_text import wrap_to_terminal

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
    problems = list(_problems(command, flags))
    if problems:
        raise ConfigError(_TITLE, problems)
    before, after = command.steps
    found = compare_compiled(
        _record(before, command.topology, command.before_python, flags),
        _record(after, command.topology, command.after_python, flags),
        command.limits,
    )
    if command.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(wrap_to_terminal(str(found)))
    return int(found.is_exceeded)


def _problems(command: DiffCommand, flags: Sequence[str]) -> Iterator[Problem]:
    if len(command.steps) != 2:
        fix = "spmd diff BEFORE AFTER: files of JSON, or configs"
        yield Problem("steps", "are not two", f"{len(command.steps)} given", fix)
        return
    configs = [step for step in command.steps if not _is_file(step)]
    if configs and not command.topology:
        fix = "--topology v5e:16x16"
        yield Problem("--topology", f"is needed to compile {configs[0]}", fix=fix)
    if not configs and command.topology:
        fix = "--topology is of configs, which are compiled"
        yield Problem("--topology", "has no effect on files that were written before", fix=fix)
    if not configs and flags:
        fix = "flags are of configs, which are compiled"
        yield Problem(" ".join(flags), "has no effect on files that were written before", fix=fix)
    pythons = {"--before-python": command.before_python, "--after-python": command.after_python}
    for (flag, python), step in zip(pythons.items(), command.steps, strict=True):
        if python and _is_file(step):
            yield Problem(flag, f"has no effect on {step}, which was written before", fix="none")


def _is_file(step: str) -> bool:
    """Return whether a step is a file of JSON."""
    return step.endswith(".json")


def _record(step: str, topology: str, python: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the record of a step, read or compiled."""
    if _is_file(step):
        return _read(Path(step))
    revision, colon, config = step.partition(":")
    if not colon or revision.endswith(".py"):  # FILE.py:FUNCTION
        return _compile(step, topology, python, flags, Path.cwd())
    with _checkout(revision) as tree:
        return _compile(config, topology, python, flags, tree)


def _read(file: Path) -> dict[str, Any]:
    """Read a record; raise a `ConfigError` for a file without one."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        problem = Problem(str(file), f"is no JSON: {error}", fix=_WRITE)
        raise ConfigError(_TITLE, [problem]) from None
    if not isinstance(record, dict) or not record.get("memory", {}).get("compiled"):
        problem = Problem(str(file), "is not of a compiled step", fix=_WRITE)
        raise ConfigError(_TITLE, [problem])
    return record


def _compile(
    config: str, topology: str, python: str, flags: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Compile a config in a process of its own, with the code of a folder."""
    command = [python or sys.executable, "-m", "spmd_command", "plan", config]
    command += ["--topology", topology, "--compile", "--json", *flags]
    with spinner(f"compiling {config} for {topology}"):
        # Python finds modules in the working folder first.
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    record = {}
    with contextlib.suppress(ValueError):
        record = json.loads(done.stdout)
    if not record.get("memory", {}).get("compiled"):
        last = done.stderr.strip()[-2000:] or "the compiler refuses the step"
        raise ConfigError(_TITLE, [Problem(" ".join(command[2:]), "was not compiled", last)])
    return record


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
