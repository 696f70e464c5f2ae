"""`spmd generate`."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from spmd.checkpoint.manager import CheckpointManager
from spmd.commands.parsing import LaunchFields, parse_flags
from spmd.commands.processes import start_devices
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import ConfigError, Problem, check_fields
from spmd.generate.generator import window_problems
from spmd.generate.sampling import Sampling
from spmd.generate.text import (
    generate_texts,
    make_generator,
    stop_problems,
    stream_text,
)
from spmd.hf.fields import collect_errors
from spmd.observe.spinner import spinner
from spmd.run.build import config_mesh, evaluation_config, make_setup
from spmd.run.config import TrainConfig
from spmd.run.load_params import restore_model
from spmd.run.run_dir import RunDir
from spmd.sharding.mesh import MeshShape
from spmd.storage.address import locate

DEFAULT_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Generate text with a trained model, on the mesh of the run or on another one.

    The text of one prompt is streamed. The texts of several prompts are printed when all are
    complete.
    """

    run: tyro.conf.Positional[str]
    """Run directory, such as runs/demo."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Prompt; may be given several times."""
    prompts: str = ""
    """File of more prompts, one in each line."""
    tokens: int | None = None
    """Tokens to generate; by default 200, or fewer if the training sequence length is reached."""
    temperature: float = Sampling.temperature
    """0 is greedy; 1 samples from the model's own distribution."""
    top_k: int = Sampling.top_k
    """Sample from the k most probable tokens; 0 for all."""
    top_p: float = Sampling.top_p
    """Sample from the most probable tokens whose probabilities add up to this; 1 for all."""
    seed: int = 0
    """Seed of the sampling."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End a text before this string; may be given several times."""
    step: int | None = None
    """Checkpoint to load; the newest by default."""
    trained: bool = False
    """Use the trained parameters, where the run evaluates others, such as an average."""
    cache_in_int8: bool = False
    """Hold the tokens of the KV cache in int8: half of its memory, and slightly other logits."""
    mesh: MeshShape = MeshShape()
    """Size of each mesh axis; by default the run's. For one device: --mesh.fsdp -1 --devices 1."""
    devices: int | None = None
    """Simulate this many CPU devices (0: use the real ones); by default as in the run."""
    launch_args: LaunchFields = LaunchArgs()


def run_generate(arguments: list[str]) -> int:
    """Print texts and return the exit code."""
    command: GenerateCommand = parse_flags(GenerateCommand, arguments, "spmd generate")
    run_dir = RunDir(locate(command.run))
    config = _override_mesh(command, run_dir.config())
    start_devices(config.devices, command)
    prompts, tokens, sampling, tokenizer = _check_request(command, config)
    plain = evaluation_config(config)
    plan = make_setup(plain, config_mesh(config)).plan
    generator = make_generator(plan, tokenizer, config.data.sequence, sampling)
    generator = dataclasses.replace(generator, cache_in_int8=command.cache_in_int8)
    with (
        spinner("restoring a checkpoint"),
        CheckpointManager(run_dir.checkpoints, read_only=True) as checkpoints,
    ):
        restored = restore_model(checkpoints, command.step, plan, trained=command.trained)
        model = generator.load(restored.params, restored.variables, donate=True)
    if generator.whole_window:
        print(
            f"spmd: each token takes the whole window: {generator.whole_window}",
            file=sys.stderr,
        )
    options: Any = {"tokens": tokens, "seed": command.seed, "stops": command.stop}
    if len(prompts) == 1:
        (prompt,) = prompts
        _show_stream(prompt, stream_text(model, tokenizer, prompt, **options))
    else:
        with spinner(f"generating {len(prompts)} texts"):
            texts = generate_texts(model, tokenizer, prompts, **options)
        _show("\n\n".join(texts) + "\n")
    return 0


def _show(text: str) -> None:
    """Print a text at once."""
    print(text, end="", flush=True)


def _show_stream(prompt: str, pieces: Iterator[str]) -> None:
    """Print a prompt and the pieces of its text as they come; the first waits for the compiler."""
    with spinner("compiling the model"):
        first = next(pieces, "")
    _show(prompt)
    _show(first)
    for piece in pieces:
        _show(piece)
    _show("\n")


def _override_mesh(command: GenerateCommand, config: TrainConfig) -> TrainConfig:
    if command.devices is not None:
        config = dataclasses.replace(config, devices=command.devices)
    if command.mesh == MeshShape():
        return config
    return dataclasses.replace(config, mesh=command.mesh, slices=MeshShape())


def _check_request(
    command: GenerateCommand, config: TrainConfig
) -> tuple[list[str], int, Sampling, Tokenizer]:
    """Return the prompts, the number of tokens to generate, the sampling and the tokenizer.

    Raises:
        ConfigError: All problems of the request.
    """
    problems = check_fields(command, {"seed": "at least 0"})
    problems += stop_problems(command.stop)
    prompts = _read_prompts(command, problems)
    sampling = Sampling()
    with collect_errors(problems):
        sampling = Sampling(command.temperature, command.top_k, command.top_p)
    tokens = command.tokens or 0
    window = config.data.sequence
    with collect_errors(problems):  # the tokenizer may fail to load
        tokenizer = load_tokenizer(config.data.tokenizer)
        if tokenizer.vocab > config.model.vocab:
            problems.append(_vocab_problem(tokenizer, config))
        ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
        if command.tokens is None:
            left = window - max(map(len, ids), default=0)
            tokens = max(min(DEFAULT_TOKENS, left), 0)
        problems += window_problems(ids, tokens, window)
    if problems:
        raise ConfigError("Nothing can be generated:", problems)
    return prompts, tokens, sampling, tokenizer


def _read_prompts(command: GenerateCommand, problems: list[Problem]) -> list[str]:
    """Return the prompts of the command and of its file; add a problem of the file."""
    prompts = list(command.prompt)
    if command.prompts:
        try:
            text = Path(command.prompts).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            what = f"{command.prompts} cannot be read: {error}"
            problems.append(Problem("prompts", what))
            return prompts
        prompts += filter(None, text.splitlines())
    return prompts


def _vocab_problem(tokenizer: Tokenizer, config: TrainConfig) -> Problem:
    return Problem(
        "data.tokenizer",
        f"{config.data.tokenizer} has more tokens than the model",
        detail=f"{tokenizer.vocab} > model.vocab = {config.model.vocab}",
        fix="the tokenizer that the model was trained with",
    )
