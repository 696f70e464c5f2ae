"""`spmd train`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic

import jax

from spmd.commands.parsing import ConfigFields, LaunchFields, parse_command
from spmd.data.corpus import Corpus
from spmd.data.loader import bigram_loss
from spmd.data.tokenizer import Tokenizer
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import initialize
from spmd.generate.sampling import Sampling
from spmd.generate.text import generate_texts, make_generator
from spmd.observe.goodput import measure_goodput
from spmd.observe.metrics import Console, device_memory
from spmd.observe.profiling import parse_steps
from spmd.resilience.preemption import EXIT_PREEMPTED
from spmd.run.build import TrainSetup, config_mesh, count_flops, make_setup, open_corpus
from spmd.run.config import M, TrainConfig
from spmd.run.describe import execution_lines, flags_text
from spmd.run.init_from import check_init
from spmd.run.preflight import count_sample_tokens, preflight
from spmd.run.run_dir import Resume, RunDir
from spmd.run.train import RunResult, train
from spmd.sharding.mesh import AnyMesh


@dataclasses.dataclass(frozen=True)
class TrainCommand(Generic[M]):
    """Train a model, with everything about the run in one folder.

    Metrics go to the terminal and to DIR/metrics.jsonl, checkpoints to DIR/checkpoints. A folder that contains a run is
    refused without --resume; a resumed run is bitwise identical to one that was never interrupted. On SIGTERM or
    SIGUSR1 the run finishes its step, saves a checkpoint and exits with 75: continue with --resume auto.
    """

    config: ConfigFields
    resume: Resume = "never"
    """If the folder contains a run: never (refuse the folder), auto (resume; start a run if there is none), always
    (resume; refuse a folder without a checkpoint). Resumes from the newest intact checkpoint."""
    take_over: bool = False
    """Take the folder from the process that writes to it; that process ends before it writes again."""
    profile: str = ""
    """Trace these steps, such as 10:15, into DIR/profile; SIGUSR2 traces the next five at any time."""
    launch_args: LaunchFields = LaunchArgs()


def run_train(arguments: list[str]) -> int:
    """Run `spmd train`; return the exit code."""
    command, source = parse_command(TrainCommand, arguments, "train")
    config: TrainConfig = command.config
    run_dir = _run_dir(config, source)
    resume, steps = run_dir.check_use(command.resume), parse_steps(command.profile)
    said = initialize(config.devices, command.launch_args)
    setup, corpus, init = _check(config, config_mesh(config), resume)
    first = jax.process_index() == 0
    show: Callable[[str], None] = print if first else lambda line: None
    flags = flags_text(setup, jax.devices()[0].platform, jax.devices()[0].device_kind)
    sizes = f"{len(corpus.train):,} training tokens, {len(corpus.validation):,} validation tokens"
    about = f"\ncorpus: {corpus.documents:,} documents, {sizes}\n"
    with run_dir.lease(resume, command.take_over) as lease:
        for text in (f"{setup.plan}{execution_lines(setup)}", flags, init and f"\n{init}", about):
            if text:
                show(text)
        console = Console(config.steps) if first else None
        result = train(setup, corpus, run_dir, source, console, lease, resume=resume, profile=steps, said=said)
    if console:
        console.close()
    if result.preempted is not None:
        show(f"preempted: checkpoint saved at step {result.preempted}; continue with --resume auto")
        return EXIT_PREEMPTED
    if console:
        _report(console, config, corpus, run_dir, result)
    if config.sample.prompt:
        _sample(setup, corpus.tokenizer, result, show)
    return 0


def check_command(command: TrainCommand[Any], source: Path, mesh: AnyMesh) -> None:
    """Raise what `run_train` would refuse, without the devices of the mesh."""
    resume, _ = _run_dir(command.config, source).check_use(command.resume), parse_steps(command.profile)
    _check(command.config, mesh, resume)


def _run_dir(config: TrainConfig, source: Path) -> RunDir:
    return RunDir(Path(config.out or f"runs/{source.stem.replace('_', '-')}"))


def _check(config: TrainConfig, mesh: AnyMesh, resume: bool) -> tuple[TrainSetup, Corpus, str]:
    """Return the checked setup, the corpus, and a line about the initial parameters of a run that is not resumed."""
    setup = make_setup(config, mesh)
    preflight(setup)
    return setup, open_corpus(config), "" if resume else check_init(setup)


def _report(console: Console, config: TrainConfig, corpus: Corpus, run_dir: RunDir, result: RunResult) -> None:
    """Print the results of a finished run."""
    vocab = corpus.tokenizer.vocab
    if result.steps:
        steps, seconds, loss, mfu = result.steps, result.seconds, result.loss, result.mfu
        tokens, flops, memory = steps * config.data.batch * config.data.sequence, count_flops(config), device_memory()
        console.summary(steps=steps, seconds=seconds, tokens=tokens, loss=loss, flops=flops, mfu=mfu, memory=memory)
    if result.val_loss is not None:
        print(f"\nvalidation loss {result.val_loss:.3f} nats/token over {result.val_tokens:,} tokens")
        if vocab <= 256:
            baseline = bigram_loss(corpus.train, corpus.validation[: config.evaluate.tokens + 1], vocab)
            print(f"                {baseline:.3f} for a bigram count model of the same corpus")
    print(f"checkpoint      {run_dir.checkpoints}/{result.checkpoint}")
    print(f"metrics         {run_dir.metrics}")
    print(f"\n{measure_goodput(run_dir.path)}")


def _sample(setup: TrainSetup, tokenizer: Tokenizer, result: RunResult, show: Callable[[str], None]) -> None:
    """Generate and print the config's sample; all processes take part."""
    sample, seed = setup.config.sample, setup.config.seed
    sampling = Sampling(sample.temperature, sample.top_k, sample.top_p)
    tokens = count_sample_tokens(setup.config, tokenizer)
    generator = make_generator(setup.plan, tokenizer, setup.config.data.sequence, sampling)
    (text,) = generate_texts(generator, tokenizer, result.state, [sample.prompt], tokens=tokens, seed=seed)
    why = f" (without a KV cache: {generator.whole_window})" if generator.whole_window else ""
    if tokens < sample.tokens:
        why += f", {tokens} of {sample.tokens} tokens, because training sequences have {setup.config.data.sequence}"
    show(f"\nsample at {sampling}{why}:\n{text}")
