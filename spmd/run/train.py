"""One training run: from the beginning or from where it was, to its end or until it is told to go."""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.versions import library_versions
from spmd.data.loader import Windows, batches, evaluation_batches
from spmd.distributed.compilation_cache import cache_dir, compilation_cache
from spmd.errors import CheckpointError, DivergenceError, NonFiniteError, Problem
from spmd.observe.goodput import Stopwatch
from spmd.observe.metrics import Console, JsonLines, StepClock, Writer, Writers
from spmd.observe.profiling import Profile
from spmd.observe.tensorboard import TensorBoard
from spmd.resilience.consistency import check_hosts_agree, source_fingerprint
from spmd.resilience.divergence import DivergenceCheck
from spmd.resilience.preemption import Preemption
from spmd.resilience.sdc import CheckRepeats, CheckReplicas
from spmd.resilience.watchdog import Watchdog
from spmd.run.build import TrainSetup
from spmd.run.config import config_difference, config_values
from spmd.run.hooks import Evaluate, Log, Save, Telemetry
from spmd.run.init_from import copy_source_files, initial_state
from spmd.run.renamed import current_fields
from spmd.run.run_dir import IMPORTED, ProcessLog, RunDir
from spmd.sharding.mesh import batch_sharding
from spmd.train.loop import Hook, fit
from spmd.train.state import TrainState, abstract_state


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a finished run has to show.

    Attributes:
        state: The state after the last step.
        val_loss: Nats per token on the validation half, None if it was not evaluated.
        val_tokens: How many tokens that is over.
        checkpoint: The step of the newest checkpoint.
        loss: The training loss of the last step that was logged, None if none was.
        mfu: Model FLOPs utilization at that step, None where the chip's peak is not known.
        seconds: Wall-clock time of the loop, with compilation, evaluation and checkpoints.
        steps: Steps that count, taken by this process.
        preempted: The step after which it was told to go and saved; None where it ran to its end.
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
    """Where training resumes: after `step` steps and `skipped_batches` batches that were skipped."""

    step: int
    skipped_batches: int
    state: TrainState


def train(
    setup: TrainSetup,
    folder: RunDir,
    source: Path,
    console: Console | None,
    *,
    resume: bool = False,
    profile: tuple[int, int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunResult:
    """Trains to the config's last step, from the beginning or from the newest checkpoint, or until it is told to go.

    Args:
        setup: On a mesh with devices.
        folder: Holds no other run, or the one to resume.
        source: The config file.
        console: What a person sees; None for nothing.
        resume: Go on from the newest checkpoint in the folder.
        profile: The first and the last step to trace.
        environment: What else this process runs under, which must be the same for all.

    Raises:
        AgreementError: Processes are about to do different things.
        BadStepError: A step is not finite or a spike, and the config says stop.
    """
    config = setup.config
    with contextlib.ExitStack() as stack:
        stack.enter_context(compilation_cache(cache_dir(config.compilation_cache_dir)))
        log = stack.enter_context(ProcessLog(folder.log))
        recovery = config.recovery
        watchdog = stack.enter_context(Watchdog(recovery.deadline, recovery.start_deadline, log.file))
        log.say(f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} devices")
        check_hosts_agree(_statements(setup, source, resume, environment or {}))
        preemption = stack.enter_context(Preemption())
        tracing = stack.enter_context(Profile(folder.path / "profile", profile, log.say))
        telemetry = Telemetry(StepClock(), Stopwatch(), watchdog, preemption, log)
        checkpoints = stack.enter_context(
            CheckpointManager(folder.checkpoints, max_to_keep=config.max_to_keep, keep_best=config.keep_best)
        )
        console = console if jax.process_index() == 0 else None
        return _Session(setup, folder, console, telemetry, checkpoints, tracing).run(source, resume)


def _statements(setup: TrainSetup, source: Path, resume: bool, environment: Mapping[str, str]) -> dict[str, Any]:
    """What all processes must be about to do alike."""
    return {
        "config": config_values(setup.config),
        "config file": hashlib.sha256(source.read_bytes()).hexdigest(),
        "plan": f"{setup.plan}{setup.pipeline_line}",
        "batch": {name: f"{x.dtype}{list(x.shape)}" for name, x in setup.abstract_batch().items()},
        "data": setup.corpus.fingerprint,
        "versions": library_versions(),
        "source": source_fingerprint(),
        "environment": dict(environment),
        "resume": resume,
        "devices": f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
    }


@dataclasses.dataclass(frozen=True)
class _Session:
    """One process of a run, from its start to its end."""

    setup: TrainSetup
    folder: RunDir
    console: Console | None
    telemetry: Telemetry
    checkpoints: CheckpointManager
    profile: Profile

    def say(self, text: str) -> None:
        """Tells the log, and the console if there is one."""
        self.telemetry.log.say(text)
        if self.console:
            self.console.say(text)

    def run(self, source: Path, resume: bool) -> RunResult:
        """Trains, and rolls back where the config says so."""
        began, config = time.perf_counter(), self.setup.config
        if self.checkpoints.leftovers:
            self.say(f"removed what interrupted saves have left: {', '.join(self.checkpoints.leftovers)}")
        if resume and (latest := self.checkpoints.latest()) is not None:  # before anything compiles
            _check_resumable(self.checkpoints.record(latest), self.setup, self.folder)
        with self.telemetry.stopwatch.during("compile"):
            self.setup.step.compile(self.setup.abstract_batch())
        position = self._newest(resume)
        if jax.process_index() == 0:
            lines = f"{self.setup.pipeline_line}{self.setup.slices_line}"
            self.folder.describe(config, source, f"{self.setup.plan}{lines}")
            copy_source_files(self.setup, self.folder.path)
        self.telemetry.stopwatch.turn_to("step")
        start, rolled_back = position.step, 0
        while True:
            try:
                outcome = self._fit(position)
                break
            except DivergenceError as error:
                wanted = config.on_nan if isinstance(error, NonFiniteError) else config.recovery.on_spike
                if wanted != "roll-back" or rolled_back == config.recovery.rollbacks:
                    raise
                bad, why = error.step, str(error).partition("\n")[0]
                if jax.process_index() == 0:  # what was reached, of which a part is taken again
                    self.telemetry.stopwatch.write(self.folder.path, bad)
            # Only now: the error's traceback held the state, and there may be no room for two.
            rolled_back += 1
            self.say(f"{why}\nrolling back ({rolled_back} of at most {config.recovery.rollbacks} times)")
            newest = self._newest(True)
            position = dataclasses.replace(newest, skipped_batches=position.skipped_batches + bad - newest.step)
            self.telemetry.clock.restart()
            self.say(f"going on after step {position.step}, past {bad - position.step} batches of the data")
        return dataclasses.replace(outcome, seconds=time.perf_counter() - began, steps=outcome.steps - start)

    def _newest(self, resume: bool) -> ResumePoint:
        """The newest checkpoint to go on from, or the beginning."""
        setup, stopwatch = self.setup, self.telemetry.stopwatch
        if not resume or not (self.checkpoints.steps() or self.checkpoints.lost):
            if resume:
                self.say("there is no checkpoint to go on from: training begins again")
            self.telemetry.watchdog.doing("making the initial parameters")
            with stopwatch.during("compile"):
                return ResumePoint(0, 0, jax.block_until_ready(initial_state(setup)))
        self.telemetry.watchdog.doing("restoring a checkpoint")
        with stopwatch.during("restore"):
            state, record = self.checkpoints.restore(None, abstract_state(setup.plan))
        _check_resumable(record, setup, self.folder)
        for step, problems in self.checkpoints.lost.items():
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            self.say(f"skipped checkpoint {step}: {problems[0].where} {problems[0].what}{more}")
        step = int(record["step"])
        self.say(f"resuming after step {step}")
        for name, (old, new) in config_difference(
            current_fields(record["config"]), config_values(setup.config)
        ).items():
            self.say(f"  {name} was {old} and is {new} from here on")
        return ResumePoint(step, int(record["position"]) // setup.config.data.batch - step, state)

    def _fit(self, position: ResumePoint) -> RunResult:
        """Trains from `position`; the outcome's steps count from the beginning."""
        setup, telemetry, config = self.setup, self.telemetry, self.setup.config
        start, skipped_batches = position.step, position.skipped_batches
        first = jax.process_index() == 0
        files: list[Writer] = []
        if first:
            files = [JsonLines(self.folder.metrics, start), TensorBoard(self.folder.path / "tensorboard", start)]
        with contextlib.ExitStack() as stack:
            for file in files:
                stack.callback(file.close)
            writers = Writers([*files, *([self.console] if self.console else [])])
            log = Log(setup, telemetry, writers, self.folder.path if first else None, skipped_batches)
            evaluate = Evaluate(setup, telemetry, writers, Windows(setup.corpus.validation, config.data.sequence))
            save = Save(setup, telemetry, self.checkpoints, evaluate, skipped_batches)
            stream = batches(
                Windows(setup.corpus.train, config.data.sequence),
                batch=config.data.batch,
                sharding=batch_sharding(setup.mesh),
                seed=config.seed,
                start=start + skipped_batches,
                steps=config.steps + skipped_batches,
                threads=config.data.threads,
                prefetch=config.data.prefetch,
            )
            state = fit(
                position.state,
                setup.step,
                telemetry.stopwatch.waiting(stack.enter_context(stream)),
                steps=config.steps,
                start=start,
                hooks=[
                    self._find_bad_steps(skipped_batches),
                    telemetry.watchdog,
                    telemetry.preemption,
                    self.profile,
                    log,
                    evaluate,
                    *self._checks(),
                    save,
                ],
            )
            telemetry.watchdog.doing("waiting for the last checkpoint to be written")
            with telemetry.stopwatch.during("checkpoint"):
                self.checkpoints.wait()
            telemetry.watchdog.finished("the last checkpoint")
            stopped = telemetry.preemption.stopped_at
            if stopped:
                telemetry.log.say(f"told to go: stopped after step {stopped}")
            log.finish(stopped or config.steps)
        return RunResult(
            state=state,
            val_loss=evaluate.last.get("val_loss"),
            val_tokens=evaluate.tokens,
            checkpoint=self.checkpoints.latest(),
            loss=log.last.get("loss"),
            mfu=log.last.get("mfu"),
            seconds=0.0,
            steps=stopped or config.steps,
            preempted=stopped if stopped != config.steps else None,
        )

    def _checks(self) -> list[Hook]:
        """The checks for silent faults that the config asks for; the batch that one of them keeps is the first one."""
        setup, sdc_checks, data = self.setup, self.setup.config.sdc_checks, self.setup.config.data
        hooks: list[Hook] = []
        if sdc_checks.replicas_every:
            hooks.append(CheckReplicas(setup.plan, sdc_checks.replicas_every, self._checking))
        if sdc_checks.repeat_every:
            windows, whole = Windows(setup.corpus.train, data.sequence), data.batch * data.sequence
            sharding = batch_sharding(setup.mesh)
            probe = next(evaluation_batches(windows, batch=data.batch, sharding=sharding, tokens_at_most=whole))
            hooks.append(CheckRepeats(setup.plan, setup.grad_fn, probe, sdc_checks.repeat_every, self._checking))
        return hooks

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        self.telemetry.watchdog.doing("checking for silent faults")
        with self.telemetry.stopwatch.during("check"):
            yield
        self.telemetry.clock.restart()

    def _find_bad_steps(self, skipped_batches: int) -> DivergenceCheck:
        config, scaling = self.setup.config, self.setup.precision.loss_scale
        return DivergenceCheck(
            config.data.batch,
            skipped_batches=skipped_batches,
            last_good=self.checkpoints.latest,
            non_finite=config.on_nan != "skip",
            floor=scaling.floor if scaling else 0.0,
            factor=config.recovery.spike_factor if config.recovery.on_spike in ("stop", "roll-back") else 0.0,
            window=config.recovery.spike_window,
        )


def _check_resumable(record: Mapping[str, Any], setup: TrainSetup, folder: RunDir) -> None:
    """Whether the checkpoint's data are the config's.

    Raises:
        CheckpointError: They are not.
    """
    config = setup.config
    if IMPORTED in record:
        fix = f"--init {folder.path}, and a folder of its own"
        problem = Problem(str(folder.path), "holds imported parameters, and no run to go on with", fix=fix)
        raise CheckpointError("Nothing was resumed:", [problem])
    kinds = {"step": int, "position": int, "config": dict}
    if unknown := [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]:
        problems = [Problem(name, "is missing from the checkpoint's record, or is something else") for name in unknown]
        raise CheckpointError(f"{folder.path} holds checkpoints of another tool:", problems)
    expected = {
        "data": setup.corpus.fingerprint,
        "seed": config.seed,
        "batch": config.data.batch,
        "sequence": config.data.sequence,
    }
    problems = [
        Problem(name, f"was {record.get(name)} and is {value}", fix="give the value that the run was started with")
        for name, value in expected.items()
        if record.get(name) != value
    ]
    if config.steps < record["step"]:
        arithmetic = f"the checkpoint is of step {record['step']}"
        problems.append(Problem("steps", f"is {config.steps}", arithmetic, "ask for more steps"))
    if problems:
        raise CheckpointError(f"{folder.path} cannot go on with other data:", problems)
