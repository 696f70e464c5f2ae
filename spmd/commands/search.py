"""`spmd search`."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

from spmd.analysis.topology import Topology, missing_extra, parse_topology
from spmd.commands.parsing import (
    ConfigFields,
    F,
    LaunchFields,
    StepFlags,
    leave_devices_alone,
    parse_source,
)
from spmd.commands.plan import mesh_on
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, check_local
from spmd.observe.metrics import human_duration
from spmd.observe.spinner import spin_until_each, spinner
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.run.config import M, TrainConfig
from spmd.run.load_config import load_config, shipped
from spmd.run.search import Candidate, Search, largest_batch, make_search, slice_sizes
from spmd.run.step_source import ConfigSource, StepFile, StepSource
from spmd.storage.address import is_address
from spmd.storage.output_file import output_problems, write_output
from spmd.tree import human_bytes

_ROWS = 10
"""Candidates that are printed, besides those that fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SearchOptions:
    topology: str = ""
    """Target machine, such as v5e:16x16, v4-32, h100:16x8 or mychip.toml:1x8."""
    confirm: int = 3
    """Settings to compile, of those that fit; 0 for none, as for GPUs (no cycles there)."""
    state: str = ""
    """File of results to resume from; empty for runs/search/CONFIG-TOPOLOGY.json."""
    json: bool = False
    """Print one JSON object."""
    launch_args: LaunchFields = LaunchArgs()


@dataclasses.dataclass(frozen=True)
class SearchCommand(_SearchOptions, Generic[M]):
    """Search for the fastest layout of a config on a machine: mesh, ZeRO stage, remat,
    microbatches, pipeline.

    All settings are ranked by closed forms; from the fastest on their memory is estimated, and the
    best are compiled. The machine need not exist. An interrupted search resumes. Of the fields that
    are searched (mesh, slices, zero, remat, accumulate, pipeline, offload) only remat, offload and
    pipeline.chunks of the config are tried too.
    """

    config: ConfigFields
    days: float = 0.0
    """Find the fewest chips of the machine's kind that train all steps in so many days."""
    largest_batch: bool = False
    """Search for the largest batch that fits with the config's own settings."""
    write: str = ""
    """Write a config with the best settings to this Python file."""


@dataclasses.dataclass(frozen=True)
class SearchStepCommand(_SearchOptions, Generic[F]):
    """Search for the fastest layout of your own train step on a machine: the mesh, and zero, remat,
    accumulate and offload if they are settings of its file.

    FILE defines make(mesh, **settings), which returns a step from spmd.make_train_step and a batch.
    Layouts are ranked by a roofline of the traced step; from the fastest on their memory is
    estimated, and the best are compiled.
    """

    flags: StepFlags[F]


def run_search(arguments: list[str]) -> int:
    """Run `spmd search`; return 3 if nothing fits."""
    leave_devices_alone(arguments)
    command, source, path = parse_source(SearchCommand, SearchStepCommand, arguments, "search")
    base = _name_for_code(arguments[0], path)
    problems = list(_problems(command, base))
    if problems:
        raise ConfigError("Nothing to search for:", problems)
    topology = parse_topology(command.topology)
    if isinstance(command, SearchCommand) and command.largest_batch:
        return _print_largest(command, command.config, topology)
    if isinstance(command, SearchCommand) and command.days:
        smallest = _fewest(command, topology, path)
        if smallest is None:
            return 3
        topology = smallest
    search = _search(command, source, topology, path)
    _examine(command, search)
    best = search.best
    write = command.write if isinstance(command, SearchCommand) else ""
    if best is not None and write:
        _write(command, topology, base, best)
    if command.json:
        print(json.dumps(_to_json(search, best), indent=2))
    elif best is None:
        _print_nothing(search)
    else:
        _print_table(search, best)
        if write:
            print(f"written to {write}")
    if best is None:
        return 3
    return 0


def _problems(command: _SearchOptions, base: str) -> Iterator[Problem]:
    if not command.topology:
        yield Problem("--topology", "is not given", fix="a machine, such as v5p:4x4x8")
        return
    if command.confirm < 0:
        yield Problem("--confirm", f"is {command.confirm}", fix="at least 0")
    yield from check_local("--state", command.state)
    topology = parse_topology(command.topology)
    if isinstance(command, SearchCommand):
        yield from _config_problems(command, topology, base)
    if command.confirm and topology.platform == "tpu":
        absent = missing_extra(topology)
        if absent:
            yield dataclasses.replace(absent, fix=f"{absent.fix}, or --confirm 0")


def _config_problems(command: SearchCommand, topology: Topology, base: str) -> Iterator[Problem]:
    if command.days < 0:
        yield Problem("--days", f"is {command.days}", fix="above 0")
    if command.write:
        yield from _write_problems(command, base)
    if command.days and command.largest_batch:
        yield Problem(
            "--days",
            "is another search than --largest-batch",
            fix="ask for one of them",
        )
    if command.largest_batch and topology.memory is None:
        yield Problem(
            "--largest-batch",
            f"{topology} has no memory of its own",
            fix="a TPU or a GPU, such as v5e:16x16",
        )


def _write_problems(command: SearchCommand, base: str) -> Iterator[Problem]:
    if command.largest_batch:
        yield Problem(
            "--write",
            "has no settings to write with --largest-batch",
            fix="ask for one of them",
        )
    yield from output_problems("--write", command.write)  # before minutes of compilation
    if is_address(command.write) and not is_address(base) and base not in shipped():
        what = f"is in a bucket, and the config would be based on {base}, on a disk"
        yield Problem("--write", what, fix="a shipped CONFIG, or one in the bucket")


def _search(command: _SearchOptions, source: StepSource, topology: Topology, path: Path) -> Search:
    """Rank all settings, with the figures of an earlier search."""
    machine = str(topology).replace(":", "-")
    default = Path("runs", "search", f"{path.stem}-{machine}.json")
    with spinner("ranking settings"):
        return make_search(source, topology, Path(command.state or default))


def _examine(command: _SearchOptions, search: Search) -> None:
    """Estimate and compile settings from the fastest on.

    It ends when as many as asked for are compiled, or without compilation when one fits.
    """
    wanted = 0
    if search.topology.platform == "tpu":
        wanted = command.confirm
    if not command.json:
        _print_start(search)
    compiled = 0
    fitting = search.fitting(len(search.candidates))
    for candidate in spin_until_each(fitting, "estimating memory"):
        if candidate.refused:
            continue
        if wanted:
            if candidate.compiled is None and not command.json:
                print(f"compiling {compiled + 1} of {wanted}: {candidate.flags}", flush=True)
            search.confirm(candidate)
        if candidate.compiled is not None:
            compiled += 1
        if compiled >= wanted:
            return


def _print_start(search: Search) -> None:
    count = len(search.candidates)
    text = f"{count} settings, whose memory is estimated from the fastest on"
    known = len(search.known)
    if known:
        text += f"; {known} are known from {search.file}"
    print(text, flush=True)
    if search.topology.chip.calibration:
        print(search.topology.chip.calibration, flush=True)


def _fewest(command: SearchCommand, topology: Topology, path: Path) -> Topology | None:
    """Return the smallest machine of a kind to train all steps in time, or None."""
    command_for_each = dataclasses.replace(command, state="")
    config = command.config
    for machine in slice_sizes(topology):
        search = _search(command_for_each, ConfigSource(config), machine, path)
        days = _fewest_days(search, config.steps)
        if not command.json:
            found = "nothing fits"
            if days is not None:
                found = f"{days:.3g} days"
            print(f"{machine}: {machine.chips} chips: {found}", flush=True)
        if days is not None and days <= command.days:
            return machine
    if command.json:
        print(json.dumps({"best": None}))
    else:
        print(
            f"no machine of up to {machine.chips} chips trains {config.steps} steps "
            f"in {command.days:g} days"
        )
    return None


def _fewest_days(search: Search, steps: int) -> float | None:
    """Return the days of all steps with the fastest fitting settings; None if nothing fits."""
    for candidate in search.fitting(1):
        if not candidate.refused:
            return candidate.seconds * steps / 86_400
    return None


def _print_largest(command: SearchCommand, config: TrainConfig[Any], topology: Topology) -> int:
    with spinner("estimating memory of larger and larger batches"):
        config = dataclasses.replace(config, devices=topology.devices)
        mesh = mesh_on(str(topology), ConfigSource(config))
        batch, memory = largest_batch(config, topology, mesh)
    used = human_bytes(memory)
    if command.json:
        print(json.dumps({"batch": batch or None, "memory": memory}))
    elif batch:
        print(f"--data.batch {batch} fits {topology}: {used} on each device")
    else:
        print(f"no batch fits {topology}: {used} with one example on each device")
    if not batch:
        return 3
    return 0


def _print_table(search: Search, best: Candidate) -> None:
    how = "closed form"
    if isinstance(search.source, StepFile):
        how = "roofline"
    print(f"\n{how:>12}{'compiled':>12}{'memory':>10}  settings")
    shown = _shown(search)
    shown.sort(key=lambda candidate: (bool(candidate.refused), candidate.seconds))
    for candidate in shown:
        closed = ""
        if candidate.spent:
            closed = human_duration(sum(candidate.spent.values()))
        compiled = ""
        if candidate.compiled:
            compiled = human_duration(candidate.compiled)
        memory = ""
        if candidate.memory:
            memory = human_bytes(candidate.memory)
        row = f"{closed:>12}{compiled:>12}{memory:>10}  {candidate.flags}"
        print(wrap_to_terminal(row, indent=24))
        if candidate is not best:
            print(wrap_to_terminal(f"{'':36}{candidate.loses(best)}", indent=0))
    how = f"{how}s"
    if best.compiled:
        how = "its compiled program"
    print(f"\nbest, {human_duration(best.seconds)} by {how}:\n{best.flags}")


def _shown(search: Search) -> list[Candidate]:
    """Return all fitting candidates, and some of the others."""
    fitting, refused, unknown = [], [], []
    for candidate in search.candidates:
        if candidate.refused:
            refused.append(candidate)
        elif candidate.memory is None:
            unknown.append(candidate)
        else:
            fitting.append(candidate)
    shown = fitting + refused[:_ROWS]
    room = max(0, _ROWS - len(shown))
    return shown + unknown[:room]


def _print_nothing(search: Search) -> None:
    limit = human_bytes(search.topology.memory or 0)
    print(f"nothing fits {search.topology}: {limit} on each device")
    nearest = search.nearest
    if nearest is not None:
        print(f"nearest: {human_bytes(nearest.memory or 0)} with {nearest.flags}")
    else:
        print("no mesh divides batch and model, or none of them can run")
        for candidate in search.candidates[:1]:
            print(f"the first, {candidate.flags}: {candidate.refused}")
    if isinstance(search.source, ConfigSource):
        print("try more chips, a smaller --data.batch, or --offload optimizer_state params")
    else:
        print("try more chips, or a smaller batch")


def _to_json(search: Search, best: Candidate | None) -> dict[str, Any]:
    examined = []
    for candidate in search.candidates:
        if candidate.memory is not None or candidate.compiled is not None:
            examined.append(_candidate_json(candidate, best))
    best_json = None
    if best is not None:
        best_json = _candidate_json(best, best)
    return {
        "topology": str(search.topology),
        "settings": len(search.candidates),
        "best": best_json,
        "examined": examined,
    }


def _candidate_json(candidate: Candidate, best: Candidate | None) -> dict[str, Any]:
    loses: str | None = None
    if best is None:
        loses = candidate.refused
    elif candidate is not best:
        loses = candidate.loses(best)
    return {
        "flags": candidate.flags,
        "seconds": candidate.seconds,
        "closed_form": sum(candidate.spent.values()),
        "compiled": candidate.compiled,
        "memory": candidate.memory,
        "loses": loses,
    }


def _write(command: SearchCommand, topology: Topology, name: str, best: Candidate) -> None:
    """Write the best settings as a config with those of `name` as its base."""
    # A number of simulated devices would contradict the mesh.
    found = dataclasses.replace(command.config, **best.settings, devices=0)
    code = _code(found, load_config(name), "base")
    about = (
        f"{Path(name).stem} on {topology}, as found by `spmd search`: {best.seconds:.4g} s a step."
    )
    text = (
        f'"""{about}"""\n\n'
        "import dataclasses\n\nfrom spmd.run.load_config import load_config\n\n"
        f"base = load_config({json.dumps(name)})\nconfig = {code}\n"
    )
    write_output("--write", command.write, text)


def _name_for_code(given: str, path: Path) -> str:
    """Return a config's name for code: an address as given, a shipped name, or the file."""
    if is_address(given):
        return given
    for name, file in shipped().items():
        if file == path:
            return name
    return str(path)


def _code(value: Any, old: Any, expression: str) -> str:
    """Return code for a value; of a dataclass, code for the fields unlike an old one.

    Args:
        expression: Code for the old one; `base` is written over several lines.
    """
    if isinstance(value, tuple):
        items = [f"{_code(item, None, '')}," for item in value]
        return f"({' '.join(items)})"
    if isinstance(value, str):
        return json.dumps(value)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = [expression]
    for field in dataclasses.fields(value):
        new_part = getattr(value, field.name)
        old_part = getattr(old, field.name)
        if new_part != old_part:
            code = _code(new_part, old_part, f"{expression}.{field.name}")
            given.append(f"{field.name}={code}")
    if expression == "base":
        lines = "".join(f"    {line},\n" for line in given)
        return f"dataclasses.replace(\n{lines})"
    return f"dataclasses.replace({', '.join(given)})"
