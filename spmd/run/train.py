"""Training run: start or resume, train until the last step or preemption, roll back on divergence."""

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.tree import OptionalState
from spmd.checkpoint.versions import library_versions
from spmd.data.corpus import Corpus
from spmd.data.loader import Windows, batches, evaluation_batches
from spmd.distributed.compilation_cache import cache_dir, cache_fault, compilation_cache
from spmd.distributed.initialize import compiler_environment
from spmd.distributed.native_output import redirect_native_stdout
from spmd.errors import DivergenceError, NonFiniteError, SpikeError
from spmd.gradients.compression_state import adapt_compression, stored_compression
from spmd.gradients.magnitudes import adapt_magnitudes, stored_magnitudes
from spmd.model_api.compress import COMPRESSION
from spmd.observe.goodput import Stopwatch
from spmd.observe.idle_experts import IdleExperts
from spmd.observe.metrics import Console, JsonLines, StepClock, Writers, utilization
from spmd.observe.profiling import Profile
from spmd.observe.tensorboard import TensorBoard
from spmd.observe.waiting import show_waiting
from spmd.plan.scaled_param import MAGNITUDES
from spmd.resilience.consistency import check_hosts_agree, source_fingerprint
from spmd.resilience.divergence import DivergenceCheck
from spmd.resilience.lease import Lease
from spmd.resilience.preemption import Preemption
from spmd.resilience.sdc import DeterminismCheck, ReplicaCheck
from spmd.resilience.watchdog import Watchdog
from spmd.run.build import TrainSetup, abstract_batch, build_precision, count_flops
from spmd.run.config import config_values
from spmd.run.describe import execution_lines
from spmd.run.hooks import Evaluate, Log, Save, Telemetry
from spmd.run.init_from import copy_source_files, initial_state
from spmd.run.record import changed_fields, check_resumable, checkpoint_record
from spmd.run.run_dir import ProcessLog, RunDir
from spmd.sharding.mesh import batch_sharding
from spmd.train.loop import Hook, fit
from spmd.train.state import TrainState, abstract_state
from spmd.train.step import make_eval_step


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        val_loss: Nats per token on the validation split, None if it was not evaluated.
        checkpoint: Step of the newest checkpoint.
        loss: Training loss of the last logged step, as `mfu`.
        seconds: Wall-clock time with compilation, evaluation and checkpoints.
        steps: Steps taken by this process, without those that were rolled back.
        preempted: Last step of a preempted run, which was saved; None if the run reached its last step.
    """

    state: TrainState
    val_loss: float | None
    val_tokens: int
    checkpoint: int | None
    loss: float | None
    mfu: float | None
    seconds: float
    steps: int
    preempted: int | None


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """State after `step` steps, and the number of batches that rollbacks have skipped so far."""

    step: int
    skipped_batches: int
    state: TrainState


def train(
    setup: TrainSetup,
    corpus: Corpus,
    run_dir: RunDir,
    source: Path,
    console: Console | None,
    lease: Lease,
    *,
    resume: bool,
    profile: tuple[int, int] | None,
    said: Sequence[str] = (),
) -> RunResult:
    """Train until the config's last step or preemption.

    Args:
        source: The config file.
        console: None on all processes but the first.
        lease: That of the run folder, entered.
        resume: Start from the newest checkpoint in `run_dir`.
        profile: First and last step to trace.
        said: Lines of the runtime's start, for the log.

    Raises:
        DivergenceError: A step is non-finite or a spike, and the config says stop, or rollbacks are used up; or too
            many steps were skipped.
    """
    config, recovery = setup.config, setup.config.recovery
    with contextlib.ExitStack() as stack:
        fault = cache_fault(setup.mesh.shape["pipe"])
        stack.enter_context(compilation_cache(None if fault else cache_dir(config.compilation_cache_dir)))
        log = stack.enter_context(ProcessLog(run_dir.log))
        if jax.process_count() > 1:
            redirect_native_stdout(log.file)
        watchdog = stack.enter_context(Watchdog(recovery.deadline, recovery.start_deadline, log.file))
        for line in (*said, *filter(None, [fault])):
            log.say(line)
        log.say(f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} devices")
        check_hosts_agree(_common_to_hosts(setup, corpus, source, resume))
        preemption = stack.enter_context(Preemption())
        tracing = stack.enter_context(Profile(run_dir.path / "profile", profile, log.say))
        checkpoints = stack.enter_context(
            CheckpointManager(
                run_dir.checkpoints,
                max_to_keep=config.max_to_keep,
                keep_best=config.keep_best,
                before_write=lease.renew,
                owner=lease.number,
            )
        )
        telemetry = Telemetry(StepClock(), Stopwatch(), watchdog, lease, log.say)
        run = _Run(setup, corpus, run_dir, console, checkpoints, telemetry, preemption, tracing)
        began, rollbacks = time.perf_counter(), 0
        point = run.prepare(source, resume)
        first_step = point.step
        while True:
            try:
                state, last_step, logged, evaluated = run.fit(point)
                break
            except DivergenceError as error:
                response = {NonFiniteError: config.on_nan, SpikeError: recovery.on_spike}.get(type(error))
                if response != "roll-back" or rollbacks == recovery.rollbacks:
                    raise
                bad_step, reason = error.step, str(error).partition("\n")[0]
            # Outside of the handler: the error's traceback holds the state, and two may not fit in memory.
            rollbacks += 1
            run.say(f"{reason}\nrolling back ({rollbacks} of at most {recovery.rollbacks} times)")
            point = run.roll_back(point, bad_step)
        return RunResult(
            state=state,
            val_loss=evaluated.last.get("val_loss"),
            val_tokens=evaluated.tokens,
            checkpoint=checkpoints.latest(),
            loss=logged.last.get("loss"),
            mfu=logged.last.get("mfu"),
            seconds=time.perf_counter() - began,
            steps=last_step - first_step,
            preempted=last_step if last_step != config.steps else None,
        )


def _common_to_hosts(setup: TrainSetup, corpus: Corpus, source: Path, resume: bool) -> dict[str, Any]:
    """Return the values that must be equal on all processes."""
    return {
        "config": config_values(setup.config),
        "config file": hashlib.sha256(source.read_bytes()).hexdigest(),
        "plan": f"{setup.plan}{execution_lines(setup)}",
        "batch": {name: f"{x.dtype}{list(x.shape)}" for name, x in abstract_batch(setup.config).items()},
        "data": corpus.fingerprint,
        "versions": library_versions(),
        "source": source_fingerprint(),
        "environment": compiler_environment(),
        "resume": resume,
        "devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
    }


@dataclasses.dataclass(frozen=True)
class _Run:
    """One process of a run: what surrounds the training loop."""

    setup: TrainSetup
    corpus: Corpus
    run_dir: RunDir
    console: Console | None
    checkpoints: CheckpointManager
    telemetry: Telemetry
    preemption: Preemption
    profile: Profile

    def say(self, text: str) -> None:
        """Write to the log and, on the first process, to the console."""
        self.telemetry.say(text)
        if self.console:
            self.console.say(text)

    def prepare(self, source: Path, resume: bool) -> ResumePoint:
        """Compile the step, restore or initialize the state, and write the run folder."""
        setup = self.setup
        if self.checkpoints.leftovers:
            self.say(f"removed interrupted saves: {', '.join(self.checkpoints.leftovers)}")
        if resume and (latest := self.checkpoints.latest()) is not None:  # before anything compiles
            check_resumable(self.checkpoints.record(latest), setup.config, self.corpus, self.run_dir.path)
        with self.waiting("compile", "compiling the step"):
            setup.step.compile(abstract_batch(setup.config))
        point = self.restore() if resume else self.initialize()
        self.telemetry.lease.renew()
        if jax.process_index() == 0:
            self.run_dir.describe(setup.config, source, f"{setup.plan}{execution_lines(setup)}")
            copy_source_files(setup, self.run_dir.path)
        self.telemetry.stopwatch.switch_to("step")
        if point.step == setup.config.steps:
            self.say(f"nothing is left to train: step {point.step} of {point.step} is done (--steps for more)")
        return point

    @contextlib.contextmanager
    def waiting(self, activity: str, doing: str) -> Iterator[None]:
        """Account the block to an activity, and show that it goes on."""
        shown = show_waiting(doing, plain=True) if self.console else contextlib.nullcontext()
        with shown, self.telemetry.during(activity, doing):
            yield

    def initialize(self) -> ResumePoint:
        with self.waiting("compile", "initializing the parameters"):
            return ResumePoint(0, 0, jax.block_until_ready(initial_state(self.setup)))

    def restore(self) -> ResumePoint:
        """Restore the newest intact checkpoint, or return the initial state if none was saved."""
        setup, checkpoints = self.setup, self.checkpoints
        if not (checkpoints.steps() or checkpoints.damaged):
            self.say("there is no checkpoint to resume from: starting from step 0")
            return self.initialize()
        with self.waiting("restore", "restoring a checkpoint"):
            optional = [
                OptionalState(f"variables/{COMPRESSION}", stored_compression, adapt_compression),
                OptionalState(f"variables/{MAGNITUDES}", stored_magnitudes, adapt_magnitudes),
            ]
            state, record = checkpoints.restore(None, abstract_state(setup.plan), optional=optional)
        check_resumable(record, setup.config, self.corpus, self.run_dir.path)
        for step, problems in checkpoints.damaged.items():
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            self.say(f"skipped checkpoint {step}: {problems[0].where} {problems[0].what}{more}")
        step = int(record["step"])
        self.say(f"resuming from step {step}")
        for name, (old, new) in changed_fields(record, setup.config).items():
            self.say(f"  {name} changes from {old} to {new}")
        return ResumePoint(step, int(record["position"]) // setup.config.data.batch - step, state)

    def roll_back(self, point: ResumePoint, bad_step: int) -> ResumePoint:
        """Restore the newest checkpoint and skip the batches up to that of `bad_step`."""
        self.telemetry.lease.renew()
        if jax.process_index() == 0:  # the step that was reached: some of its work is repeated
            self.telemetry.stopwatch.write(self.run_dir.path, bad_step)
        newest = self.restore()
        skipped = bad_step - newest.step
        self.say(f"skipping {skipped} batches of the data")
        return dataclasses.replace(newest, skipped_batches=point.skipped_batches + skipped)

    def fit(self, point: ResumePoint) -> tuple[TrainState, int, Log, Evaluate]:
        """Train from `point`; return the state and the step at the end, with the hooks that have its metrics."""
        setup, config, path = self.setup, self.setup.config, self.run_dir.path
        telemetry, skipped = self.telemetry, point.skipped_batches
        is_first, sharding = jax.process_index() == 0, batch_sharding(setup.mesh)
        metrics, start = self.run_dir.metrics, point.step
        files = Writers([JsonLines(metrics, start), TensorBoard(path / "tensorboard", start)] if is_first else [])
        stream = batches(
            Windows(self.corpus.train, config.data.sequence),
            batch=config.data.batch,
            sharding=sharding,
            seed=config.seed,
            start=point.step + skipped,
            steps=config.steps + skipped,
            threads=config.data.threads,
            prefetch=config.data.prefetch,
        )
        with contextlib.closing(files), stream:
            writers = Writers([files, self.console] if self.console else [files])
            mfu = functools.partial(utilization, count_flops(config), devices=list(setup.mesh.devices.flat))
            log = Log(config, mfu, writers, telemetry, path if is_first else None, skipped)
            windows = Windows(self.corpus.validation, config.data.sequence)
            step = make_eval_step(setup.plan, setup.evaluation_loss_fn)
            evaluate = Evaluate(config, step, windows, sharding, writers, telemetry)
            record = checkpoint_record(setup, self.corpus)
            save = Save(config, record, self.checkpoints, evaluate, self.preemption, telemetry, skipped)
            guards = [self.divergence_check(skipped), telemetry.watchdog, self.preemption, self.profile]
            guards.append(IdleExperts(self.say))
            hooks = [*guards, log, evaluate, *self.sdc_checks(), save]
            timed = telemetry.stopwatch.time_batches(stream)
            state = fit(point.state, setup.step, timed, steps=config.steps, start=start, hooks=hooks)
            with telemetry.during("checkpoint", "waiting for the last checkpoint to be written"):
                self.checkpoints.wait()
            telemetry.watchdog.reset("the last checkpoint")
            if stopped := self.preemption.stop_step:
                telemetry.say(f"preempted: stopped after step {stopped}")
            last_step = stopped or config.steps
            log.finish(last_step)
        return state, last_step, log, evaluate

    def divergence_check(self, skipped_batches: int) -> DivergenceCheck:
        config, scaling = self.setup.config, build_precision(self.setup.config).loss_scale
        recovery = config.recovery
        return DivergenceCheck(
            config.data.batch,
            steps=config.steps,
            skipped_batches=skipped_batches,
            last_good=self.checkpoints.latest,
            non_finite=config.on_nan != "skip",
            floor=scaling.floor if scaling else 0.0,
            factor=recovery.spike_factor if recovery.on_spike in ("stop", "roll-back") else 0.0,
            window=recovery.spike_window,
            skips_in_a_row=recovery.skips_in_a_row,
            skipped_share=recovery.skipped_share,
        )

    def sdc_checks(self) -> list[Hook]:
        setup, every, data = self.setup, self.setup.config.sdc_checks, self.setup.config.data
        checking = functools.partial(self.telemetry.during, "check", "checking for silent data corruption")
        hooks: list[Hook] = []
        if every.replicas_every:
            hooks.append(ReplicaCheck(setup.plan, every.replicas_every, checking))
        if every.repeat_every:
            windows, tokens = Windows(self.corpus.train, data.sequence), data.batch * data.sequence
            sharding = batch_sharding(setup.mesh)
            probe = next(evaluation_batches(windows, batch=data.batch, sharding=sharding, tokens_at_most=tokens))
            hooks.append(DeterminismCheck(setup.plan, setup.grad_fn, probe, every.repeat_every, checking))
        return hooks
