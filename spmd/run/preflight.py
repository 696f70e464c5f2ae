"""Check and measure a run before it starts: its batch, its trace, its memory, and its compiled step."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spmd.analysis.collective_audit import CollectiveAudit, audit_collectives
from spmd.analysis.cycles import Cycles, count_cycles
from spmd.analysis.hlo import HloModule, parse
from spmd.analysis.memory import CompiledMemory, Estimate, estimate_memory, read_memory
from spmd.analysis.topology import Topology, topology_devices
from spmd.data.loader import check_batch_size
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.distributed.native_output import compiler_log
from spmd.errors import ConfigError, Problem, SpmdError
from spmd.pipeline.tick_table import tabulate
from spmd.run.build import TrainSetup, abstract_batch, count_microbatches, make_setup
from spmd.run.config import TrainConfig, config_values
from spmd.run.init_from import check_init
from spmd.sharding.mesh import AnyMesh, mesh_of
from spmd.training.compilation_cache import compilation_cache


def check_microbatches(setup: TrainSetup) -> None:
    """Check that the batch divides into microbatches, and a microbatch over the mesh."""
    data, parts = setup.config.data, setup.config.accumulate * count_microbatches(setup.config, setup.schedule)
    check_batch_size(data.batch, data.sequence, setup.plan.batch_sharding("tokens"), parts)


def check_config(setup: TrainSetup) -> None:
    """Raise for what no mesh changes: values that cannot be recorded, and a sample without room."""
    config_values(setup.config)
    if setup.config.sample.prompt:
        count_sample_tokens(setup.config, load_tokenizer(setup.config.data.tokenizer))


def check_step(setup: TrainSetup) -> None:
    """Raise for a batch or an activation that does not fit the mesh."""
    check_microbatches(setup)
    setup.step.trace(abstract_batch(setup.config))


def preflight(setup: TrainSetup) -> None:
    """Raise for what cannot run, before anything is allocated or compiled."""
    check_config(setup)
    check_step(setup)


def check_planned_init(setup: TrainSetup) -> str:
    """Return a line about the initial parameters; a folder that is not on this machine may be on that of the run."""
    init = setup.config.init
    if init and not Path(init).exists():
        return f"starts with {init}, which is not on this machine and was not checked"
    return check_init(setup)


def count_sample_tokens(config: TrainConfig, tokenizer: Tokenizer) -> int:
    """Return how many tokens of the sample fit behind its prompt; raise `ConfigError` if none does."""
    tokens, window = len(tokenizer.encode_prompt(config.sample.prompt)), config.data.sequence
    if tokens >= window:
        detail = f"{tokens} prompt tokens >= data.sequence = {window}"
        fix = f"--data.sequence {tokens + 1} or more, or a shorter --sample.prompt, or '' for no sample"
        problem = Problem("sample.prompt", "leaves no room for a token", detail, fix)
        raise ConfigError("The sample cannot be generated:", [problem])
    return min(config.sample.tokens, window - tokens)


def estimate_step(setup: TrainSetup, platform: str = "cpu") -> Estimate:
    """Estimate the memory of the step on each device, from its trace, for one platform's compiler."""
    return estimate_memory(setup.step, abstract_batch(setup.config), platform)


class CompiledStep(NamedTuple):
    """Compiled step, read; memory and cycles are None where the compiler reports none."""

    audit: CollectiveAudit
    memory: CompiledMemory | None
    cycles: Cycles | None
    program: HloModule


def compile_step(setup: TrainSetup) -> CompiledStep:
    """Compile the step and read the program; raise `MemoryError` if the compiler finds no room."""
    with compilation_cache(None), compiler_log() as log:  # a cached program has no compiler log
        try:
            compiled = setup.step.compile(abstract_batch(setup.config))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(str(error).partition("\n")[0]) from None
    program, taken = parse(compiled.as_text() or ""), tabulate(setup.schedule).taken if setup.schedule else {}
    traced = setup.step.trace(abstract_batch(setup.config))  # JAX still has it
    slices = setup.config.slices.sizes
    collectives = audit_collectives(
        program, setup.mesh, log=log, slices=slices, taken=taken, plan=setup.plan, jaxpr=traced.jaxpr
    )
    try:
        cycles = count_cycles(program, taken)
    except ConfigError as error:  # a loop of unknown length is no reason to show nothing
        cycles, collectives = None, dataclasses.replace(collectives, warnings=(*collectives.warnings, *error.problems))
    return CompiledStep(collectives, read_memory(compiled), cycles, program)


def compile_text(setup: TrainSetup) -> str:
    """Return the text of the compiled step."""
    with compilation_cache(None), compiler_log():
        return setup.step.compile(abstract_batch(setup.config)).as_text() or ""


def topology_mesh(config: TrainConfig, topology: Topology) -> AnyMesh:
    """Return the config's mesh over the devices of an absent machine."""
    return mesh_of(config.mesh, topology_devices(topology), config.slices.sizes)


def suggest_memory_settings(setup: TrainSetup, topology: Topology) -> list[tuple[str, int]]:
    """Return flags with which the step fits by the estimate, and the bytes per device.

    The cheapest settings are tried first: ZeRO 3, rematerialization, offloading of optimizer state and then of
    parameters, and smaller microbatches; each alone and together with the previous ones.
    """
    config, together = setup.config, dict[str, Any]()
    smaller = [("accumulate", config.accumulate * parts) for parts in (2, 4, 8)]
    offload = [("offload", ("optimizer_state",)), ("offload", ("optimizer_state", "params"))]
    for name, value in (("zero", 3), ("remat", "full"), *offload, *smaller):
        if getattr(config, name) == value:
            continue
        found: list[tuple[str, int]] = []
        alone, combined = {name: value}, {**together, name: value}
        for settings in [alone] if alone == combined else [alone, combined]:
            try:
                other = make_setup(dataclasses.replace(config, **settings), setup.mesh)
                check_microbatches(other)
                total = estimate_step(other, topology.platform).total
            except SpmdError:  # such as a batch that does not divide into so many microbatches
                continue
            if topology.memory is None or total <= topology.memory:
                found.append((" ".join(_flag(*setting) for setting in settings.items()), total))
            if settings.keys() >= together.keys():
                together = settings
        if found:
            return found
    return []


def _flag(name: str, value: Any) -> str:
    return f"--{name} {' '.join(value) if isinstance(value, tuple) else value}"
