"""Training of a language model as its config says: `spmd.train(config)` and `spmd train`."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from spmd.data.corpus import Corpus
from spmd.data.loader import Batch, Batches, bigram_loss, ordered_batches
from spmd.data.tokenizer import Tokenizer
from spmd.data.training_text import TrainingText
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import SINGLE_PROCESS, initialize
from spmd.generate.sampling import Sampling
from spmd.generate.text import generate_texts, make_generator
from spmd.observe.fit import fitted
from spmd.observe.metrics import Writer
from spmd.observe.profiling import parse_steps
from spmd.observe.writers import check_packages
from spmd.run.build import TrainSetup, abstract_batch, config_mesh, count_flops, make_setup, open_training_text
from spmd.run.config import TrainConfig
from spmd.run.describe import execution_lines, flags_text
from spmd.run.evaluate import EvaluationSet, held_out_sets, open_sets, set_batches
from spmd.run.hooks import Throughput
from spmd.run.init_from import check_init, copy_source_files, initial_state
from spmd.run.load_params import frozen_base
from spmd.run.preflight import count_sample_tokens, preflight
from spmd.run.run import Run
from spmd.run.run_dir import Resume, RunDir
from spmd.run.session import RunResult
from spmd.sharding.mesh import AnyMesh
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
    check_packages(config.metrics_to)
    folder = run_dir(config, source)
    resumes, _ = folder.check_use(resume), parse_steps(profile)
    said = initialize(config.devices, launch_args)
    checked = check(config, config_mesh(config), resumes)
    run = make_run(checked, folder.path, hooks, writers, source)
    result = run.train(resume, take_over=take_over, profile=profile, said=said)
    if result.preempted is None:
        _compare(config, checked.text, result)
        if config.sample.prompt:
            _sample(checked.setup, checked.text.tokenizer, result)
    return result


def run_dir(config: TrainConfig, source: Path | None) -> RunDir:
    """Return the run folder of a config."""
    return RunDir(Path(config.out or f"runs/{source.stem.replace('_', '-') if source else 'run'}"))


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedRun:
    """Everything that a run reads, checked before anything compiles.

    Attributes:
        sets: Evaluation sets; the first one is the validation split of the text.
        init: Line about the initial parameters; empty for a run that is resumed.
    """

    setup: TrainSetup
    text: TrainingText
    sets: Sequence[EvaluationSet]
    init: str


def check(config: TrainConfig, mesh: AnyMesh, resumes: bool) -> CheckedRun:
    """Return the checked setup and data of a run."""
    setup = make_setup(config, mesh)
    preflight(setup)
    text = open_training_text(config)
    own = held_out_sets(text)
    taken = [each.name for each in own]
    named = open_sets(config, config.evaluate.sets, text.tokenizer, "evaluate.sets", taken=taken)
    return CheckedRun(setup, text, (*own, *named), "" if resumes else check_init(setup))


def make_run(
    checked: CheckedRun,
    folder: Path,
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
    source: Path | None = None,
) -> Run:
    """Return the run of a checked setup and its data."""
    setup, text, init = checked.setup, checked.text, checked.init
    config, plan, data = setup.config, setup.plan, setup.config.data
    device, sharding = jax.devices()[0], plan.batch_sharding("tokens")
    flags = flags_text(setup, device.platform, device.device_kind)
    order = text.order(config.seed)
    corpus_line = f"\n{text.describe(config.steps, data.batch)}"

    frozen, base_line = frozen_base(config) if config.lora.targets else None, ""
    if frozen and frozen.origin:
        keep = f"keep {frozen.origin['path']}, or save the frozen parameters, too (--lora.save-base)"
        base_line = f"\ncheckpoints have the adapters alone: {keep}"

    def training(start: int, steps: int) -> Batches:
        text.check_epochs(steps, data.batch)  # again, as roll-backs skip batches
        return ordered_batches(
            order,
            batch=data.batch,
            sharding=sharding,
            start=start,
            steps=steps,
            threads=data.threads,
            prefetch=data.prefetch,
        )

    def evaluation(each: EvaluationSet) -> Iterable[Batch]:
        return set_batches(each, data.batch, sharding, config.evaluate.tokens)

    return Run(
        folder,
        setup.step,
        training,
        config=config,
        evaluation={each.name: functools.partial(evaluation, each) for each in checked.sets},
        evaluation_loss=setup.evaluation_loss_fn,
        data=text.fingerprint,
        hooks=(CopySourceFiles(setup, folder), *hooks),
        writers=writers,
        throughput=Throughput(data.batch * data.sequence, "tokens", count_flops(config)),
        batch=abstract_batch(config),
        reloaded=frozen,
        initial_state=functools.partial(initial_state, setup),
        text=f"{plan}{execution_lines(setup)}",
        notes=tuple(filter(None, (flags, init and f"\n{init}", base_line, corpus_line))),
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


def _compare(config: TrainConfig, text: TrainingText, result: RunResult) -> None:
    """Print the validation loss of a model that counts pairs of tokens, where their table is small."""
    corpus, vocab = text.sets[0].text, text.tokenizer.vocab
    if text.is_mixture or not isinstance(corpus, Corpus) or corpus.train_mask is not None:
        return
    if jax.process_index() == 0 and result.evaluation and vocab <= 256:
        baseline = bigram_loss(corpus.train, corpus.validation[: config.evaluate.tokens + 1], vocab)
        print(fitted(f"\na bigram count model of the same corpus has a validation loss of {baseline:.4f}"))


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
