"""Training of a language model as its config says: `spmd.train(config)` and `spmd train`."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from spmd.data.corpus import Corpus
from spmd.data.loader import Batch, Batches, batches, bigram_loss, make_rows
from spmd.data.packing import PackedDocuments
from spmd.data.tokenizer import Tokenizer
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import SINGLE_PROCESS, initialize
from spmd.generate.sampling import Sampling
from spmd.generate.text import generate_texts, make_generator
from spmd.observe.metrics import Writer
from spmd.observe.profiling import parse_steps
from spmd.run.build import TrainSetup, abstract_batch, config_mesh, count_flops, make_setup, open_corpus
from spmd.run.config import TrainConfig
from spmd.run.describe import execution_lines, flags_text
from spmd.run.evaluate import EvaluationSet, open_sets, set_batches
from spmd.run.hooks import Throughput
from spmd.run.init_from import check_init, copy_source_files, initial_state
from spmd.run.preflight import count_sample_tokens, preflight
from spmd.run.run import Run
from spmd.run.run_dir import Resume, RunDir
from spmd.run.session import RunResult
from spmd.sharding.mesh import AnyMesh, batch_sharding
from spmd.training.loop import Hook


def train(
    config: TrainConfig,
    *,
    resume: Resume = "never",
    take_over: bool = False,
    profile: str = "",
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
    source: Path | None = None,
    launch_args: LaunchArgs = SINGLE_PROCESS,
) -> RunResult:
    """Train a language model as its config says; on the first process, print what is trained and how it went.

    Args:
        config: Its `out` names the run folder, by default `runs/run`, or that of `source`.
        resume: If the folder contains a run: never (refuse the folder), auto (resume; start a run if there is none),
            always (resume; refuse a folder without a checkpoint).
        take_over: Take the folder from the process that writes to it.
        profile: Steps to trace, such as `10:15`.
        hooks: Further hooks of the training loop.
        writers: Further writers of metrics.
        source: The file that defines the config; `spmd generate` and `spmd export` of the run need it.
        launch_args: How to connect to other processes.

    Raises:
        SpmdError: The config, the data or the folder cannot be used, or training diverged.
    """
    folder = run_dir(config, source)
    resumes, _ = folder.check_use(resume), parse_steps(profile)
    said = initialize(config.devices, launch_args)
    setup, corpus, init = check(config, config_mesh(config), resumes)
    run = make_run(setup, corpus, folder.path, init, hooks, writers, source)
    result = run.train(resume, take_over=take_over, profile=profile, said=said)
    if result.preempted is None:
        _compare(config, corpus, result)
        if config.sample.prompt:
            _sample(setup, corpus.tokenizer, result)
    return result


def run_dir(config: TrainConfig, source: Path | None) -> RunDir:
    """Return the run folder of a config."""
    return RunDir(Path(config.out or f"runs/{source.stem.replace('_', '-') if source else 'run'}"))


def check(config: TrainConfig, mesh: AnyMesh, resumes: bool) -> tuple[TrainSetup, Corpus, str]:
    """Return the checked setup, the corpus, and a line about the initial parameters of a run that is not resumed."""
    setup = make_setup(config, mesh)
    preflight(setup)
    return setup, open_corpus(config), "" if resumes else check_init(setup)


def make_run(
    setup: TrainSetup,
    corpus: Corpus,
    folder: Path,
    init: str = "",
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
    source: Path | None = None,
) -> Run:
    """Return the run of a setup; `init` is a line about the initial parameters."""
    config, plan, data = setup.config, setup.plan, setup.config.data
    device, sharding = jax.devices()[0], batch_sharding(setup.mesh)
    sizes = f"{len(corpus.train):,} training tokens, {len(corpus.validation):,} validation tokens"
    flags = flags_text(setup, device.platform, device.device_kind)
    text = f"{plan}{execution_lines(setup)}"
    skipped = f" ({corpus.skipped:,} without text skipped)" if corpus.skipped else ""
    corpus_line = f"\ncorpus: {corpus.documents:,} documents{skipped}, {sizes}\n"

    rows = make_rows(data, corpus.train, corpus.train_ends)
    held_out = make_rows(data, corpus.validation, corpus.validation_ends)
    if isinstance(rows, PackedDocuments):
        corpus_line += f"packed into {len(rows):,} training sequences, {rows.wasted:.2%} of them padding\n"

    def training(start: int, steps: int) -> Batches:
        return batches(
            rows,
            batch=data.batch,
            sharding=sharding,
            seed=config.seed,
            start=start,
            steps=steps,
            threads=data.threads,
            prefetch=data.prefetch,
        )

    named = config.evaluate.sets
    sets = [EvaluationSet("val", (held_out,)), *(open_sets(config, named, corpus.tokenizer) if named else ())]

    def evaluation(each: EvaluationSet) -> Iterable[Batch]:
        return set_batches(each, data.batch, sharding, config.evaluate.tokens)

    return Run(
        folder,
        setup.step,
        training,
        config=config,
        evaluation={each.name: functools.partial(evaluation, each) for each in sets},
        evaluation_loss=setup.evaluation_loss_fn,
        data=corpus.fingerprint,
        hooks=(CopySourceFiles(setup, folder), *hooks),
        writers=writers,
        throughput=Throughput(data.batch * data.sequence, "tokens", count_flops(config)),
        batch=abstract_batch(config),
        initial_state=functools.partial(initial_state, setup),
        text=text,
        notes=tuple(filter(None, (flags, init and f"\n{init}", corpus_line))),
        source=source,
    )


@dataclasses.dataclass(eq=False)
class CopySourceFiles(Hook):
    """Copies what an export needs of the folder that `init` names into the run folder."""

    setup: TrainSetup
    folder: Path

    def on_start(self, step: int) -> None:
        """Copy."""
        if jax.process_index() == 0:
            copy_source_files(self.setup, self.folder)


def _compare(config: TrainConfig, corpus: Corpus, result: RunResult) -> None:
    """Print the validation loss of a model that counts pairs of tokens, where their table is small."""
    vocab = corpus.tokenizer.vocab
    if jax.process_index() == 0 and result.evaluation and vocab <= 256:
        baseline = bigram_loss(corpus.train, corpus.validation[: config.evaluate.tokens + 1], vocab)
        print(f"\na bigram count model of the same corpus has a validation loss of {baseline:.4f}")


def _sample(setup: TrainSetup, tokenizer: Tokenizer, result: RunResult) -> None:
    """Generate and print the config's sample; all processes take part."""
    sample, seed = setup.config.sample, setup.config.seed
    sampling = Sampling(sample.temperature, sample.top_k, sample.top_p)
    tokens = count_sample_tokens(setup.config, tokenizer)
    generator = make_generator(setup.plan, tokenizer, setup.config.data.sequence, sampling)
    (text,) = generate_texts(generator, tokenizer, result.state, [sample.prompt], tokens=tokens, seed=seed)
    why = f" (without a KV cache: {generator.whole_window})" if generator.whole_window else ""
    if tokens < sample.tokens:
        why += f", {tokens} of {sample.tokens} tokens, because training sequences have {setup.config.data.sequence}"
    if jax.process_index() == 0:
        print(f"\nsample at {sampling}{why}:\n{text}")
