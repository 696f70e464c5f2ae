"""`spmd generate`."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import tyro

from spmd.checkpoint.manager import CheckpointManager
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, Problem
from spmd.generate.generator import window_problems
from spmd.generate.sampling import Sampling
from spmd.hf.fields import collect_errors
from spmd.run.build import TrainSetup, config_mesh
from spmd.run.config import TrainConfig
from spmd.run.generated_text import encode, make_generator, stream_text, write_texts
from spmd.run.load_params import restore_model
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import MeshShape

TOKENS = 200
"""Added by default, if the window has room for them."""


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Writes text with a trained model, on the mesh it was trained on or on another.

    One prompt is answered as the text is drawn, several are answered together, each when all are done.
    """

    run: tyro.conf.Positional[str]
    """The run folder, such as runs/demo."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """What to go on from; may be given several times."""
    prompts: str = ""
    """A file with one prompt in each line, besides."""
    tokens: int | None = None
    """How many tokens to add; by default 200, or as many as the model was trained to see."""
    temperature: float = Sampling.temperature
    """0 takes the likeliest token each time; 1 samples the model's own distribution."""
    top_k: int = Sampling.top_k
    """Draw among the k likeliest tokens; 0 for all."""
    top_p: float = Sampling.top_p
    """Draw among the likeliest tokens that together have this probability; 1 for all."""
    seed: int = 0
    """Of the draws."""
    step: int | None = None
    """The checkpoint to use; the newest by default."""
    mesh: MeshShape = MeshShape()
    """The size of each mesh axis; one may be -1. All 1: that of the run; for one device, --mesh.fsdp -1 --devices 1."""
    devices: int | None = None
    """Simulate this many CPU devices (0: use the real ones); by default as the run did."""


def run_generate(arguments: list[str]) -> int:
    """Prints texts; the exit code."""
    command = tyro.cli(GenerateCommand, args=arguments, prog="spmd generate")
    folder = RunDir(Path(command.run))
    config = _placed(command, folder.config())
    initialize(config.devices)
    setup = TrainSetup(config, config_mesh(config))
    prompts, tokens, sampling = _asked(command, setup)
    generator = make_generator(setup, sampling)
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        model = restore_model(checkpoints, command.step, setup.plan)
    first = jax.process_index() == 0
    show: Callable[[str], None] = _show if first else lambda text: None
    if first and generator.whole_window:
        print(f"spmd: each token takes the whole window: {generator.whole_window}", file=sys.stderr)
    if len(prompts) == 1:
        show(prompts[0])
        for piece in stream_text(setup, generator, model, prompts[0], tokens=tokens, seed=command.seed):
            show(piece)
        show("\n")
    else:
        texts = write_texts(setup, generator, model, prompts, tokens=tokens, seed=command.seed)
        show("\n\n".join(texts) + "\n")
    return 0


def _placed(command: GenerateCommand, config: TrainConfig) -> TrainConfig:
    """The run's config, on the mesh that is asked for."""
    if command.devices is not None:
        config = dataclasses.replace(config, devices=command.devices)
    if command.mesh == MeshShape():
        return config
    return dataclasses.replace(config, mesh=command.mesh, slices=MeshShape())


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _asked(command: GenerateCommand, setup: TrainSetup) -> tuple[list[str], int, Sampling]:
    """The prompts, how many tokens to add and how to draw them.

    Raises:
        ConfigError: Any of it cannot be; all at once.
    """
    problems: list[Problem] = []
    prompts, sampling = list(command.prompt), Sampling()
    if command.prompts:
        try:
            prompts += filter(None, Path(command.prompts).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            problems.append(Problem("prompts", f"{command.prompts} cannot be read: {error}"))
    try:
        sampling = Sampling(command.temperature, command.top_k, command.top_p)
    except ConfigError as error:
        problems += error.problems
    if command.seed < 0:
        problems.append(Problem("seed", f"is {command.seed}", fix="0 or more"))
    tokens, window = command.tokens or 0, setup.config.data.sequence
    with collect_errors(problems):  # a tokenizer that cannot be loaded is one of them
        problems += _too_many(setup)
        ids = encode(setup, prompts)
        room = window - max(map(len, ids), default=0)
        tokens = max(min(TOKENS, room), 0) if command.tokens is None else command.tokens
        problems += window_problems(ids, tokens, window)
    if problems:
        raise ConfigError("Nothing can be generated:", problems)
    return prompts, tokens, sampling


def _too_many(setup: TrainSetup) -> list[Problem]:
    """Whether the tokenizer has tokens that the model has no row for."""
    theirs, ours = setup.tokenizer.vocab, setup.config.model.vocab
    if theirs <= ours:
        return []
    what = f"{setup.config.data.tokenizer} has more tokens than the model"
    fix = "a tokenizer that the model was made for"
    return [Problem("data.tokenizer", what, f"{theirs} > model.vocab = {ours}", fix)]
