"""One process's part in a run: start or resume, train, save, roll back on divergence."""

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from spmd import tree
from spmd.checkpoint.arrays import bytes_read
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.tree import OptionalState
from spmd.checkpoint.versions import library_versions
from spmd.distributed.initialize import (
    compiler_environment,
    metadata_server,
    native_debug,
)
from spmd.distributed.native_output import redirect_native_stdout
from spmd.errors import DivergenceError, NonFiniteError, SpikeError
from spmd.observe.console import Console
from spmd.observe.goodput import Stopwatch
from spmd.observe.idle_experts import IdleExperts
from spmd.observe.lasting_output import also_said_by
from spmd.observe.metrics import JsonLines, StepClock, Writers, human_duration
from spmd.observe.profiling import Profile
from spmd.observe.spinner import spinner
from spmd.observe.writers import open_writers
from spmd.resilience.consistency import check_hosts_agree, source_fingerprint
from spmd.resilience.divergence import DivergenceCheck
from spmd.resilience.lease import Lease
from spmd.resilience.notices import Notices
from spmd.resilience.preemption import EXIT_PREEMPTED, Preemption
from spmd.resilience.sdc import DeterminismCheck, ReplicaCheck
from spmd.resilience.supervisor import Worker
from spmd.resilience.watchdog import Watchdog
from spmd.run.compiled_step import (
    CheckLoadedStep,
    LoadResult,
    WriteCompiledStep,
    finish_loading,
    has_programs,
    load_compiled_step,
    should_write,
    step_key,
)
from spmd.run.config import config_values
from spmd.run.external_state import EXTERNAL_STATE
from spmd.run.hooks import LOADER, CommonClock, Evaluate, Log, Save, Telemetry
from spmd.run.memory import (
    PENDING_METRICS,
    FinishCopy,
    SaveInMemory,
    StateMemory,
    restored_state,
)
from spmd.run.program_cache import program_cache
from spmd.run.record import changed_fields, check_resumable, checkpoint_record
from spmd.run.run_dir import ProcessLog
from spmd.run.run_spec import RunSpec
from spmd.run.supervision import Supervision
from spmd.run.transforms import optional_states
from spmd.training.compilation_cache import cache_fault
from spmd.training.evaluated_params import evaluated_params
from spmd.training.loop import Hook, fit
from spmd.training.serialized_step import LoweringCheck
from spmd.training.state import ModelState
from spmd.training.step import TrainStep, make_eval_step
from spmd.tree import human_bytes, with_noun


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        state: The last state, as the step returned it.
        metrics: Metrics of the last step that was logged.
        evaluation: Newest means over the evaluation sets, such as `val_loss`.
        weights: Weight of each evaluation set, by its name.
        checkpoint: Step of the newest checkpoint.
        seconds: Wall-clock time with compilation, evaluation and checkpoints.
        steps: Steps taken by this process, without those that were rolled back.
        count: What they processed, in the unit of the throughput: tokens, or examples.
        preempted: Last step of a preempted run, which was saved; None if the run reached its last
            step.
    """

    state: Any
    metrics: Mapping[str, Any]
    evaluation: Mapping[str, float]
    weights: Mapping[str, float]
    checkpoint: int | None
    seconds: float
    steps: int
    count: int
    preempted: int | None

    def __repr__(self) -> str:
        parts = [f"{with_noun(self.steps, 'step')} in {human_duration(self.seconds)}"]
        if "loss" in self.metrics:
            parts.append(f"loss {float(self.metrics['loss']):.4g}")
        for name, value in self.evaluation.items():
            if name.endswith("_loss"):
                parts.append(f"{name} {value:.4g}")
        if self.checkpoint is not None:
            parts.append(f"checkpoint of step {self.checkpoint:,}")
        if self.preempted is not None:
            parts.append(f"preempted after step {self.preempted:,}")
        return f"RunResult({', '.join(parts)}; {self.state!r})"

    @property
    def exit_code(self) -> int:
        """Exit code for the scheduler: 0, or 75 of a preempted run, to be started again."""
        return 0 if self.preempted is None else EXIT_PREEMPTED


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """Where training starts: after `step` steps.

    Attributes:
        skipped_batches: Batches of the data that rollbacks have skipped so far.
        evaluation: Progress of early stopping: the lowest loss and the evaluations since.
        reloaded: Origin of the part of the state that is not saved; None if all is.
        loader: State of the loader, from the record of a checkpoint.
    """

    step: int
    skipped_batches: int
    state: Any
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reloaded: Mapping[str, Any] | None = None
    loader: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Trained:
    """End of training: the state, its step, and the hooks with the last metrics."""

    state: Any
    last_step: int
    log: Log
    evaluate: Evaluate


def train_in_folder(
    run: RunSpec,
    lease: Lease,
    console: Console | None,
    resume: bool,
    profile: tuple[int, int] | None,
    said: Sequence[str],
    began: float,
    worker: Worker | None = None,
) -> RunResult:
    """Train in the run's folder, with its lease entered.

    `began` is the start of the session, in seconds since the epoch; `worker` is this process under
    its supervisor.
    """
    config = run.config
    recovery = config.recovery
    folder = run.run_dir
    with contextlib.ExitStack() as stack:
        fault = cache_fault(run.step.mesh.shape["pipe"])
        stack.enter_context(folder.uploads(lease))
        log = stack.enter_context(ProcessLog(folder.log))
        stack.enter_context(also_said_by(log.say))
        if jax.process_count() > 1 and not native_debug():
            redirect_native_stdout(log.file)
        watchdog = stack.enter_context(
            Watchdog(
                recovery.deadline,
                recovery.start_deadline,
                log.file,
                save_log=functools.partial(folder.upload_now, lease),
            )
        )
        notes: list[Callable[[str], None]] = [log.say]
        if console:
            notes.append(console.note)

        def note(event: str) -> None:
            for show in notes:
                show(event)

        lease.report_to(note)
        stack.callback(lease.report_to, print)  # the log is closed then
        for line in said:
            log.say(line)
        if fault:
            log.say(fault)
        log.say(
            f"process {jax.process_index()} of {jax.process_count()}, "
            f"{jax.local_device_count()} devices"
        )
        check_hosts_agree(_common_to_hosts(run, resume))
        stack.enter_context(program_cache(config.compilation_cache_dir, note))
        preemption = stack.enter_context(Preemption())
        stack.enter_context(Notices(metadata_server(), log.say))
        for writer in run.writers:
            stack.enter_context(contextlib.closing(writer))
        tracing = stack.enter_context(Profile(folder.path / "profile", profile, log.say))
        checkpoints = stack.enter_context(_open_checkpoints(run, lease, note))
        stopwatch = stack.enter_context(contextlib.closing(Stopwatch(began=began)))
        telemetry = Telemetry(StepClock(), stopwatch, watchdog, lease, log.say, notes)
        program = _ProgramHooks()
        supervision = stack.enter_context(Supervision(worker, lease.number, log.say))
        memory = _state_memory(run, worker, lease, log.say)
        session = _Session(
            run=run,
            console=console,
            checkpoints=checkpoints,
            telemetry=telemetry,
            preemption=preemption,
            profile=tracing,
            program=program,
            supervision=supervision,
            memory=memory,
        )
        return session.train(resume)


def _state_memory(
    run: RunSpec, worker: Worker | None, lease: Lease, say: Callable[[str], object]
) -> StateMemory:
    """Return the copies of the state in memory, without a part loaded from elsewhere."""
    wanted = tree.flatten(run.step.as_stored(run.step.abstract_state()))
    if run.reloaded and run.reloaded.origin:
        for path in run.reloaded.optional.below(wanted):
            del wanted[path]
    return StateMemory(worker, run.config.recovery, lease.number, wanted, say)


def _open_checkpoints(run: RunSpec, lease: Lease, say: Callable[[str], None]) -> CheckpointManager:
    """Open the run's checkpoints; they are ranked by the loss on the first evaluation set."""
    first_set = next(iter(run.evaluation), "val")
    return CheckpointManager(
        run.run_dir.checkpoints,
        max_to_keep=run.config.max_to_keep,
        keep_best=run.config.keep_best,
        keep_every=run.config.keep_every,
        best=f"{first_set}_loss",
        before_write=lease.renew,
        owner=lease.number,
        say=say,
        before_commit=functools.partial(run.run_dir.upload_now, lease),
    )


def _common_to_hosts(run: RunSpec, resume: bool) -> dict[str, Any]:
    """Return the values to compare between processes."""
    config_file = ""
    if run.source:
        config_file = hashlib.sha256(run.source.read_bytes()).hexdigest()
    return {
        "config": config_values(run.config),
        "config file": config_file,
        "plan": run.description,
        "batch": _batch_shapes(run.abstract_batch),
        "data": run.data,
        "inputs": dict(run.inputs),
        "versions": library_versions(),
        "source": source_fingerprint(),
        "environment": compiler_environment(),
        "resume": resume,
        "devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
    }


def _batch_shapes(batch: Any) -> dict[str, str]:
    """Return path → dtype and shape for each array of a batch."""
    shapes = dict[str, str]()
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        shapes[jax.tree_util.keystr(path)] = f"{x.dtype}{list(x.shape)}"
    return shapes


@dataclasses.dataclass
class _ProgramHooks:
    """Hooks for the step's program: a check of a loaded one, or the file of a compiled one."""

    check: CheckLoadedStep | None = None
    writer: WriteCompiledStep | None = None


@dataclasses.dataclass(frozen=True)
class _Session:
    """One process of a run, around the training loop."""

    run: RunSpec
    console: Console | None
    checkpoints: CheckpointManager
    telemetry: Telemetry
    preemption: Preemption
    profile: Profile
    program: _ProgramHooks
    supervision: Supervision
    memory: StateMemory

    def say(self, text: str) -> None:
        """Write to the log and, on the first process, to the console."""
        self.telemetry.say(text)
        if self.console:
            self.console.say(text)

    def train(self, resume: bool) -> RunResult:
        """Start or resume, and train to the end; roll back from divergence as the config says."""
        began = time.perf_counter()
        most = self.run.config.recovery.rollbacks
        rollbacks = 0
        point = self.prepare(resume)
        first_step = point.step
        while True:
            try:
                trained = self.fit(point)
                break
            except DivergenceError as error:
                if self.response_to(error) != "roll-back" or rollbacks == most:
                    raise
                bad_step = error.step
                reason = str(error).partition("\n")[0]
            # Outside of the handler: the error's traceback holds the state, and two may not fit in
            # memory.
            rollbacks += 1
            self.say(f"{reason}\nrolling back ({rollbacks} of at most {most} times)")
            point = self.roll_back(point, bad_step)
        run = self.run
        skipped = point.skipped_batches
        return RunResult(
            state=trained.state,
            metrics=trained.log.last,
            evaluation=trained.evaluate.last,
            weights=trained.evaluate.weights,
            checkpoint=self.checkpoints.latest(),
            seconds=time.perf_counter() - began,
            steps=trained.last_step - first_step,
            count=run.rate.total(range(first_step + skipped, trained.last_step + skipped)),
            preempted=self.preempted_step(trained.last_step),
        )

    def response_to(self, error: DivergenceError) -> str | None:
        """Return the config's response to a divergence; None to stop the run in any case."""
        config = self.run.config
        responses = {NonFiniteError: config.on_nan, SpikeError: config.recovery.on_spike}
        return responses.get(type(error))

    def preempted_step(self, last_step: int) -> int | None:
        """Return the last step if preemption made it the last one before the config's."""
        if last_step == self.preemption.stop_step != self.run.config.steps:
            return last_step
        return None

    def prepare(self, resume: bool) -> ResumePoint:
        """Compile the step, restore or initialize the state, and write the run folder."""
        run = self.run
        if self.checkpoints.leftovers:
            self.say(f"removed interrupted saves: {', '.join(self.checkpoints.leftovers)}")
        if resume:  # before anything compiles
            self.check_latest_record()
        loading = self.load_step()
        if loading.loaded is None:
            self.compile_step()
        point = self.restore() if resume else self.initialize()
        if loading.loaded is not None and not self.finish_loading(loading):
            self.compile_step()
        self.compile_other_shapes(point)
        self.telemetry.lease.renew_at_once()
        if jax.process_index() == 0:
            run.run_dir.describe(run.config, run.source, run.description)
        self.telemetry.stopwatch.switch_to("step")
        if point.step == run.config.steps:
            self.say(
                f"nothing is left to train: step {point.step} of {point.step} is done; give more "
                "steps"
            )
        return point

    def load_step(self) -> LoadResult:
        """Begin to load the compiled step, if its file fits."""
        run = self.run
        result = run.load_result
        if result is None:
            given = run.step, run.abstract_batch, run.config, run.run_dir, run.source
            with self.telemetry.during("compile", "loading the compiled step"):
                result = load_compiled_step(*given)
        if result.said:
            self.say(result.said)
        return result

    def finish_loading(self, loading: LoadResult) -> bool:
        """Wait for the compiled step; return whether it was loaded."""
        run = self.run
        with self.telemetry.during("compile", "loading the compiled step"):
            result = finish_loading(loading, run.step, run.abstract_batch, run.config)
        if result.loaded is None:
            self.say(result.said)
            return False
        self.say(f"loaded the compiled step from {result.where}")
        check = LoweringCheck(run.step, run.abstract_batch, result.loaded)
        during = self.telemetry.during
        self.program.check = CheckLoadedStep(check, result.where, during, self.telemetry.say)
        return True

    def compile_step(self) -> None:
        """Compile the step, and have it written if it took a while."""
        run = self.run
        batch = run.abstract_batch
        began = time.perf_counter()
        with self.waiting("compile", "compiling the step"):
            run.step.compile(batch)
        seconds = time.perf_counter() - began
        self.telemetry.note(f"compiled the step in {human_duration(seconds)}")
        if should_write(run.config, run.step, seconds):
            key = step_key(run.step, batch, run.config, run.source)
            path = run.run_dir.compiled_step
            renew = self.telemetry.lease.renew
            say = self.telemetry.say
            self.program.writer = WriteCompiledStep(run.step, batch, key, path, renew, say)

    def compile_other_shapes(self, point: ResumePoint) -> None:
        """Compile the step for the other shapes of batches."""
        run = self.run
        if run.other_batches is None:
            return
        skipped = point.skipped_batches
        others = run.other_batches(point.step + skipped, run.config.steps + skipped)
        left = [batch for batch in others if not has_programs(run.step, batch)]
        if not left:
            return
        began = time.perf_counter()
        with self.waiting("compile", "compiling the step for other shapes of batches"):
            for batch in left:
                run.step.compile(batch)
                self.telemetry.watchdog.reset("a shape of batches was compiled")
        seconds = time.perf_counter() - began
        shapes = f"{with_noun(len(left), 'more shape')} of batches"
        self.telemetry.note(f"compiled the step for {shapes} in {human_duration(seconds)}")

    def program_hooks(self, save: Save) -> list[Hook]:
        """Return the hooks for the step's program, in the order before `save`."""
        hooks: list[Hook] = []
        if self.program.check:
            self.program.check.saves = save.wants_state
            hooks.append(self.program.check)
        if self.program.writer:
            hooks.append(self.program.writer)
        return hooks

    def check_latest_record(self) -> None:
        """Raise `CheckpointError` if the newest checkpoint is not of this run."""
        latest = self.checkpoints.latest()
        if latest is not None:
            self.check_resumable(self.checkpoints.record(latest))

    def check_resumable(self, record: Mapping[str, Any]) -> None:
        run = self.run
        location = run.run_dir.location
        check_resumable(record, run.config, run.data, run.examples, location, run.inputs)
        if run.loader is not None and LOADER in record:
            run.loader.check_record(record[LOADER])

    @contextlib.contextmanager
    def waiting(self, activity: str, doing: str) -> Iterator[None]:
        """Account the block to an activity, with a spinner on the console if there is one."""
        shown: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.console:
            shown = spinner(doing, plain=True)
        with shown, self.telemetry.during(activity, doing):
            yield

    def initialize(self) -> ResumePoint:
        """Return the start of a new run."""
        run = self.run
        with self.waiting("compile", "initializing the parameters"):
            state = self.initial_state()
            jax.block_until_ready(state)
            reloaded = None
            if run.reloaded:
                reloaded = run.reloaded.record(state)
        if run.on_initial_state:
            run.on_initial_state(state, self.telemetry)
        return ResumePoint(0, 0, state, reloaded=reloaded)

    def initial_state(self) -> Any:
        run = self.run
        if run.initial_state:
            return run.initial_state()
        return run.step.init_state(run.config.seed)

    def restore(self) -> ResumePoint:
        """Restore the newest intact checkpoint, or return the initial state if none was saved."""
        run = self.run
        checkpoints = self.checkpoints
        in_memory = self.read_memory()
        if in_memory is not None:
            state, record = in_memory
        elif not (checkpoints.steps() or checkpoints.damaged):
            self.say("there is no checkpoint to resume from: starting from step 0")
            return self.initialize()
        else:
            with self.waiting("restore", "restoring a checkpoint"):
                state, record = self.read_checkpoint()
        self.check_resumable(record)
        for step, problems in checkpoints.damaged.items():
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            self.say(f"skipped checkpoint {step}: {problems[0].where} {problems[0].what}{more}")
        step = int(record["step"])
        origin = " in memory" if in_memory is not None else ""
        self.say(f"resuming from step {step}{origin}")
        for name, (old, new) in changed_fields(record, run.config).items():
            self.say(f"  {name} changes from {old} to {new}")
        reloaded = None
        if run.reloaded and run.reloaded.origin:
            # What a checkpoint holds, later ones hold as well: the folder may have changed since.
            reloaded = record.get(EXTERNAL_STATE)
        return ResumePoint(
            step,
            skipped_batches=int(record["position"]) // run.examples - step,
            state=state,
            evaluation=record.get("evaluation", {}),
            reloaded=reloaded,
            loader=record.get(LOADER),
        )

    def read_memory(self) -> tuple[Any, Mapping[str, Any]] | None:
        """Read the state and the record from memory; None if the newest checkpoint is later."""
        found = self.memory.find()
        latest = self.checkpoints.latest()
        if found is None or (latest is not None and latest > found.step):
            return None
        step = self.run.step
        wanted = step.as_stored(step.abstract_state())
        with self.waiting("restore", "restoring the state in memory"):
            read = self.memory.read(found)
        if read is None:
            return None
        arrays, record = read
        self.run.run_dir.restore_metrics(record.pop(PENDING_METRICS))
        stored = restored_state(wanted, arrays)
        if self.run.reloaded:
            stored = self.run.reloaded.fill(stored, record)
        return step.from_stored(stored), record

    def read_checkpoint(self) -> tuple[Any, Mapping[str, Any]]:
        """Read the state and the record of the newest intact checkpoint."""
        step = self.run.step
        reloaded = self.run.reloaded
        optional = list[OptionalState]()
        for prefix, part in step.parts.items():
            optional += optional_states(part.plan.transforms, prefix)
        if reloaded:
            optional.append(reloaded.optional)
        before = bytes_read()
        wanted = step.as_stored(step.abstract_state())
        stored, record = self.checkpoints.restore(None, wanted, optional=optional)
        self.telemetry.say(f"read {human_bytes(bytes_read() - before)} of the checkpoint")
        if reloaded:
            stored = reloaded.fill(stored, record)
        return step.from_stored(stored), record

    def roll_back(self, point: ResumePoint, bad_step: int) -> ResumePoint:
        """Restore the newest checkpoint and skip the batches through `bad_step`."""
        self.telemetry.lease.renew_at_once()
        if jax.process_index() == 0:  # the step that was reached: some of its work is repeated
            self.telemetry.stopwatch.write(self.run.run_dir.path, bad_step)
        self.memory.clear(self.checkpoints.latest() or 0)  # later states have diverged
        newest = self.restore()
        skipped = bad_step - newest.step
        self.say(f"skipping {skipped} batches of the data")
        return dataclasses.replace(newest, skipped_batches=point.skipped_batches + skipped)

    def fit(self, point: ResumePoint) -> _Trained:
        """Train from `point` to the last step, a preemption or an early stop."""
        run = self.run
        telemetry = self.telemetry
        start = point.step
        steps = run.config.steps
        skipped = point.skipped_batches
        self.memory.clear(start)  # a copy of a later step would be taken for the newest one
        with contextlib.ExitStack() as stack:
            writers = self.open_writers(stack, start)
            opened = run.open_batches(start + skipped, steps + skipped, point.loader)
            batches = stack.enter_context(opened)
            log = self.make_log(writers, skipped)
            evaluate = self.make_evaluate(writers, point.evaluation)
            lease = telemetry.lease
            asked = lease.save_requests  # before the last roll-back
            clock = CommonClock(run.config.log_every, requests=lambda: lease.save_requests - asked)
            save = self.make_save(evaluate, clock, point)
            hooks = [
                *self.divergence_checks(skipped),
                FinishCopy(self.memory),
                telemetry.watchdog,
                self.supervision,
                self.preemption,
                self.profile,
                IdleExperts(self.say),
                log,
                evaluate,
                *self.sdc_checks(),
                *run.hooks,
                clock,
                *self.program_hooks(save),
                save,
                SaveInMemory(self.memory, save, telemetry, self.say, run.run_dir.pending_metrics),
            ]
            timed = run.as_global(telemetry.stopwatch.time_batches(batches), start)
            state = fit(point.state, run.step, timed, steps=steps, start=start, hooks=hooks)
            with telemetry.during("checkpoint", "waiting for the last checkpoint to be written"):
                self.checkpoints.wait()
            if self.program.writer:
                self.program.writer.finish()
            telemetry.watchdog.reset("the last checkpoint")
            self.say_why_stopped(save.last_step, evaluate)
            log.finish(save.last_step)
        return _Trained(state, save.last_step, log, evaluate)

    def open_writers(self, stack: contextlib.ExitStack, start: int) -> Writers:
        """Open the writers of metrics on the first process; `stack` closes them."""
        if not self.console:
            return Writers([])
        run = self.run
        folder = run.run_dir
        lines = stack.enter_context(contextlib.closing(JsonLines(folder.metrics, start, self.say)))
        values = config_values(run.config)
        named = open_writers(
            run.config.writers, folder.path, folder.metrics, start, values, self.say
        )
        own = stack.enter_context(contextlib.closing(Writers(named, self.say)))
        return Writers([lines, own, *run.writers, self.console], self.say)

    def make_log(self, writers: Writers, skipped_batches: int) -> Log:
        run = self.run
        return Log(
            every=run.config.log_every,
            steps=run.config.steps,
            throughput=run.rate,
            devices=list(run.step.mesh.devices.flat),
            writers=writers,
            telemetry=self.telemetry,
            goodput_dir=run.run_dir.path if self.console else None,
            skipped_batches=skipped_batches,
        )

    def make_evaluate(self, writers: Writers, progress: Mapping[str, Any]) -> Evaluate:
        """Return the evaluation hook; `progress` is its early stopping so far."""
        run = self.run
        prefix = run.step.evaluated_part
        plan = run.step.parts[prefix].plan
        interval = run.config.evaluate
        eval_step = None
        if run.evaluation_loss:
            eval_step = make_eval_step(plan, run.evaluation_loss)

        def model(state: Any) -> ModelState:
            own = run.step.part_state(prefix, state)
            return ModelState(evaluated_params(plan, own), own.variables)

        return Evaluate(
            every=interval.every,
            steps=run.config.steps,
            patience=interval.patience,
            evaluate=eval_step,
            model=model,
            sets=run.evaluation_sets,
            writers=writers,
            telemetry=self.telemetry,
            **progress,
        )

    def make_save(self, evaluate: Evaluate, clock: CommonClock, point: ResumePoint) -> Save:
        run = self.run
        save = Save(
            every=run.config.checkpoint_every,
            minutes=run.config.checkpoint_minutes,
            milestones=run.config.keep_every,
            clock=clock,
            last_step=run.config.steps,
            batch=run.examples,
            record=checkpoint_record(run.config, run.step, run.data, run.examples, run.inputs),
            checkpoints=self.checkpoints,
            evaluate=evaluate,
            telemetry=self.telemetry,
            skipped_batches=point.skipped_batches,
            saved=run.step.as_stored,
            loader=run.loader,
        )
        if run.reloaded and point.reloaded:
            save.record = {**save.record, EXTERNAL_STATE: point.reloaded}
            save.saved = functools.partial(_rest, run)
        return save

    def say_why_stopped(self, last_step: int, evaluate: Evaluate) -> None:
        """Say the reason for an end before the config's last step, if it is one."""
        if self.preemption.stop_step:
            self.telemetry.note(f"preempted: stopped after step {last_step}")
        elif evaluate.wants_stop(last_step):
            self.say(
                f"stopped early: {evaluate.since} evaluations without a loss below "
                f"{evaluate.best:.6g}"
            )
        elif last_step != self.run.config.steps:
            self.telemetry.say(f"stopped after step {last_step}")

    def divergence_checks(self, skipped_batches: int) -> list[DivergenceCheck]:
        """Return a check of each network."""
        checks = list[DivergenceCheck]()
        for prefix, part in self.run.step.parts.items():
            checks.append(self.divergence_check(prefix, part, skipped_batches))
        return checks

    def divergence_check(
        self, prefix: str, part: TrainStep, skipped_batches: int
    ) -> DivergenceCheck:
        config = self.run.config
        recovery = config.recovery
        scaling = part.plan.precision.loss_scale
        checks_spikes = recovery.on_spike in ("stop", "roll-back")
        examples = self.run.examples
        if self.run.other_batches is not None:
            examples = 0
        return DivergenceCheck(
            examples,
            steps=config.steps,
            skipped_batches=skipped_batches,
            last_good=self.checkpoints.latest,
            non_finite=config.on_nan != "skip",
            floor=scaling.floor if scaling else 0.0,
            factor=recovery.spike_factor if checks_spikes else 0.0,
            window=recovery.spike_window,
            skips_in_a_row=recovery.skips_in_a_row,
            skipped_share=recovery.skipped_share,
            prefix=prefix,
        )

    def sdc_checks(self) -> list[Hook]:
        run = self.run
        every = run.config.sdc_checks
        doing = "checking for silent data corruption"
        checking = functools.partial(self.telemetry.during, "check", doing)
        hooks: list[Hook] = []
        if every.replicas_every:
            for prefix, part in run.step.parts.items():
                part_state = functools.partial(run.step.part_state, prefix)
                hooks.append(ReplicaCheck(part.plan, every.replicas_every, checking, part_state))
        if every.repeat_every:
            probe = run.read_first()
            for prefix, part in run.step.parts.items():
                part_inputs = functools.partial(run.step.part_inputs, prefix)
                given = part.plan, part.grad_fn, probe, every.repeat_every, checking
                hooks.append(DeterminismCheck(*given, part_inputs))
        return hooks


def _rest(run: RunSpec, state: Any) -> dict[str, Any]:
    """Return the arrays of a state as checkpoints have them, without the reloaded part."""
    assert run.reloaded is not None
    return run.reloaded.rest(run.step.as_stored(state))
