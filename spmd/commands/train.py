"""`spmd train`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Generic

import jax

from spmd.commands.parsing import ConfigFields, LaunchFields, parse_command
from spmd.data.loader import bigram_loss
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import compiler_environment, initialize
from spmd.generate.sampling import Sampling
from spmd.generate.text import generate_texts, make_generator
from spmd.observe.goodput import measure_goodput
from spmd.observe.metrics import Console, device_memory
from spmd.observe.profiling import parse_steps
from spmd.resilience.preemption import EXIT_PREEMPTED
from spmd.run.build import TrainSetup, config_mesh
from spmd.run.config import M, TrainConfig
from spmd.run.init_from import check_start
from spmd.run.run_dir import Resume, RunDir
from spmd.run.train import train


@dataclasses.dataclass(frozen=True)
class TrainCommand(Generic[M]):
    """Trains a model and keeps everything about it in a run folder.

    Metrics go to the terminal and to DIR/metrics.jsonl, checkpoints to DIR/checkpoints. A folder that holds a run is
    refused without --resume, which goes on bitwise as if the run had never stopped. On SIGTERM or SIGUSR1 the run
    finishes its step, saves and exits with 75: start it again with --resume auto.
    """

    config: ConfigFields
    resume: Resume = "never"
    """What to do with a run that the folder holds: never (refuse it), auto (go on with it; start one where there is
    none), always (go on; refuse a folder without a checkpoint). It goes on from the newest checkpoint that is whole."""
    profile: str = ""
    """Trace these steps, such as 10:15, into DIR/profile; SIGUSR2 traces the next five at any time."""
    launch_args: LaunchFields = LaunchArgs()


def run_train(arguments: list[str]) -> int:
    """Trains; the exit code."""
    command, source = parse_command(TrainCommand, arguments, "train")
    config: TrainConfig = command.config
    folder = RunDir(Path(config.out or f"runs/{source.stem.replace('_', '-')}"))
    resume, steps = folder.check_use(command.resume), parse_steps(command.profile)
    initialize(config.devices, command.launch_args)
    setup = TrainSetup(config, config_mesh(config))
    setup.audit()
    starts = "" if resume else check_start(setup)
    first = jax.process_index() == 0
    show: Callable[[str], None] = print if first else lambda line: None
    corpus = setup.corpus
    show(f"{setup.plan}{setup.pipeline_line}{setup.slices_line}")
    if flags := setup.flags_text(jax.devices()[0].platform):
        show(flags)
    if starts:
        show(f"\n{starts}")
    show(
        f"\ncorpus: {corpus.documents:,} documents, {len(corpus.train):,} tokens to train on, "
        f"{len(corpus.validation):,} held out\n"
    )
    console = Console(config.steps) if first else None
    outcome = train(setup, folder, source, console, resume=resume, profile=steps, environment=compiler_environment())
    if console:
        console.close()
    if outcome.preempted is not None:
        show(f"told to go: saved after step {outcome.preempted}; --resume auto goes on from there")
        return EXIT_PREEMPTED
    if console and outcome.steps:
        tokens = outcome.steps * config.data.batch * config.data.sequence
        console.summary(
            steps=outcome.steps,
            seconds=outcome.seconds,
            tokens=tokens,
            loss=outcome.loss,
            flops=setup.flops,
            mfu=outcome.mfu,
            memory=device_memory(),
        )
    if outcome.val_loss is not None:
        show(f"\nvalidation loss {outcome.val_loss:.3f} nats/token over {outcome.val_tokens:,} tokens")
        if setup.tokenizer.vocab <= 256:
            show(f"                {_bigram(setup):.3f} for a bigram count model of the same corpus")
    show(f"checkpoint      {folder.checkpoints}/{outcome.checkpoint}")
    show(f"metrics         {folder.metrics}")
    if first:
        show(f"\n{measure_goodput(folder.path)}")
    if config.sample.prompt:
        sample, sampling = config.sample, Sampling(config.sample.temperature, config.sample.top_k, config.sample.top_p)
        generator = make_generator(setup.plan, setup.tokenizer, config.data.sequence, sampling)
        (text,) = generate_texts(
            generator, setup.tokenizer, outcome.state, [sample.prompt], tokens=sample.tokens, seed=config.seed
        )
        why = f" (the whole window for each token: {generator.whole_window})" if generator.whole_window else ""
        show(f"\nsample at {sampling}{why}:\n{text}")
    return 0


def _bigram(setup: TrainSetup) -> float:
    corpus, config = setup.corpus, setup.config
    return bigram_loss(corpus.train, corpus.validation[: config.evaluate.tokens + 1], setup.tokenizer.vocab)
