"""Check a run before it starts: config, batch and trace."""

from pathlib import Path

from spmd.data.loader import check_batch_size
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.errors import ConfigError, Problem
from spmd.run.build import TrainSetup, microbatches_of
from spmd.run.config import TrainConfig, config_values
from spmd.run.init_from import check_init
from spmd.storage.address import is_address


def check_microbatches(setup: TrainSetup) -> None:
    """Check that each size of batches divides into microbatches, and a microbatch over the mesh."""
    config = setup.config
    data = config.data
    sharding = setup.plan.batch_sharding("tokens")
    for rows in {*data.batch_sizes.distinct(0, config.steps), data.batch}:
        parts = microbatches_of(config, setup.schedule, rows)
        name = "batch"
        if rows != data.batch:
            name = "data.batch_ramp"
        check_batch_size(rows, data.sequence, sharding, parts, name)


def check_config(setup: TrainSetup) -> None:
    """Raise for problems on every mesh: values without JSON, and a sample without room."""
    config_values(setup.config)
    if setup.config.sample.prompt:
        count_sample_tokens(setup.config, load_tokenizer(setup.config.data.tokenizer))


def check_step(setup: TrainSetup) -> None:
    """Check that batch and activations fit the mesh, by a trace of the step."""
    check_microbatches(setup)
    setup.step.trace(setup.batch)


def preflight(setup: TrainSetup, *, is_loaded: bool = False) -> None:
    """Raise for an impossible run, before anything is allocated or compiled.

    A step that is loaded is traced later, beside its training.
    """
    check_config(setup)
    if is_loaded:
        check_microbatches(setup)
    else:
        check_step(setup)


def check_planned_init(setup: TrainSetup) -> str:
    """Return a line about the initial parameters.

    A folder that is not on this machine may be on that of the run.
    """
    init = setup.config.init
    if init and not (is_address(init) or Path(init).exists()):
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
