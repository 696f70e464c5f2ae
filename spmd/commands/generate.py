"""`spmd generate`."""

import dataclasses
from pathlib import Path

import tyro

from spmd import launch
from spmd.checkpoint import Checkpoints
from spmd.folder import RunFolder
from spmd.recipe import Recipe, config_mesh
from spmd.run import write_sample
from spmd.state import abstract_state


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Writes text with a trained model, on the mesh it was trained on."""

    run: tyro.conf.Positional[str]
    """The run folder, such as runs/demo."""
    prompt: str
    """What to go on from."""
    tokens: int | None = None
    """How many tokens to add; by default 200, or as many as the model was trained to see."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 samples the model's own distribution."""
    top_k: int = 40
    """Draw among the k likeliest tokens; 0 for all."""
    seed: int = 0
    """Of the draws."""
    step: int | None = None
    """The checkpoint to use; the newest by default."""


def run_generate(arguments: list[str]) -> int:
    """Prints a text; the exit code."""
    command = tyro.cli(GenerateCommand, args=arguments, prog="spmd generate")
    folder = RunFolder(Path(command.run))
    config = folder.config()
    launch.start(launch.Launch(config.devices))
    recipe = Recipe(config, config_mesh(config))
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        state, _ = checkpoints.restore(command.step, abstract_state(recipe.plan))
    room = config.data.sequence - len(recipe.tokenizer.encode(command.prompt))
    print(
        write_sample(
            recipe,
            state,
            command.prompt,
            tokens=max(min(200, room), 0) if command.tokens is None else command.tokens,
            temperature=command.temperature,
            top_k=command.top_k,
            seed=command.seed,
        )
    )
    return 0
