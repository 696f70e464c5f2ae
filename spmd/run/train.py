"""Training of a language model as its config says: `spmd.train(config)` and `spmd train`."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.data.batch_order import BatchOrder
from spmd.data.corpus import Corpus
from spmd.data.length_groups import LengthGroups
from spmd.data.loader import Batch, batches_in_order, bigram_loss
from spmd.data.text_dataset import TextDataset
from spmd.data.tokenizer import Tokenizer
from spmd.distributed.accelerators import describe_devices
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import (
    SINGLE_PROCESS,
    initialize,
    is_first_process,
    own_address,
    starts_alone,
)
from spmd.generate.sampling import Sampling
from spmd.generate.text import generate_texts, load_state, make_generator
from spmd.observe.lasting_output import lasting_output
from spmd.observe.metrics import Writer
from spmd.observe.profiling import parse_steps
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.observe.writers import check_packages
from spmd.resilience.attempts import CurrentAttempt
from spmd.resilience.supervisor import Worker
from spmd.run.build import (
    TrainSetup,
    abstract_batch,
    build_flags,
    config_mesh,
    count_flops,
    make_setup,
    row_multiple,
    weighed_unit,
)
from spmd.run.compiled_step import LoadResult, load_compiled_step
from spmd.run.config import TrainConfig
from spmd.run.describe import execution_lines, flags_text
from spmd.run.evaluate import EvaluationSet, held_out_sets, open_sets, set_batches
from spmd.run.external_state import ExternalState
from spmd.run.hooks import Throughput
from spmd.run.init_from import check_init, copy_source_files, initial_state
from spmd.run.load_params import frozen_base
from spmd.run.open_text import open_text_dataset
from spmd.run.preflight import count_sample_tokens, preflight
from spmd.run.reference import (
    compute_references,
    find_references,
    keep_references,
    pairs_with_reference,
)
from spmd.run.run import Run
from spmd.run.run_dir import Resume, RunDir
from spmd.run.session import RunResult
from spmd.run.teacher import BatchesWithTeacher, Teacher, open_teacher
from spmd.sharding.mesh import AnyMesh
from spmd.storage.address import locate
from spmd.training.loop import Hook


@lasting_output()
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
    began: float | None = None,
    max_restarts: int = 0,
    worker: Worker | None = None,
) -> RunResult:
    """Train a language model as its config says.

    The first process prints the plan and the results.

    Args:
        config: Its `out` names the run folder, by default `runs/run`, or that of `source`.
        resume: If the folder contains a run: never (refuse the folder), auto (resume; start a run
            if there is none), always (resume; refuse a folder without a checkpoint).
        take_over: Take the folder from the process that writes to it.
        profile: Steps to trace, such as `10:15`.
        hooks: Further hooks of the training loop.
        writers: Further writers of metrics.
        source: The file that defines the config; `spmd generate` and `spmd export` of the run need
            it.
        launch_args: How to connect to other processes.
        began: Start of the session for its goodput, in seconds since the epoch; by default, this
            call.
        max_restarts: Attempts in a row without a newer checkpoint, after which a further one is
            refused; 0 for any number, without a record.
        worker: This process under its supervisor, as `spmd train` starts it.

    Raises:
        RestartsError: The last attempts got no further.
        SpmdError: The config, the data or the folder cannot be used, or training diverged.
    """
    if began is None:
        began = time.time()
    check_packages(config.metrics_to)
    folder = run_dir(config, source)
    parse_steps(profile)  # a wrong flag is an error before anything is built
    if starts_alone(launch_args):
        folder.check_use(resume)  # now, since devices may take a while to start
    is_first = is_first_process(launch_args)
    newest = folder.newest_checkpoint()
    if worker is not None:
        newest = worker.newest_step(newest)
    with CurrentAttempt(
        folder.path, newest, max_restarts, is_first, folder.upload_attempts
    ) as attempt:
        said = initialize(config.devices, launch_args)
        if worker is not None:
            worker = dataclasses.replace(worker, address=own_address(launch_args))
        resumes = folder.check_use_together(resume)
        earlier_attempt = attempt.share()
        was_checked = worker is not None and worker.is_restart
        mesh = config_mesh(config)
        checked = check(config, mesh, resumes, folder, source, was_checked=was_checked)
        if resumes:
            _find_references(checked, folder)
        run = make_run(checked, folder, hooks, writers, source)
        if jax.process_index() == 0:
            print(describe_devices(jax.devices()), flush=True)
            print(f"{earlier_attempt}\n".lstrip(), end="", flush=True)
        said += earlier_attempt.splitlines()
        result = run.train(
            resume,
            take_over=take_over,
            profile=profile,
            said=said,
            began=began,
            worker=worker,
        )
        if result.preempted is None:
            attempt.finish()
    if result.preempted is None:
        _print_bigram_loss(config, checked.text, result)
        if config.sample.prompt:
            _print_sample(checked.setup, checked.text.tokenizer, result)
    return result


def _find_references(checked: "CheckedRun", folder: RunDir) -> None:
    """Give evaluation sets the reference model's log-probabilities.

    A set that was named after the run has begun has no file in its folder.
    """
    named = pairs_with_reference(part for each in checked.sets for part in each.parts)
    if named:
        find_references(checked.setup, named, folder.fetch_reference())


def run_dir(config: TrainConfig, source: Path | None) -> RunDir:
    """Return the run folder of a config."""
    if config.out:
        return RunDir(locate(config.out))
    name = source.stem.replace("_", "-") if source else "run"
    return RunDir(Path("runs") / name)


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedRun:
    """Inputs of a run, checked before anything compiles.

    Attributes:
        order: Order of the training batches.
        sets: Evaluation sets; the first one is the validation split of the text.
        init: Line about the initial parameters; empty for a run that is resumed.
        teacher: The frozen model beside the trained one, if there is one.
        load_result: Whether the compiled step is loaded; None if that was not tried.
    """

    setup: TrainSetup
    text: TextDataset
    order: BatchOrder
    sets: Sequence[EvaluationSet]
    init: str
    teacher: Teacher | None = None
    load_result: LoadResult | None = None


def check(
    config: TrainConfig,
    mesh: AnyMesh,
    resumes: bool,
    folder: RunDir | None = None,
    source: Path | None = None,
    *,
    was_checked: bool = False,
) -> CheckedRun:
    """Return the checked setup and data of a run.

    Args:
        folder: The run folder, from which the compiled step is loaded; None for absent devices.
        source: The file that defines the config.
        was_checked: An earlier process has checked the same config on the same machine.
    """
    setup = make_setup(config, mesh)
    load_result = None
    if folder:
        load_result = load_compiled_step(setup.step, setup.batch, config, folder, source)
    if not was_checked:
        preflight(setup, is_loaded=load_result is not None and load_result.loaded is not None)
    text = open_text_dataset(config)
    own = held_out_sets(text)
    taken = [each.name for each in own]
    named = open_sets(config, config.evaluate.sets, text.tokenizer, "evaluate.sets", taken=taken)
    init = "" if resumes else check_init(setup)
    teacher = open_teacher(setup)
    order = text.batch_order(config.data, config.seed, row_multiple(setup.plan))
    if not was_checked:
        if teacher is not None:
            teacher.check(text.tokenizer, config.model.vocab)
        for batch in _other_batches(setup, order, 0, config.steps):
            setup.step.trace(batch)
    return CheckedRun(setup, text, order, (*own, *named), init, teacher, load_result)


def make_run(
    checked: CheckedRun,
    folder: RunDir,
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
    source: Path | None = None,
) -> Run:
    """Return the run of a checked setup and its data."""
    setup = checked.setup
    config = setup.config
    text = checked.text
    device = jax.devices()[0]
    kind = device.device_kind
    flags = flags_text(build_flags(config, device.platform, kind), device.platform)
    order = checked.order
    corpus_line = f"\n{text.describe(config.data.batch_sizes.rows_before(config.steps))}"
    if isinstance(order, LengthGroups):
        corpus_line += f"{order}\n"
    other_batches = None
    count_of = None
    shape = (config.data.batch, config.data.sequence)
    if list(order.shapes(0, config.steps)) != [shape]:
        other_batches = functools.partial(_other_batches, setup, order)
        count_of = functools.partial(_tokens_of, order)
    frozen = frozen_base(config) if config.lora.targets else None
    rows = list(text.parts)
    for each in checked.sets:
        rows += each.parts
    pairs = pairs_with_reference(rows)
    on_initial_state = None
    if pairs:
        keep_references(pairs, folder.fetch_reference())
        on_initial_state = functools.partial(compute_references, setup, pairs)
    notes = [
        flags,
        _init_line(checked.init),
        _base_line(frozen),
        corpus_line,
    ]
    tokens = config.data.batch * config.data.sequence
    return Run(
        folder.location,
        setup.step,
        functools.partial(_training_batches, checked),
        config=config,
        evaluation=_evaluation_batches(checked),
        evaluation_loss=setup.evaluation_loss_fn,
        data=text.fingerprint,
        inputs=_inputs(checked),
        hooks=(CopySourceFiles(setup, folder.path), *hooks),
        writers=writers,
        throughput=Throughput(
            tokens,
            "tokens",
            count_flops(config),
            weighed_unit(config),
            count_of=count_of,
        ),
        batch=setup.batch,
        other_batches=other_batches,
        reloaded=frozen,
        load_result=checked.load_result,
        initial_state=functools.partial(initial_state, setup),
        on_initial_state=on_initial_state,
        text=f"{setup.plan}{execution_lines(setup)}",
        notes=tuple(note for note in notes if note),
        source=source,
    )


def _init_line(init: str) -> str:
    if not init:
        return ""
    return f"\n{init}"


def _base_line(frozen: ExternalState | None) -> str:
    """Return a line about frozen parameters outside of the checkpoints; empty without any."""
    if not frozen or not frozen.origin:
        return ""
    keep = f"keep {frozen.origin['path']}"
    save = "save the frozen parameters, too (--lora.save-base)"
    return f"\ncheckpoints have the adapters alone: {keep}, or {save}"


def _inputs(checked: CheckedRun) -> dict[str, str]:
    """Return field → fingerprint of the run's inputs beside its text.

    They are the teacher, and the lengths of groups, which follow from the text and the mesh.
    """
    found = dict[str, str]()
    if checked.teacher is not None:
        found["teacher"] = checked.teacher.digest
    if isinstance(checked.order, LengthGroups):
        lengths = " ".join(map(str, checked.order.lengths))
        found["data.length_groups"] = f"{lengths} tokens a row"
    return found


def _tokens_of(order: BatchOrder, number: int) -> int:
    """Return the tokens of a batch, with padding."""
    return math.prod(order.shape(number))


def _other_batches(setup: TrainSetup, order: BatchOrder, start: int, steps: int) -> list[Any]:
    """Return the abstract batches of some steps with another shape than the setup's."""
    config = setup.config
    others = list[Any]()
    for shape in order.shapes(start, steps):
        if shape != (config.data.batch, config.data.sequence):
            others.append({**setup.batch, **abstract_batch(config, shape)})
    return others


def _training_batches(checked: CheckedRun, start: int, steps: int) -> Iterator[Any]:
    """Return the batches of the steps `start + 1 … steps`."""
    setup = checked.setup
    data = setup.config.data
    checked.text.check_epochs(steps, data.batch_sizes)  # again, as roll-backs skip batches
    batches = batches_in_order(
        checked.order,
        sharding=setup.plan.batch_sharding("tokens"),
        start=start,
        steps=steps,
        threads=data.threads,
        prefetch=data.prefetch,
    )
    if checked.teacher is None:
        return batches
    return BatchesWithTeacher(batches, checked.teacher.arrays)


def _evaluation_batches(checked: CheckedRun) -> dict[str, Callable[[], Iterable[Batch]]]:
    """Return name → function of the batches for each evaluation set."""
    config = checked.setup.config
    sharding = checked.setup.plan.batch_sharding("tokens")
    batches = dict[str, Callable[[], Iterable[Batch]]]()
    for each in checked.sets:
        batches[each.name] = functools.partial(
            set_batches, each, config.data.batch, sharding, config.evaluate.tokens
        )
    return batches


@dataclasses.dataclass(eq=False)
class CopySourceFiles(Hook):
    """Copies the files for an export from the folder `init` into the run folder."""

    setup: TrainSetup
    folder: Path

    def on_start(self, step: int) -> None:
        """Copy."""
        if jax.process_index() == 0:
            copy_source_files(self.setup, self.folder)


def _print_bigram_loss(config: TrainConfig, text: TextDataset, result: RunResult) -> None:
    """Print the validation loss of a bigram count model, if its table is small."""
    corpus = text.sets[0].text
    vocab = text.tokenizer.vocab
    if text.is_mixture or not isinstance(corpus, Corpus) or corpus.train_mask is not None:
        return
    if jax.process_index() == 0 and result.evaluation and vocab <= 256:
        evaluated = corpus.validation[: config.evaluate.tokens + 1]
        baseline = bigram_loss(corpus.train, evaluated, vocab)
        model = "a bigram count model of the same corpus"
        print(wrap_to_terminal(f"\n{model} has a validation loss of {baseline:.4f}"))


def _print_sample(setup: TrainSetup, tokenizer: Tokenizer, result: RunResult) -> None:
    """Generate and print the config's sample; all processes take part."""
    config = setup.config
    sample = config.sample
    sequence = config.data.sequence
    sampling = Sampling(sample.temperature, sample.top_k, sample.top_p)
    tokens = count_sample_tokens(config, tokenizer)
    generator = make_generator(setup.plan, tokenizer, sequence, sampling)
    model = load_state(generator, result.state, setup.plan)
    prompts = [sample.prompt]
    (text,) = generate_texts(model, tokenizer, prompts, tokens=tokens, seed=config.seed)
    why = ""
    if generator.whole_window:
        why = f" (without a KV cache: {generator.whole_window})"
    if tokens < sample.tokens:
        why += f", {tokens} of {sample.tokens} tokens, because training sequences have {sequence}"
    if jax.process_index() == 0:
        print(f"\nsample at {sampling}{why}:\n{text}")
