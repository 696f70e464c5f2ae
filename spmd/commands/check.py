"""`spmd check`."""

import dataclasses
import json
from typing import Any, Generic, Literal

import jax

from spmd.analysis.explicit_axes import check_explicit
from spmd.analysis.xla_fault_report import FaultReport, find_faults
from spmd.commands.parsing import (
    ConfigFields,
    F,
    LaunchFields,
    StepFlags,
    parse_source,
    value_of,
)
from spmd.commands.processes import start_devices
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, Problem
from spmd.observe.spinner import spin_until_each, spinner
from spmd.parity.bugs import Bug
from spmd.parity.result import Parity
from spmd.run.build import config_mesh, evaluation_config, make_setup, planned_mesh
from spmd.run.check import Check, StepCheck, Sweep
from spmd.run.config import M, TrainConfig
from spmd.run.init_from import check_init
from spmd.run.preflight import check_microbatches
from spmd.run.step_source import ConfigSource, ReadyStep, StepFile
from spmd.settings.compress import NO_COMPRESSION
from spmd.sharding.mesh import AnyMesh, axes_text, mesh_of
from spmd.training.step import TrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CheckOptions:
    leaves: bool = False
    """Print a line for every leaf, not only for the largest error of each kind."""
    json: bool = False
    """Print one JSON object with a record for every leaf."""
    products: int = 0
    """Instead of one mesh, check every product of up to this many axes of size 2, a line each."""
    inject: Literal["", Bug] = ""
    """Inject a bug that the check must find: gradients of half of the examples, padding with weight,
    all gradients or those of one parameter 1 % too large, a microbatch that counts twice."""
    explicit: bool = False
    """Instead of taking steps, list operations with an ambiguous layout: JAX refuses them under
    Explicit axes, and no sharding constraint follows. Compiles nothing. Exit code 1 if there are
    any."""
    launch_args: LaunchFields = LaunchArgs()


@dataclasses.dataclass(frozen=True)
class CheckCommand(_CheckOptions, Generic[M]):
    """Compare the first steps on the config's mesh with one device, leaf by leaf.

    These are the initial state, and of each step the loss, gradients and updates. Exit with 1 if
    any differs by more than its tolerance. Both start with --init, if given. One device takes each
    step from the mesh's own state. Before that, list the operations that XLA computes wrongly where
    it splits them, and what is computed instead.
    """

    config: ConfigFields
    check_steps: int = 3
    """Number of steps."""


@dataclasses.dataclass(frozen=True)
class CheckStepCommand(_CheckOptions, Generic[F]):
    """Compare the first steps of your own train step on a mesh with one device, as for a config.

    FILE defines make(mesh, **settings), which returns a step from spmd.make_train_step and a batch
    or a list of batches; FILE.py:FUNCTION is another function. --devices N simulates N CPU devices.
    """

    flags: StepFlags[F]
    check_steps: int = 0
    """Number of steps; 0 is one for each batch."""


def run_check(arguments: list[str]) -> int:
    """Run `spmd check`; return the exit code."""
    devices = value_of("--devices", arguments)
    if devices.isdigit():  # before a file is executed, which may use them
        initialize(int(devices))
    command, source, _ = parse_source(CheckCommand, CheckStepCommand, arguments, "check")
    if not isinstance(source, ConfigSource):
        return _check_step(command, source)
    config: TrainConfig = command.config
    _check_flags(command, at_least=1)
    if command.explicit:
        return _check_explicit(command)
    start_devices(config.devices, command)
    _check_processes(command)
    if not command.json:
        _print_left_out(config)
    plain = dataclasses.replace(
        evaluation_config(config), teacher=config.teacher, distillation=config.distillation
    )
    check = Check(plain, command.check_steps)
    init = check_init(check.one_device)
    if init and not command.json:
        print(init)
    mesh = None
    setup = check.one_device
    if not command.products:
        mesh = config_mesh(plain)
        setup = check.setup_on(mesh)
    faults = find_faults(setup.step, setup.batch)
    return _run(command, check, mesh, faults)


def _print_left_out(config: TrainConfig) -> None:
    """Print what changes numbers by design, and so is off in the comparison."""
    if config.compress != NO_COMPRESSION or config.quantize:
        print(
            "fewer bits change numbers by design: compression and recipes are off in this "
            "comparison"
        )
    if config.diloco.every:
        print("replicas differ by design: ordinary data parallelism is checked in their place")


def _check_step(command: CheckStepCommand, source: StepFile | ReadyStep) -> int:
    _check_flags(command, at_least=0)
    start_devices(source.devices, command)
    _check_processes(command)
    check = StepCheck(source.make_on, command.check_steps)
    mesh = None
    if command.products:
        step, batches = check.one_device
    else:
        mesh = mesh_of(source.shape, jax.devices())
        step, batches = check.made_on(mesh)
    if command.explicit:
        return _print_explicit(command, step, batches[0])
    return _run(command, check, mesh, find_faults(step, batches[0]))


def _check_flags(command: CheckCommand | CheckStepCommand, at_least: int) -> None:
    problems = []
    if command.check_steps < at_least:
        problems.append(
            Problem("check-steps", f"is {command.check_steps}", fix=f"at least {at_least}")
        )
    if command.products < 0:
        problems.append(
            Problem(
                "products",
                f"is {command.products}",
                fix="the number of axes to combine, such as 2",
            )
        )
    if command.products and command.leaves:
        problems.append(
            Problem(
                "leaves",
                "shows one mesh",
                fix="--mesh.AXIS sizes instead of --products",
            )
        )
    for name in ("products", "leaves", "inject"):
        if command.explicit and getattr(command, name):
            problems.append(
                Problem(
                    name,
                    "compares steps, and --explicit takes none",
                    fix="ask for one of them",
                )
            )
    if problems:
        raise ConfigError("Nothing to check:", problems)


def _check_processes(command: _CheckOptions) -> None:
    """Raise if several processes are asked for meshes of a part of their devices."""
    processes = jax.process_count()
    if not command.products or processes == 1:
        return
    what = f"are compared by one process, and there are {processes}"
    fix = "one process with --devices, or a mesh of all devices (products=0)"
    detail = "on a mesh of fewer devices some processes have none"
    problem = Problem("products", what, detail, fix)
    raise ConfigError("Nothing to check:", [problem])


def _run(
    command: _CheckOptions,
    check: Check | StepCheck,
    mesh: AnyMesh | None,
    faults: FaultReport,
) -> int:
    """Compare one mesh with one device, or without a mesh all products of axes."""
    if not command.json:
        print(faults, flush=True)
    if mesh is None:
        return _check_products(command, check, faults)
    return _check_mesh(command, check, mesh, faults)


def _check_mesh(
    command: _CheckOptions, check: Check | StepCheck, mesh: AnyMesh, faults: FaultReport
) -> int:
    with spinner(f"comparing {axes_text(mesh.shape)} with one device"):
        parity = check.compare(mesh, command.inject)
    if command.json:
        results = {"mesh": dict(mesh.shape), **parity.to_json()}
        _print_json(command, check, faults, results)
    else:
        print(f"{axes_text(mesh.shape)} against one device, {check};")
        _print_parity(command, parity)
    return _exit_code(parity.ok)


def _print_parity(command: _CheckOptions, parity: Parity) -> None:
    print("differences relative to the largest value of each leaf:")
    if command.leaves:
        print(parity.lines(parity.rows))
    else:
        print(parity)
    print(f"allowed because {parity.tolerance.why}")
    losses = zip(parity.losses, parity.reference_losses, strict=True)
    for number, (loss, alone) in enumerate(losses, 1):
        print(f"step {number}: loss {loss:.7f} on the mesh, {alone:.7f} on one device")
    if command.inject and parity.ok:
        print(f"{command.inject}: THE INJECTED BUG WENT UNNOTICED")
    elif command.inject:
        print(f"{command.inject}: the layouts differ: the injected bug was found")
    elif not parity.ok:
        print("THE LAYOUTS DIFFER")
    elif parity.ending:
        print(f"the layouts agree; {parity.ending}")
    else:
        print("the layouts agree")


def _exit_code(ok: bool) -> int:
    if ok:
        return 0
    return 1


def _check_explicit(command: CheckCommand[Any]) -> int:
    setup = make_setup(command.config, planned_mesh(command.config))
    check_microbatches(setup)
    return _print_explicit(command, setup.step, setup.batch)


def _print_explicit(command: _CheckOptions, step: TrainStep, batch: Any) -> int:
    with spinner("checking the layout of each operation"):
        result = check_explicit(step, batch)
    if command.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        print(result)
    return _exit_code(result.ok)


def _check_products(command: _CheckOptions, check: Check | StepCheck, faults: FaultReport) -> int:
    sweep = Sweep(check, command.products, command.inject)
    for line in spin_until_each(sweep.lines(), "comparing with one device"):
        if not command.json:
            print(line, flush=True)
    if command.json:
        _print_json(command, check, faults, sweep.to_json())
    return _exit_code(sweep.ok)


def _print_json(
    command: _CheckOptions,
    check: Check | StepCheck,
    faults: FaultReport,
    results: dict[str, Any],
) -> None:
    record = {
        "steps": check.count,
        "precision": check.precision,
        "injected": command.inject or None,
        "xla_faults": faults.to_json(),
        **results,
    }
    print(json.dumps(record, indent=2))
