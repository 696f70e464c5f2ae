"""A training run of any model in one folder.

It starts or resumes, trains, evaluates, saves, and rolls back on divergence.

```python
run = spmd.Run("runs/mine", step, batches, config=spmd.RunConfig(steps=1000, checkpoint_every=100))
result = run.train(resume="auto")
```

`batches(start, steps)` returns the batches of the steps `start + 1 … steps`, the same at each call:
a resumed run begins with the batch that the interrupted one would have had next, and ends with the
same bits.
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import jax

from spmd.distributed.hosts import broadcast_problems
from spmd.errors import ConfigError
from spmd.observe.console import Console, columns_of
from spmd.observe.goodput import measure_goodput
from spmd.observe.lasting_output import lasting_output
from spmd.observe.metrics import device_memory
from spmd.observe.profiling import parse_steps
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.observe.writers import check_packages
from spmd.resilience.supervisor import Worker
from spmd.run.program_cache import cache_problems
from spmd.run.run_dir import METRICS, Resume
from spmd.run.run_spec import RunSpec
from spmd.run.session import RunResult, train_in_folder
from spmd.training.evaluated_params import plan_evaluation_point
from spmd.training.loop import check_may_train


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Run(RunSpec):
    """Training run of one step, in one folder; its arguments are those of `RunSpec`."""

    @lasting_output()
    def train(
        self,
        resume: Resume = "never",
        *,
        take_over: bool = False,
        profile: str = "",
        said: Sequence[str] = (),
        began: float | None = None,
        worker: Worker | None = None,
    ) -> RunResult:
        """Train until the config's last step or preemption.

        The first process prints the results.

        Args:
            resume: If the folder contains a run: never (refuse the folder), auto (resume; start a
                run if there is none), always (resume; refuse a folder without a checkpoint).
            take_over: Take the folder from the process that writes to it.
            profile: Steps to trace, such as `10:15`.
            said: Lines for the log.
            began: Start of the session for its goodput, in seconds since the epoch; by default,
                this call.
            worker: This process under its supervisor, as `spmd train` starts it.

        Raises:
            CheckpointError: The folder cannot be used, or has a run that this one cannot continue.
            DivergenceError: A step is non-finite or a spike, and the config says stop, or rollbacks
                are used up; or too many steps were skipped.
        """
        check_may_train()
        if began is None:
            began = time.time()
        check_packages(self.config.metrics_to)
        problems = broadcast_problems(self.config.writers.login_problems)
        if problems:
            raise ConfigError("Metrics cannot be written:", problems)
        problems = broadcast_problems(lambda: cache_problems(self.config.compilation_cache_dir))
        if problems:
            raise ConfigError("Programs cannot be cached:", problems)
        resumes = self.run_dir.check_use_together(resume)
        traced = parse_steps(profile)
        is_first = jax.process_index() == 0
        with self.run_dir.lease(resumes, take_over) as lease, contextlib.ExitStack() as stack:
            console = None
            # Here on every process, since they read their first batches together.
            columns = columns_of(self.rate.unit, self.step.parts)
            if is_first:
                print(wrap_to_terminal("\n".join((self.description, *self.notes))))
                console = Console(self.config.steps, columns=columns)
                stack.enter_context(contextlib.closing(console))
            result = train_in_folder(self, lease, console, resumes, traced, said, began, worker)
        if console:
            self._report(console, result)
        return result

    def _report(self, console: Console, result: RunResult) -> None:
        """Print the results."""
        if result.preempted is not None:
            how = 'continue with --resume auto (in Python: resume="auto")'
            print(f"preempted: checkpoint saved at step {result.preempted}; {how}")
            return
        rate = self.rate
        folder = self.run_dir
        if result.steps:
            console.summary(
                steps=result.steps,
                seconds=result.seconds,
                count=result.count,
                unit=rate.unit,
                loss=result.metrics.get("loss"),
                flops=rate.flops,
                mfu=result.metrics.get("mfu"),
                memory=device_memory(),
            )
        evaluated = self.step.parts[self.step.evaluated_part]
        point = plan_evaluation_point(evaluated.plan).name
        of_point = ""
        if point:
            of_point = f", {point}"
        for name, weight in result.weights.items():
            title = f"{name} loss"
            if name == "val":
                title = "validation loss"
            loss = result.evaluation[f"{name}_loss"]
            print(f"{title:<15} {loss:.4f} over {weight:,.0f} {rate.unit_of_weights}{of_point}")
        if result.checkpoint is not None:
            print(f"checkpoint      {folder.checkpoint(result.checkpoint)}")
        print(f"metrics         {folder.location / METRICS}")
        print(wrap_to_terminal(f"\n{measure_goodput(folder.path)}", indent=16))
