"""`spmd eval`."""

import dataclasses
import json
from pathlib import Path

import jax
import tyro

from spmd.checkpoint.manager import CheckpointManager
from spmd.commands.parsing import parse_flags
from spmd.data.tokenizer import load_tokenizer
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, check_fields
from spmd.observe.fit import fitted
from spmd.observe.waiting import show_waiting, show_waiting_for
from spmd.run.build import config_mesh, make_setup, open_training_text
from spmd.run.evaluate import Evaluation, evaluate, held_out_sets, open_sets
from spmd.run.load_params import restore_model
from spmd.run.preflight import check_microbatches
from spmd.run.run_dir import RunDir
from spmd.settings.compress import NO_COMPRESSION
from spmd.sharding.mesh import MeshShape
from spmd.training.evaluated_params import plan_evaluation_point


@dataclasses.dataclass(frozen=True)
class EvalCommand:
    """Evaluate a trained model: loss, perplexity, bits per byte and accuracy, on any mesh.

    Without --data, on the validation split of the run.
    """

    run: tyro.conf.Positional[str]
    """Run directory, such as runs/demo."""
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to evaluate on, NAME=SOURCE or SOURCE: files, folders or globs as in --data.source of a config; may be given
    several times, for one line each."""
    tokens: int = 0
    """Evaluate on about this many tokens of each set; 0 for all."""
    batch: int | None = None
    """Sequences per batch; by default as in the run."""
    step: int | None = None
    """Checkpoint to load; the newest by default."""
    trained: bool = False
    """Evaluate the parameters that gradients were taken at, where the run evaluates others, such as their average."""
    mesh: MeshShape = MeshShape()
    """The size of each mesh axis; one may be -1. All 1: that of the run; for one device, --mesh.fsdp -1 --devices 1."""
    devices: int | None = None
    """Simulate this many CPU devices (0: use the real ones); by default as in the run."""
    json: bool = False
    """Print one JSON object for each set."""


def run_eval(arguments: list[str]) -> int:
    """Print the figures and return the exit code."""
    command: EvalCommand = parse_flags(EvalCommand, arguments, "spmd eval")
    if problems := check_fields(command, {"tokens": "at least 0", "batch": "at least 1"}):
        raise ConfigError("Nothing can be evaluated:", problems)
    run_dir = RunDir(Path(command.run))
    config = run_dir.config()
    if command.devices is not None:
        config = dataclasses.replace(config, devices=command.devices)
    if command.mesh != MeshShape():
        config = dataclasses.replace(config, mesh=command.mesh, slices=MeshShape())
    if command.batch is not None:
        data = dataclasses.replace(config.data, batch=command.batch)
        config = dataclasses.replace(config, data=data, accumulate=1)
    initialize(config.devices)
    setup = make_setup(dataclasses.replace(config, compress=NO_COMPRESSION, quantize=""), config_mesh(config))
    check_microbatches(setup)
    tokenizer = load_tokenizer(config.data.tokenizer)
    with show_waiting("reading the text"):
        sets = (
            open_sets(config, command.data, tokenizer, "--data")
            if command.data
            else held_out_sets(open_training_text(config))
        )
    with (
        show_waiting("restoring a checkpoint"),
        CheckpointManager(run_dir.checkpoints, read_only=True) as checkpoints,
    ):
        model = restore_model(checkpoints, command.step, setup.plan, trained=command.trained)
        step = checkpoints.latest() if command.step is None else command.step
    point = "" if command.trained else plan_evaluation_point(setup.plan).name
    results = evaluate(setup, model, sets, tokenizer, command.tokens)
    found = list(show_waiting_for(results, "evaluating"))
    if jax.process_index() == 0:
        title = ", ".join(filter(None, [command.run, f"step {step}", point])) + "; losses in nats per token"
        print("\n".join(json.dumps(x.to_json()) for x in found) if command.json else fitted(_table(title, found)))
    return 0


def _table(title: str, found: list[Evaluation]) -> str:
    """Return one line for each set; columns are as wide as what is in them."""
    rows = [("set", "loss", "perplexity", "bits/byte", "accuracy", "tokens")]
    for x in found:
        figures = f"{x.loss:.4f}", f"{x.perplexity:.4g}", f"{x.bits_per_byte:.4f}", f"{x.accuracy:.2%}", f"{x.tokens:,}"
        rows.append((x.name, *figures))
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        "  ".join([f"{name:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))])
        for name, *cells in rows
    ]
    return "\n".join([f"{title}\n", *lines])
