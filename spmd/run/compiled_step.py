"""The compiled step in the run folder: written after it was compiled, loaded when the run resumes.

A resumed run then starts without tracing and compiling its step. The file is used if its key equals
that of the process: versions, flags, topology, devices, processor, config and source. What differs
is said, and the step is compiled. After the first step it is traced in a thread
(`spmd.training.serialized_step.LoweringCheck`); if its text is another one, the run ends before its
first save.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from spmd.checkpoint.versions import library_versions
from spmd.distributed.hosts import gather_json, plain_problems, read_problems
from spmd.distributed.initialize import user_xla_flags
from spmd.errors import CheckpointError, ConfigError, Problem, StorageError
from spmd.resilience.consistency import source_fingerprint
from spmd.run.config import config_values
from spmd.run.run_config import RunConfig
from spmd.run.run_dir import COMPILED_STEP, RunDir
from spmd.sharding.mesh import AnyMesh, axes_text
from spmd.training.compilation_cache import instructions
from spmd.training.loop import Hook
from spmd.training.serialized_step import (
    AnyStep,
    Key,
    LoweringCheck,
    NotSerializableError,
    SerializedStep,
    UnreadableError,
    install_programs,
    key_differences,
    read_step,
    serialization_fault,
    serialize_step,
)
from spmd.training.state import abstract_arguments
from spmd.training.step import StepProgram
from spmd.tree import human_bytes

NONE = "none"
"""Value of the config's `compiled_step`: nothing is loaded and nothing is written."""
MIN_SECONDS = 1.0
"""Time of a compilation from which the step is written: that of JAX's own cache."""
_NOT_TRACED = (
    *("out", "log_every", "metrics_to", "wandb", "mlflow"),
    *("checkpoint_every", "checkpoint_minutes", "keep_every", "max_to_keep", "keep_best"),
    *("evaluate", "sample", "sdc_checks", "devices", "init", "seed"),
    *("compilation_cache_dir", "compiled_step", "data.cache", "data.threads", "data.prefetch"),
)
"""Config fields without an effect on the step's program."""
_NOT_COMPILED = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_debug_log", "jax_dump"),
    *("jax_num_cpu_devices", "jax_platform", "jax_traceback", "jax_transfer_guard", "jax_tracer"),
    *("jax_cpu_get", "jax_cross_host", "jax_explain", "jax_include", "jax_pprint", "jax_share"),
)
"""First letters of JAX's settings without an effect on programs."""
_SHOWN_DIFFERENCES = 3
_MODULES = "modules"
_ABSENT = "it does not exist"


def read_bytes(path: Path) -> bytes | None:
    """Return the contents of a compiled step's file; None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def write_bytes(path: Path, data: bytes) -> None:
    """Write a compiled step's file: all of it, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.writing")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """Outcome of `load_compiled_step`.

    Attributes:
        where: The file, for people.
        loaded: The step, if its file fits.
        programs: Its programs, which a thread loads; None if there are none.
        said: Line about why a file is not used; empty if there is none, or it is.
    """

    where: str
    loaded: SerializedStep | None = None
    programs: Future[list[StepProgram]] | None = None
    said: str = ""


def load_compiled_step(
    step: AnyStep, batch: Any, config: RunConfig, folder: RunDir, source: Path | None
) -> LoadResult:
    """Begin to load the step of a run from its folder, or from the config's file, in a thread.

    `finish_loading` ends it. A step that was compiled in this process stays as it is. Every process
    makes both calls: either all of them load the step, or none does.

    Args:
        batch: Shapes of a batch.
        source: The config's file.

    Raises:
        ConfigError: The config names a file, and it cannot be used.
    """
    where = str(folder.location / COMPILED_STEP)
    if _is_named(config):
        where = str(Path(config.compiled_step).expanduser())
    is_compiled = has_programs(step, batch)
    data = None
    serialized = None
    reason = _ABSENT
    try:
        if not is_compiled:
            data = _read_file(config, folder)
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    except StorageError as error:
        reason = f"it cannot be read: {error.problems[0].what}"
    if data is not None:
        try:
            serialized = _read_fitting(data, step_key(step, batch, config, source))
            reason = serialization_fault(step)
        except UnreadableError as error:
            reason = str(error)
    reason = _common_reason(reason, data)
    if is_compiled:
        return LoadResult(where)
    if reason or serialized is None:
        return _refused(where, reason, config)
    pool = ThreadPoolExecutor(1, "spmd-load-step")
    programs = pool.submit(serialized.load, step, batch)
    pool.shutdown(wait=False)
    return LoadResult(where, serialized, programs)


def has_programs(step: AnyStep, batch: Any) -> bool:
    """Return whether each part of a step has a program for batches of this shape."""
    parts = step.part_batches(batch)
    return all(part.has_program(part_batch) for _, part, part_batch in parts)


def finish_loading(result: LoadResult, step: AnyStep, batch: Any, config: RunConfig) -> LoadResult:
    """Wait for the programs of `load_compiled_step`, and make them those of the step.

    Raises:
        ConfigError: The config names a file, and it cannot be used.
    """
    if result.programs is None:
        return result
    reason = ""
    try:
        programs = result.programs.result()
    except UnreadableError as error:
        reason = str(error)
    reason = _common_reason(reason, None)
    if reason:
        return _refused(result.where, reason, config)
    install_programs(step, batch, programs)
    return dataclasses.replace(result, programs=None)


def _read_file(config: RunConfig, folder: RunDir) -> bytes | None:
    """Return the content of a run's file; None if there is none, or none may be read."""
    if config.compiled_step == NONE:
        return None
    if _is_named(config):
        return read_bytes(Path(config.compiled_step).expanduser())
    return read_bytes(folder.fetch_compiled_step())


def _is_named(config: RunConfig) -> bool:
    """Return whether a config names a file."""
    return config.compiled_step not in ("", NONE)


def _refused(where: str, reason: str, config: RunConfig) -> LoadResult:
    """Return the result of a file not to be used; raise `ConfigError` if the config names it."""
    if _is_named(config):
        fix = "make it again with spmd compile, on this version and for these devices; or "
        fix += 'compiled_step="none", which compiles'
        problem = Problem("compiled_step", f"{where} is not used: {reason}", fix=fix)
        raise ConfigError("The compiled step cannot be loaded:", [problem])
    if reason == _ABSENT:
        return LoadResult(where)
    return LoadResult(where, said=f"{where} is not used: {reason}")


def _read_fitting(data: bytes, own: Key) -> SerializedStep:
    """Return the step of some bytes; raise `UnreadableError` for another key.

    Nothing is unpickled.
    """
    serialized = read_step(data)
    # Which modules are loaded depends on the time. The others are compared by the trace.
    stored = dict(serialized.key)
    modules = stored.get(_MODULES, {})
    common = modules.keys() & own[_MODULES].keys()
    stored[_MODULES] = {name: modules[name] for name in common}
    here = {**own, _MODULES: {name: own[_MODULES][name] for name in common}}
    differences = key_differences(stored, here)
    if not differences:
        return serialized
    shown = differences[:_SHOWN_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    raise UnreadableError("; ".join(shown))


def _common_reason(reason: str, data: bytes | None) -> str:
    """Return a reason not to load the step of any process; empty without one."""
    digest = hashlib.sha256(data or b"").hexdigest()
    everyone = gather_json([reason, digest])
    for process, (other, _) in enumerate(everyone):
        if other == _ABSENT or (other and len(everyone) == 1):
            return str(other)
        if other:
            return f"process {process}: {other}"
    if len({other for _, other in everyone}) > 1:
        return "processes read different files"
    return ""


def step_key(step: AnyStep, batch: Any, config: RunConfig, source: Path | None) -> Key:
    """Return the environment for the compilation of a step for batches of a shape.

    Devices are those of the step's mesh, which may be absent.
    """
    devices = list(step.mesh.devices.flat)
    runtime = devices[0].client.platform_version
    key: dict[str, dict[str, Any]] = {
        "topology": _topology(step.mesh),
        "versions": {**library_versions(), "runtime": runtime},
        "flags": _flags(),
        "processor": {},
        "config": _flat(config_values(config)),
        "source": {"spmd": source_fingerprint()[:16], "config": ""},
        _MODULES: _module_digests(),
    }
    if devices[0].platform == "cpu":
        key["processor"] = {"machine": platform.machine(), "instructions": instructions()}
    if source:
        key["source"]["config"] = _digest(source.read_bytes())
    for prefix, part, part_batch in step.part_batches(batch):
        arguments = jax.tree_util.tree_leaves_with_path(abstract_arguments(part.plan, part_batch))
        lines = [f"{path} {x.shape} {x.dtype} {x.sharding}" for path, x in arguments]
        key[f"{prefix}step"] = {
            "plan": _digest(part.text.encode()),
            "arguments": _digest("\n".join(lines).encode()),
            "compiler_options": dict(part.compiler_options),
        }
    normalized: Key = json.loads(json.dumps(key))
    return normalized


def _topology(mesh: AnyMesh) -> dict[str, Any]:
    """Return the sizes of a mesh, and number, kind and order of its devices."""
    devices = list(mesh.devices.flat)
    order = list[str]()
    for device in devices:
        place = getattr(device, "coords", "")
        core = getattr(device, "core_on_chip", "")
        order.append(f"{device.id} {device.process_index} {place} {core}")
    return {
        "mesh": axes_text(mesh.shape),
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": len({device.process_index for device in devices}),
        "order": _digest("\n".join(order).encode()),
    }


def _flags() -> dict[str, str]:
    """Return XLA's flags, and JAX's settings with an effect on programs, also of this thread."""
    found = user_xla_flags()
    for name, setting in jax.config.values.items():
        if not name.startswith(_NOT_COMPILED):
            found[name] = str(setting)
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted path → value of the config's fields with an effect on the program."""
    found = dict[str, Any]()
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in _NOT_TRACED:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}.")
        else:
            found[path] = value
    return found


def _module_digests() -> dict[str, str]:
    """Return name → digest of the source of each module of the user's own."""
    paths = sysconfig.get_paths()
    package = Path(__file__).parents[1]
    installed = [f"{paths[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [f"{package}/", f"{package.with_name('spmd_command.py')}"]
    found = dict[str, str]()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)  # of thousands of modules: no paths before
        if not file or not file.endswith(".py") or file.startswith(tuple(installed)):
            continue
        if Path(file).is_file():
            found[name] = _digest(Path(file).read_bytes())
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@dataclasses.dataclass(eq=False)
class CheckLoadedStep(Hook):
    """Compares the loaded step with its trace, before the first save.

    Args:
        during: Context of an activity and what it is doing.
        saves: Step → whether a checkpoint is saved after it.
    """

    check: LoweringCheck
    where: str
    during: Callable[[str, str], contextlib.AbstractContextManager[None]]
    say: Callable[[str], None]
    saves: Callable[[int], bool] = lambda step: True
    is_done: bool = dataclasses.field(default=False, init=False)

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Start the trace, once there was a first step."""
        if not self.is_done:
            self.check.start()

    def wants_state(self, step: int) -> bool:
        """Return true before the first save, and of one process when the trace is there."""
        if self.is_done:
            return False
        return self.saves(step) or (jax.process_count() == 1 and self.check.is_ready)

    def on_state(self, step: int, state: Any) -> None:
        """Raise `CheckpointError` if the trace has another text, on all processes."""
        with self.during("compile", "comparing the loaded step with its trace"):
            problems = self.check.problems()
            everyone = gather_json(plain_problems(problems))
        self.is_done = True
        for other in everyone:
            problems = problems or list(read_problems(other))
        if not problems:
            self.say("the loaded step is as it is traced here")
            return
        fix = f'remove {self.where}, or compiled_step="none", which compiles'
        problems = [dataclasses.replace(problem, fix=fix) for problem in problems]
        title = f"The loaded step is another one (after step {step}, nothing is saved):"
        raise CheckpointError(title, problems)


@dataclasses.dataclass(eq=False)
class WriteCompiledStep(Hook):
    """Writes the compiled step in a thread, after the first step.

    Args:
        before_write: Called before the file is written; raises if it must not be.
    """

    step: AnyStep
    batch: Any
    key: Key
    path: Path
    before_write: Callable[[], object]
    say: Callable[[str], None]
    _writing: Future[None] | None = dataclasses.field(default=None, init=False)

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Start the thread, once."""
        if self._writing is None:
            pool = ThreadPoolExecutor(1, "spmd-compiled-step")
            self._writing = pool.submit(self._write)
            pool.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the file."""
        if self._writing is not None:
            self._writing.result()

    def _write(self) -> None:
        try:
            data = serialize_step(self.step, self.batch, self.key)
            self.before_write()
            write_bytes(self.path, data)
        except (NotSerializableError, OSError) as error:
            self.say(f"the compiled step is not written: {error}")
            return
        self.say(f"wrote the compiled step, {human_bytes(len(data))}")


def should_write(config: RunConfig, step: AnyStep, seconds: float) -> bool:
    """Return whether this process writes a step, compiled in some seconds."""
    if config.compiled_step or jax.process_index() != 0:
        return False
    return seconds >= MIN_SECONDS and not serialization_fault(step)
