"""`spmd generate`."""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path

import jax
import tyro

from spmd.checkpoint.manager import CheckpointManager
from spmd.commands.parsing import parse_flags
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, Problem, check_fields
from spmd.generate.generator import window_problems
from spmd.generate.sampling import Sampling
from spmd.generate.text import generate_texts, make_generator, stream_text
from spmd.hf.fields import collect_errors
from spmd.observe.waiting import show_waiting
from spmd.run.build import config_mesh, make_setup
from spmd.run.config import TrainConfig
from spmd.run.load_params import restore_model
from spmd.run.run_dir import RunDir
from spmd.settings.compress import NO_COMPRESSION
from spmd.sharding.mesh import MeshShape

DEFAULT_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Generate text with a trained model, on the mesh of the run or on another one.

    The text of one prompt is streamed. The texts of several prompts are printed when all are complete.
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
    step: int | None = None
    """Checkpoint to load; the newest by default."""
    trained: bool = False
    """Use the parameters that gradients were taken at, where the run evaluates others, such as their average."""
    mesh: MeshShape = MeshShape()
    """The size of each mesh axis; one may be -1. All 1: that of the run; for one device, --mesh.fsdp -1 --devices 1."""
    devices: int | None = None
    """Simulate this many CPU devices (0: use the real ones); by default as in the run."""


def run_generate(arguments: list[str]) -> int:
    """Print texts and return the exit code."""
    command: GenerateCommand = parse_flags(GenerateCommand, arguments, "spmd generate")
    run_dir = RunDir(Path(command.run))
    config = _override_mesh(command, run_dir.config())
    initialize(config.devices)
    prompts, tokens, sampling, tokenizer = _check_request(command, config)
    setup = make_setup(dataclasses.replace(config, compress=NO_COMPRESSION, quantize=""), config_mesh(config))
    generator = make_generator(setup.plan, tokenizer, config.data.sequence, sampling)
    with (
        show_waiting("restoring a checkpoint"),
        CheckpointManager(run_dir.checkpoints, read_only=True) as checkpoints,
    ):
        model = restore_model(checkpoints, command.step, setup.plan, trained=command.trained)
    is_first = jax.process_index() == 0
    show = functools.partial(print, end="", flush=True) if is_first else lambda text: None
    if is_first and generator.whole_window:
        print(f"spmd: each token takes the whole window: {generator.whole_window}", file=sys.stderr)
    if len(prompts) == 1:
        pieces = stream_text(generator, tokenizer, model, prompts[0], tokens=tokens, seed=command.seed)
        with show_waiting("compiling the model"):
            first = next(pieces, "")
        for piece in itertools.chain((prompts[0], first), pieces):
            show(piece)
        show("\n")
    else:
        with show_waiting(f"generating {len(prompts)} texts"):
            texts = generate_texts(generator, tokenizer, model, prompts, tokens=tokens, seed=command.seed)
        show("\n\n".join(texts) + "\n")
    return 0


def _override_mesh(command: GenerateCommand, config: TrainConfig) -> TrainConfig:
    if command.devices is not None:
        config = dataclasses.replace(config, devices=command.devices)
    if command.mesh == MeshShape():
        return config
    return dataclasses.replace(config, mesh=command.mesh, slices=MeshShape())


def _check_request(command: GenerateCommand, config: TrainConfig) -> tuple[list[str], int, Sampling, Tokenizer]:
    """Return the prompts, the number of tokens to generate, the sampling and the tokenizer; raise all problems."""
    problems = check_fields(command, {"seed": "at least 0"})
    prompts, sampling = list(command.prompt), Sampling()
    if command.prompts:
        try:
            prompts += filter(None, Path(command.prompts).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            problems.append(Problem("prompts", f"{command.prompts} cannot be read: {error}"))
    with collect_errors(problems):
        sampling = Sampling(command.temperature, command.top_k, command.top_p)
    tokens, window = command.tokens or 0, config.data.sequence
    with collect_errors(problems):  # the tokenizer may fail to load
        tokenizer = load_tokenizer(config.data.tokenizer)
        if (size := tokenizer.vocab) > (vocab := config.model.vocab):
            what, detail = f"{config.data.tokenizer} has more tokens than the model", f"{size} > model.vocab = {vocab}"
            problems.append(Problem("data.tokenizer", what, detail, "the tokenizer that the model was trained with"))
        ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
        left = window - max(map(len, ids), default=0)
        tokens = max(min(DEFAULT_TOKENS, left), 0) if command.tokens is None else command.tokens
        problems += window_problems(ids, tokens, window)
    if problems:
        raise ConfigError("Nothing can be generated:", problems)
    return prompts, tokens, sampling, tokenizer
