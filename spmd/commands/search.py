"""`spmd search`."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

from spmd.analysis.topology import EXAMPLES, Topology, missing_extra, parse_topology
from spmd.commands.parsing import ConfigFields, parse_command
from spmd.commands.plan import mesh_on
from spmd.errors import ConfigError, Problem
from spmd.observe.fit import fitted
from spmd.observe.metrics import human_duration
from spmd.observe.waiting import show_waiting, show_waiting_for
from spmd.run.config import M, TrainConfig
from spmd.run.load_config import load_config, shipped
from spmd.run.search import Candidate, Search, largest_batch, slice_sizes
from spmd.tree import human_bytes

_ROWS = 10
"""Candidates that are printed, besides those that fit."""


@dataclasses.dataclass(frozen=True)
class SearchCommand(Generic[M]):
    """Search for the fastest layout of a config on a machine: mesh, ZeRO stage, remat, microbatches, pipeline.

    All settings are ranked by closed forms; from the fastest on their memory is estimated, and the best are compiled.
    The machine need not exist. An interrupted search resumes. Of the fields that are searched (mesh, slices, zero,
    remat, accumulate, pipeline, offload) only remat, offload and pipeline.chunks of the config are tried too.
    """

    config: ConfigFields
    topology: str = ""
    """Target machine, such as v5e:16x16 or h100:16x8."""
    confirm: int = 3
    """Number of settings that fit and are compiled; 0 for none, as for GPUs, whose programs have no cycles."""
    days: float = 0.0
    """Search for the fewest chips of the machine's kind that train all steps in so many days; its size is not used."""
    largest_batch: bool = False
    """Search for the largest batch that fits with the config's own settings."""
    write: str = ""
    """Write a config with the best settings to this Python file."""
    state: str = ""
    """What is known of settings, to resume from; empty for runs/search/CONFIG-TOPOLOGY.json, by the file's name."""
    json: bool = False
    """Print one JSON object."""


def run_search(arguments: list[str]) -> int:
    """Run `spmd search`; return 3 if nothing fits."""
    command, path = parse_command(SearchCommand, arguments, "search")
    if problems := list(_problems(command)):
        raise ConfigError("Nothing to search for:", problems)
    topology, config = parse_topology(command.topology), command.config
    if command.largest_batch:
        return _print_largest(command, config, topology)
    if command.days:
        smallest = _fewest(command, config, topology, path)
        if smallest is None:
            return 3
        topology = smallest
    search = _search(command, config, topology, path)
    _examine(command, search)
    best = search.best
    if best is not None and command.write:
        _write(command, topology, path, best)
    if command.json:
        print(json.dumps(_to_json(search, best), indent=2))
    elif best is None:
        _print_nothing(search)
    else:
        _print_table(search, best)
        if command.write:
            print(f"written to {command.write}")
    return 0 if best else 3


def _problems(command: SearchCommand) -> Iterator[Problem]:
    if not command.topology:
        yield Problem("--topology", "is not given", fix=f"a machine, such as {EXAMPLES.split(', ')[2]}")
        return
    if command.confirm < 0:
        yield Problem("--confirm", f"is {command.confirm}", fix="at least 0")
    if command.days < 0:
        yield Problem("--days", f"is {command.days}", fix="above 0")
    if command.write and command.largest_batch:
        yield Problem("--write", "has no settings to write with --largest-batch", fix="ask for one of them")
    if command.write and not Path(command.write).absolute().parent.is_dir():  # before minutes of compilation
        yield Problem("--write", f"{command.write} is in no folder that exists", fix="--write FILE in one that does")
    if command.days and command.largest_batch:
        yield Problem("--days", "is another search than --largest-batch", fix="ask for one of them")
    topology = parse_topology(command.topology)
    if command.largest_batch and topology.memory is None:
        yield Problem(
            "--largest-batch", f"{topology} has no memory of its own", fix="a TPU or a GPU, such as v5e:16x16"
        )
    if command.confirm and topology.platform == "tpu" and (absent := missing_extra(topology)):
        yield dataclasses.replace(absent, fix=f"{absent.fix}, or --confirm 0")


def _search(command: SearchCommand, config: TrainConfig[Any], topology: Topology, path: Path) -> Search:
    name = f"{path.stem}-{str(topology).replace(':', '-')}.json"
    with show_waiting("ranking settings"):
        return Search(config, topology, Path(command.state or Path("runs", "search", name)))


def _examine(command: SearchCommand, search: Search) -> None:
    """Estimate and compile settings from the fastest on, until as many as asked for are compiled, or one fits."""
    wanted, compiled, known = command.confirm if search.topology.platform == "tpu" else 0, 0, len(search.known)
    if not command.json:
        resumed = f"; {known} are known from {search.file}" if known else ""
        print(f"{len(search.candidates)} settings, whose memory is estimated from the fastest on{resumed}", flush=True)
    for candidate in show_waiting_for(search.fitting(len(search.candidates)), "estimating memory"):
        if candidate.refused:
            continue
        if wanted and candidate.compiled is None and not command.json:
            print(f"compiling {compiled + 1} of {wanted}: {candidate.flags}", flush=True)
        if wanted:
            search.confirm(candidate)
        compiled += candidate.compiled is not None
        if compiled >= wanted:
            return


def _fewest(command: SearchCommand, config: TrainConfig[Any], topology: Topology, path: Path) -> Topology | None:
    """Return the smallest machine of a kind that trains all steps in time, or None."""
    for machine in slice_sizes(topology):
        search = _search(dataclasses.replace(command, state=""), config, machine, path)
        fitting = next((c for c in search.fitting(1) if not c.refused), None)
        days = fitting and fitting.seconds * config.steps / 86_400
        if not command.json:
            found = f"{days:.3g} days" if days else "nothing fits"
            print(f"{machine}: {machine.chips} chips: {found}", flush=True)
        if days and days <= command.days:
            return machine
    if command.json:
        print(json.dumps({"best": None}))
    else:
        print(f"no machine of up to {machine.chips} chips trains {config.steps} steps in {command.days:g} days")
    return None


def _print_largest(command: SearchCommand, config: TrainConfig[Any], topology: Topology) -> int:
    with show_waiting("estimating memory of larger and larger batches"):
        devices = dataclasses.replace(config, devices=topology.devices)
        batch, memory = largest_batch(devices, topology, mesh_on(str(topology), devices))
    if command.json:
        print(json.dumps({"batch": batch or None, "memory": memory}))
    elif batch:
        print(f"--data.batch {batch} fits {topology}: {human_bytes(memory)} on each device")
    else:
        print(f"no batch fits {topology}: {human_bytes(memory)} with one example on each device")
    return 0 if batch else 3


def _print_table(search: Search, best: Candidate) -> None:
    examined = [c for c in search.candidates if c.memory is not None or c.refused]
    shown = [c for c in examined if not c.refused] + [c for c in examined if c.refused][:_ROWS]
    shown += [c for c in search.candidates if c.memory is None and not c.refused][: max(0, _ROWS - len(shown))]
    print(f"\n{'closed form':>12}{'compiled':>12}{'memory':>10}  settings")
    for candidate in sorted(shown, key=lambda c: (bool(c.refused), c.seconds)):
        compiled = human_duration(candidate.compiled) if candidate.compiled else ""
        memory = human_bytes(candidate.memory) if candidate.memory else ""
        closed = human_duration(sum(candidate.spent.values()))
        print(fitted(f"{closed:>12}{compiled:>12}{memory:>10}  {candidate.flags}", indent=24))
        if candidate is not best:
            print(fitted(f"{'':36}{candidate.loses(best)}", indent=0))
    how = "its compiled program" if best.compiled else "closed forms"
    print(f"\nbest, {human_duration(best.seconds)} by {how}:\n{best.flags}")


def _print_nothing(search: Search) -> None:
    print(f"nothing fits {search.topology}: {human_bytes(search.topology.memory or 0)} on each device")
    if (nearest := search.nearest) is not None:
        print(f"nearest: {human_bytes(nearest.memory or 0)} with {nearest.flags}")
    else:
        print("no mesh divides batch and model, or none of them can run")
    print("try more chips, a smaller --data.batch, or --offload optimizer_state params")


def _to_json(search: Search, best: Candidate | None) -> dict[str, Any]:
    def one(candidate: Candidate) -> dict[str, Any]:
        return {
            "flags": candidate.flags,
            "seconds": candidate.seconds,
            "closed_form": sum(candidate.spent.values()),
            "compiled": candidate.compiled,
            "memory": candidate.memory,
            "loses": None if candidate is best else candidate.loses(best) if best else candidate.refused,
        }

    examined = [one(c) for c in search.candidates if c.memory is not None or c.compiled is not None]
    counts = {"topology": str(search.topology), "settings": len(search.candidates)}
    return counts | {"best": one(best) if best else None, "examined": examined}


def _write(command: SearchCommand, topology: Topology, path: Path, best: Candidate) -> None:
    name = next((name for name, file in shipped().items() if file == path), str(path))
    # A number of simulated devices would contradict the mesh.
    found = dataclasses.replace(command.config, **best.settings, devices=0)
    text = (
        f'"""{path.stem} on {topology}, as found by `spmd search`: {best.seconds:.4g} s a step."""\n\n'
        "import dataclasses\n\nfrom spmd.run.load_config import load_config\n\n"
        f"base = load_config({json.dumps(name)})\nconfig = {_code(found, load_config(str(path)), 'base')}\n"
    )
    try:
        Path(command.write).write_text(text, encoding="utf-8")
    except OSError as error:
        problem = Problem("--write", f"{command.write}: {error.strerror}", fix="a file in a folder that exists")
        raise ConfigError("The config cannot be written:", [problem]) from None


def _code(value: Any, old: Any, expression: str) -> str:
    """Return code for a value; of a dataclass, code that replaces what differs from an old one."""
    if isinstance(value, tuple):
        return f"({' '.join(_code(item, None, '') + ',' for item in value)})"
    if not dataclasses.is_dataclass(value):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    names = [field.name for field in dataclasses.fields(value)]
    changed = [name for name in names if getattr(value, name) != getattr(old, name)]
    given = [f"{n}={_code(getattr(value, n), getattr(old, n), f'{expression}.{n}')}" for n in changed]
    if expression == "base":
        return "dataclasses.replace(\n" + "".join(f"    {line},\n" for line in (expression, *given)) + ")"
    return f"dataclasses.replace({', '.join([expression, *given])})"
