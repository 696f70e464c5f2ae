"""One process's part in a run: start or resume, train, save, roll back on divergence."""

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from spmd.checkpoint.arrays import bytes_read
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.versions import library_versions
from spmd.distributed.initialize import compiler_environment
from spmd.distributed.native_output import redirect_native_stdout
from spmd.errors import DivergenceError, NonFiniteError, SpikeError
from spmd.observe.console import Console
from spmd.observe.goodput import Stopwatch
from spmd.observe.idle_experts import IdleExperts
from spmd.observe.metrics import JsonLines, StepClock, Writer, Writers, human_duration
from spmd.observe.profiling import Profile
from spmd.observe.waiting import show_waiting
from spmd.observe.writers import open_writers
from spmd.resilience.consistency import check_hosts_agree, source_fingerprint
from spmd.resilience.divergence import DivergenceCheck
from spmd.resilience.lease import Lease
from spmd.resilience.preemption import EXIT_PREEMPTED, Preemption
from spmd.resilience.sdc import DeterminismCheck, ReplicaCheck
from spmd.resilience.watchdog import Watchdog
from spmd.run.config import config_values
from spmd.run.definition import RunDefinition, closing
from spmd.run.hooks import Evaluate, Log, Save, Telemetry
from spmd.run.record import changed_fields, check_resumable, checkpoint_record
from spmd.run.reloaded import RELOADED, Reloaded
from spmd.run.run_dir import ProcessLog
from spmd.run.transforms import optional_states
from spmd.training.compilation_cache import cache_dir, cache_fault, compilation_cache
from spmd.training.evaluated_params import evaluated_params
from spmd.training.loop import Hook, fit
from spmd.training.state import TrainState, abstract_state, as_stored, from_stored, init_state
from spmd.training.step import make_eval_step
from spmd.tree import human_bytes


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        metrics: Metrics of the last step that was logged.
        evaluation: Newest means over the evaluation sets, such as `val_loss`.
        weights: Weight of each evaluation set, by its name.
        checkpoint: Step of the newest checkpoint.
        seconds: Wall-clock time with compilation, evaluation and checkpoints.
        steps: Steps taken by this process, without those that were rolled back.
        preempted: Last step of a preempted run, which was saved; None if the run reached its last step.
    """

    state: TrainState
    metrics: Mapping[str, Any]
    evaluation: Mapping[str, float]
    weights: Mapping[str, float]
    checkpoint: int | None
    seconds: float
    steps: int
    preempted: int | None

    @property
    def exit_code(self) -> int:
        """Exit code for the scheduler: 0, or 75 of a preempted run, which is to be started again."""
        return 0 if self.preempted is None else EXIT_PREEMPTED


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """Where training starts: after `step` steps.

    Attributes:
        skipped_batches: Batches of the data that rollbacks have skipped so far.
        evaluation: Progress of early stopping: the lowest loss and the evaluations since.
        reloaded: Origin of the part of the state that is not saved; None if all is.
    """

    step: int
    skipped_batches: int
    state: TrainState
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reloaded: Mapping[str, Any] | None = None


def train_in_folder(
    run: RunDefinition,
    lease: Lease,
    console: Console | None,
    resume: bool,
    profile: tuple[int, int] | None,
    said: Sequence[str],
) -> RunResult:
    """Train in the run's folder, whose lease is entered."""
    config, recovery, run_dir = run.config, run.config.recovery, run.run_dir
    with contextlib.ExitStack() as stack:
        fault = cache_fault(run.step.plan.mesh.shape["pipe"])
        stack.enter_context(compilation_cache(cache_dir(config.compilation_cache_dir)))
        log = stack.enter_context(ProcessLog(run_dir.log))
        if jax.process_count() > 1:
            redirect_native_stdout(log.file)
        watchdog = stack.enter_context(Watchdog(recovery.deadline, recovery.start_deadline, log.file))
        for line in (*said, *filter(None, [fault])):
            log.say(line)
        log.say(f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} devices")
        check_hosts_agree(_common_to_hosts(run, resume))
        preemption = stack.enter_context(Preemption())
        for writer in run.writers:
            stack.enter_context(contextlib.closing(writer))
        tracing = stack.enter_context(Profile(run_dir.path / "profile", profile, log.say))
        checkpoints = stack.enter_context(
            CheckpointManager(
                run_dir.checkpoints,
                max_to_keep=config.max_to_keep,
                keep_best=config.keep_best,
                best=f"{next(iter(run.evaluation), 'val')}_loss",
                before_write=lease.renew,
                owner=lease.number,
            )
        )
        notes = [log.say, *([console.note] if console else [])]
        telemetry = Telemetry(StepClock(), Stopwatch(), watchdog, lease, log.say, notes)
        session = _Session(run, console, checkpoints, telemetry, preemption, tracing)
        began, rollbacks = time.perf_counter(), 0
        point = session.prepare(resume)
        first_step = point.step
        while True:
            try:
                state, last_step, logged, evaluated = session.fit(point)
                break
            except DivergenceError as error:
                response = {NonFiniteError: config.on_nan, SpikeError: recovery.on_spike}.get(type(error))
                if response != "roll-back" or rollbacks == recovery.rollbacks:
                    raise
                bad_step, reason = error.step, str(error).partition("\n")[0]
            # Outside of the handler: the error's traceback holds the state, and two may not fit in memory.
            rollbacks += 1
            session.say(f"{reason}\nrolling back ({rollbacks} of at most {recovery.rollbacks} times)")
            point = session.roll_back(point, bad_step)
        return RunResult(
            state=state,
            metrics=logged.last,
            evaluation=evaluated.last,
            weights=evaluated.weights,
            checkpoint=checkpoints.latest(),
            seconds=time.perf_counter() - began,
            steps=last_step - first_step,
            preempted=last_step if last_step == preemption.stop_step != config.steps else None,
        )


def _common_to_hosts(run: RunDefinition, resume: bool) -> dict[str, Any]:
    """Return the values that must be equal on all processes."""
    shapes = jax.tree_util.tree_leaves_with_path(run.abstract_batch)
    return {
        "config": config_values(run.config),
        "config file": hashlib.sha256(run.source.read_bytes()).hexdigest() if run.source else "",
        "plan": run.description,
        "batch": {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in shapes},
        "data": run.data,
        "versions": library_versions(),
        "source": source_fingerprint(),
        "environment": compiler_environment(),
        "resume": resume,
        "devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
    }


@dataclasses.dataclass(frozen=True)
class _Session:
    """One process of a run: what surrounds the training loop."""

    run: RunDefinition
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

    def prepare(self, resume: bool) -> ResumePoint:
        """Compile the step, restore or initialize the state, and write the run folder."""
        run = self.run
        if self.checkpoints.leftovers:
            self.say(f"removed interrupted saves: {', '.join(self.checkpoints.leftovers)}")
        if resume and (latest := self.checkpoints.latest()) is not None:  # before anything compiles
            check_resumable(self.checkpoints.record(latest), run.config, run.data, run.examples, run.run_dir.path)
        began = time.perf_counter()
        with self.waiting("compile", "compiling the step"):
            run.step.compile(run.abstract_batch)
        self.telemetry.note(f"compiled the step in {human_duration(time.perf_counter() - began)}")
        point = self.restore() if resume else self.initialize()
        self.telemetry.lease.renew()
        if jax.process_index() == 0:
            run.run_dir.describe(run.config, run.source, run.description)
        self.telemetry.stopwatch.switch_to("step")
        if point.step == run.config.steps:
            self.say(f"nothing is left to train: step {point.step} of {point.step} is done (--steps for more)")
        return point

    @contextlib.contextmanager
    def waiting(self, activity: str, doing: str) -> Iterator[None]:
        """Account the block to an activity, and show that it goes on."""
        shown = show_waiting(doing, plain=True) if self.console else contextlib.nullcontext()
        with shown, self.telemetry.during(activity, doing):
            yield

    def initialize(self) -> ResumePoint:
        run = self.run
        with self.waiting("compile", "initializing the parameters"):
            state = run.initial_state() if run.initial_state else init_state(run.step.plan, run.config.seed)
            jax.block_until_ready(state)
            return ResumePoint(0, 0, state, reloaded=run.reloaded.record(state) if run.reloaded else None)

    def restore(self) -> ResumePoint:
        """Restore the newest intact checkpoint, or return the initial state if none was saved."""
        run, checkpoints = self.run, self.checkpoints
        if not (checkpoints.steps() or checkpoints.damaged):
            self.say("there is no checkpoint to resume from: starting from step 0")
            return self.initialize()
        with self.waiting("restore", "restoring a checkpoint"):
            plan = run.step.plan
            optional = [*optional_states(plan.transforms), *([run.reloaded.optional] if run.reloaded else [])]
            before = bytes_read()
            stored, record = checkpoints.restore(None, as_stored(abstract_state(plan)), optional=optional)
            self.telemetry.say(f"read {human_bytes(bytes_read() - before)} of the checkpoint")
            state = from_stored(run.reloaded.fill(stored, record) if run.reloaded else stored, plan)
        check_resumable(record, run.config, run.data, run.examples, run.run_dir.path)
        for step, problems in checkpoints.damaged.items():
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            self.say(f"skipped checkpoint {step}: {problems[0].where} {problems[0].what}{more}")
        step = int(record["step"])
        self.say(f"resuming from step {step}")
        for name, (old, new) in changed_fields(record, run.config).items():
            self.say(f"  {name} changes from {old} to {new}")
        skipped = int(record["position"]) // run.examples - step
        # What a checkpoint holds, later ones hold as well: the folder may have changed since.
        reloaded = record.get(RELOADED) if run.reloaded and run.reloaded.origin else None
        return ResumePoint(step, skipped, state, record.get("evaluation", {}), reloaded)

    def roll_back(self, point: ResumePoint, bad_step: int) -> ResumePoint:
        """Restore the newest checkpoint and skip the batches up to that of `bad_step`."""
        self.telemetry.lease.renew()
        if jax.process_index() == 0:  # the step that was reached: some of its work is repeated
            self.telemetry.stopwatch.write(self.run.run_dir.path, bad_step)
        newest = self.restore()
        skipped = bad_step - newest.step
        self.say(f"skipping {skipped} batches of the data")
        return dataclasses.replace(newest, skipped_batches=point.skipped_batches + skipped)

    def fit(self, point: ResumePoint) -> tuple[TrainState, int, Log, Evaluate]:
        """Train from `point`; return the state and the step at the end, with the hooks that have its metrics."""
        run, config, folder = self.run, self.run.config, self.run.run_dir
        telemetry, skipped, start, steps = self.telemetry, point.skipped_batches, point.step, config.steps
        path, plan = folder.path, run.step.plan
        with contextlib.ExitStack() as stack:
            writers = list[Writer]()
            if self.console:
                lines = stack.enter_context(contextlib.closing(JsonLines(folder.metrics, start)))
                named = open_writers(config.metrics_to, path, folder.metrics, start, config_values(config))
                own = stack.enter_context(contextlib.closing(Writers(named)))
                writers = [lines, own, *run.writers, self.console]
            batches = stack.enter_context(closing(run.batches(start + skipped, steps + skipped)))
            written, devices = Writers(writers), list(plan.mesh.devices.flat)
            goodput = path if self.console else None
            log = Log(config.log_every, steps, run.rate, devices, written, telemetry, goodput, skipped)
            sums, at = run.evaluation_loss and make_eval_step(plan, run.evaluation_loss), config.evaluate
            params, sets, progress = functools.partial(evaluated_params, plan), run.evaluation, point.evaluation
            evaluate = Evaluate(at.every, steps, at.patience, sums, params, sets, written, telemetry, **progress)
            record, interval = checkpoint_record(config, plan, run.data, run.examples), config.checkpoint_every
            save = Save(interval, steps, run.examples, record, self.checkpoints, evaluate, telemetry, skipped)
            if run.reloaded and point.reloaded:
                save.record = {**record, RELOADED: point.reloaded}
                save.saved = functools.partial(_rest, run.reloaded)
            guards = [self.divergence_check(skipped), telemetry.watchdog, self.preemption, self.profile]
            hooks = [*guards, IdleExperts(self.say), log, evaluate, *self.sdc_checks(), *run.hooks, save]
            timed = telemetry.stopwatch.time_batches(batches)
            state = fit(point.state, run.step, timed, steps=steps, start=start, hooks=hooks)
            with telemetry.during("checkpoint", "waiting for the last checkpoint to be written"):
                self.checkpoints.wait()
            telemetry.watchdog.reset("the last checkpoint")
            last_step = save.last_step
            if self.preemption.stop_step:
                telemetry.note(f"preempted: stopped after step {last_step}")
            elif evaluate.wants_stop(last_step):
                self.say(f"stopped early: {evaluate.since} evaluations without a loss below {evaluate.best:.6g}")
            elif last_step != steps:
                telemetry.say(f"stopped after step {last_step}")
            log.finish(last_step)
        return state, last_step, log, evaluate

    def divergence_check(self, skipped_batches: int) -> DivergenceCheck:
        config, scaling = self.run.config, self.run.step.plan.precision.loss_scale
        recovery = config.recovery
        return DivergenceCheck(
            self.run.examples,
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
        run, every = self.run, self.run.config.sdc_checks
        checking = functools.partial(self.telemetry.during, "check", "checking for silent data corruption")
        hooks: list[Hook] = []
        if every.replicas_every:
            hooks.append(ReplicaCheck(run.step.plan, every.replicas_every, checking))
        if every.repeat_every:
            probe = run.read_first()
            hooks.append(DeterminismCheck(run.step.plan, run.step.grad_fn, probe, every.repeat_every, checking))
        return hooks


def _rest(reloaded: Reloaded, state: TrainState) -> dict[str, Any]:
    """Return the arrays of a state, as checkpoints have them, without the part that is loaded again."""
    return reloaded.rest(as_stored(state))
