"""`spmd check`."""

import dataclasses
import json
from typing import Any, Generic, Literal

from spmd.analysis.explicit_axes import check_explicit
from spmd.commands.parsing import ConfigFields, parse_command
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, Problem
from spmd.model_api.compress import NO_COMPRESSION
from spmd.observe.waiting import show_waiting, show_waiting_for
from spmd.run.build import abstract_batch, config_mesh, make_setup, planned_mesh
from spmd.run.check import Check, Sweep, axes_text
from spmd.run.config import M, TrainConfig
from spmd.run.init_from import check_init
from spmd.run.preflight import check_microbatches


@dataclasses.dataclass(frozen=True)
class CheckCommand(Generic[M]):
    """Compare the first steps on the config's mesh with one device: the initial state, and of each step the loss,
    gradients and updates, leaf by leaf. Exit with 1 if any differs by more than its tolerance. Both start with --init,
    if given. One device takes each step from the mesh's own state.
    """

    config: ConfigFields
    check_steps: int = 3
    """Number of steps."""
    leaves: bool = False
    """Print a line for every leaf, not only for the largest error of each kind."""
    json: bool = False
    """Print one JSON object with a record for every leaf."""
    products: int = 0
    """Instead of the config's mesh, check each axis alone, each pair, and so on up to products of this many axes of
    size 2. Prints a line per mesh, with the reason if the config cannot run on it."""
    inject: Literal["", "reduction", "token-weight", "gradient-scale", "leaf-scale", "stale-microbatch"] = ""
    """Inject a bug into the run on the mesh, which the check must find: gradients summed over half of the examples,
    padding with weight, all gradients or those of one parameter 1 % too large, a microbatch that counts twice."""
    explicit: bool = False
    """Instead of taking steps, list the operations whose layout nobody decided: those that JAX refuses under Explicit
    axes, and no sharding constraint follows. Needs no device, and compiles nothing. Exit with 1 if there are any."""


def run_check(arguments: list[str]) -> int:
    """Run `spmd check`; return the exit code."""
    command, _ = parse_command(CheckCommand, arguments, "check")
    config: TrainConfig = command.config
    problems = []
    if command.check_steps < 1:
        problems.append(Problem("check-steps", f"is {command.check_steps}", fix="at least 1"))
    if command.products < 0:
        problems.append(Problem("products", f"is {command.products}", fix="the number of axes to combine, such as 2"))
    if command.products and command.leaves:
        problems.append(Problem("leaves", "shows one mesh", fix="--mesh.AXIS sizes instead of --products"))
    for name in ("products", "leaves", "inject"):
        if command.explicit and getattr(command, name):
            problems.append(Problem(name, "compares steps, and --explicit takes none", fix="ask for one of them"))
    if problems:
        raise ConfigError("Nothing to check:", problems)
    if command.explicit:
        return _check_explicit(command)
    initialize(config.devices)
    if (config.compress != NO_COMPRESSION or config.quantize) and not command.json:
        print("fewer bits change numbers by design: compression and recipes are off in this comparison")
    plain = dataclasses.replace(config, compress=NO_COMPRESSION, quantize="")
    check = Check(plain, command.check_steps)
    if (init := check_init(check.one_device)) and not command.json:
        print(init)
    return _check_products(command, check) if command.products else _check_mesh(command, check)


def _check_mesh(command: CheckCommand, check: Check) -> int:
    mesh = config_mesh(check.config)
    with show_waiting(f"comparing {axes_text(mesh.shape)} with one device"):
        parity = check.compare(mesh, command.inject)
    if command.json:
        _print_json(command, check, {"mesh": dict(mesh.shape), **parity.to_json()})
        return 0 if parity.ok else 1
    print(f"{axes_text(mesh.shape)} against one device, {check};")
    print("differences relative to the largest value of each leaf:")
    print(parity.lines(parity.rows) if command.leaves else parity)
    print(f"allowed because {parity.tolerance.why}")
    for number, (loss, alone) in enumerate(zip(parity.losses, parity.reference_losses, strict=True), 1):
        print(f"step {number}: loss {loss:.7f} on the mesh, {alone:.7f} on one device")
    if command.inject:
        found = "THE INJECTED BUG WENT UNNOTICED" if parity.ok else "the layouts differ: the injected bug was found"
        print(f"{command.inject}: {found}")
    else:
        agree = "; ".join(filter(None, ["the layouts agree", parity.ending]))
        print(agree if parity.ok else "THE LAYOUTS DIFFER")
    return 0 if parity.ok else 1


def _check_explicit(command: CheckCommand) -> int:
    setup = make_setup(command.config, planned_mesh(command.config))
    check_microbatches(setup)
    with show_waiting("checking the layout of each operation"):
        result = check_explicit(setup.step, abstract_batch(command.config))
    print(json.dumps(result.to_json(), indent=2) if command.json else result)
    return 0 if result.ok else 1


def _check_products(command: CheckCommand, check: Check) -> int:
    sweep = Sweep(check, command.products, command.inject)
    for line in show_waiting_for(sweep.lines(), "comparing with one device"):
        if not command.json:
            print(line, flush=True)
    if command.json:
        _print_json(command, check, sweep.to_json())
    return 0 if sweep.ok else 1


def _print_json(command: CheckCommand, check: Check, results: dict[str, Any]) -> None:
    about = {"steps": check.steps, "precision": check.config.precision, "injected": command.inject or None}
    print(json.dumps(about | results, indent=2))
