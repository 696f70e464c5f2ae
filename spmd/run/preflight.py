"""Check and measure a run before it starts: batch, trace, memory, and compiled step."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax

from spmd.analysis.collective_audit import CollectiveAudit, audit_collectives
from spmd.analysis.cycles import Cycles, count_cycles
from spmd.analysis.hlo import HloModule, parse
from spmd.analysis.memory import CompiledMemory, Estimate, estimate_memory, read_memory
from spmd.analysis.topology import Topology, topology_devices
from spmd.data.loader import check_batch_size
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.distributed.native_output import REMATERIALIZATION, compiler_log
from spmd.errors import ConfigError, Problem
from spmd.pipeline.tick_table import tabulate
from spmd.run.build import TrainSetup, abstract_batch, count_microbatches
from spmd.run.config import TrainConfig, config_values
from spmd.run.init_from import check_init
from spmd.sharding.mesh import AnyMesh, mesh_of
from spmd.training.compilation_cache import compilation_cache


def check_microbatches(setup: TrainSetup) -> None:
    """Check that the batch divides into microbatches, and a microbatch over the mesh."""
    config = setup.config
    data = config.data
    parts = config.accumulate * count_microbatches(config, setup.schedule)
    sharding = setup.plan.batch_sharding("tokens")
    check_batch_size(data.batch, data.sequence, sharding, parts)


def check_config(setup: TrainSetup) -> None:
    """Raise for problems on every mesh: values without JSON, and a sample without room."""
    config_values(setup.config)
    if setup.config.sample.prompt:
        count_sample_tokens(setup.config, load_tokenizer(setup.config.data.tokenizer))


def check_step(setup: TrainSetup) -> None:
    """Check that batch and activations fit the mesh, by a trace of the step."""
    check_microbatches(setup)
    setup.step.trace(abstract_batch(setup.config))


def preflight(setup: TrainSetup) -> None:
    """Raise for an impossible run, before anything is allocated or compiled."""
    check_config(setup)
    check_step(setup)


def check_planned_init(setup: TrainSetup) -> str:
    """Return a line about the initial parameters.

    A folder that is not on this machine may be on that of the run.
    """
    init = setup.config.init
    if init and not Path(init).exists():
        return f"starts with {init}, which is not on this machine and was not checked"
    return check_init(setup)


def count_sample_tokens(config: TrainConfig, tokenizer: Tokenizer) -> int:
    """Return the number of tokens to sample after the prompt; raise `ConfigError` for no room."""
    tokens = len(tokenizer.encode_prompt(config.sample.prompt))
    window = config.data.sequence
    if tokens >= window:
        problem = Problem(
            "sample.prompt",
            "leaves no room for a token",
            f"{tokens} prompt tokens >= data.sequence = {window}",
            f"--data.sequence {tokens + 1} or more, or a shorter --sample.prompt, or '' for no "
            "sample",
        )
        raise ConfigError("The sample cannot be generated:", [problem])
    return min(config.sample.tokens, window - tokens)


def estimate_step(setup: TrainSetup, platform: str = "cpu") -> Estimate:
    """Estimate the memory of the step on each device from its trace, for a platform's compiler."""
    return estimate_memory(setup.step, abstract_batch(setup.config), platform)


class CompiledStep(NamedTuple):
    """Compiled step, read; memory and cycles are None where the compiler reports none."""

    audit: CollectiveAudit
    memory: CompiledMemory | None
    cycles: Cycles | None
    program: HloModule


def compile_step(setup: TrainSetup) -> CompiledStep:
    """Compile the step and read the program; raise `MemoryError` if the compiler finds no room."""
    # A cached program has no compiler log; the audit says what is not passed on.
    with compilation_cache(None), compiler_log(without=REMATERIALIZATION) as log:
        try:
            compiled = setup.step.compile(abstract_batch(setup.config))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(str(error).partition("\n")[0]) from None
    program = parse(compiled.as_text() or "")
    taken = tabulate(setup.schedule).taken if setup.schedule else {}
    traced = setup.step.trace(abstract_batch(setup.config))  # JAX still has it
    collectives = audit_collectives(
        program,
        setup.mesh,
        log=log,
        slices=setup.config.slices.sizes,
        taken=taken,
        plan=setup.plan,
        jaxpr=traced.jaxpr,
    )
    cycles = None
    try:
        cycles = count_cycles(program, taken)
    except ConfigError as error:  # a loop of unknown length is no reason to show nothing
        warnings = (*collectives.warnings, *error.problems)
        collectives = dataclasses.replace(collectives, warnings=warnings)
    return CompiledStep(collectives, read_memory(compiled), cycles, program)


def compile_text(setup: TrainSetup) -> str:
    """Return the text of the compiled step."""
    with compilation_cache(None), compiler_log(without=REMATERIALIZATION):
        return setup.step.compile(abstract_batch(setup.config)).as_text() or ""


def topology_mesh(config: TrainConfig, topology: Topology) -> AnyMesh:
    """Return the config's mesh over the devices of an absent machine."""
    return mesh_of(config.mesh, topology_devices(topology), config.slices.sizes)
