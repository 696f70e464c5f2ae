"""A real Slurm preempts a run a hundred times, and later kills it three times at the same step.

A scheduler that takes its node every 45 minutes does that in three days. Here the job is preempted as soon as it
has taken a step, and starts again at once: what counts is progress, not time.
"""

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from spmd.resilience.attempts import read_attempts
from tests.processes.test_launchers import (
    command,
    environment,  # noqa: F401
    folder,  # noqa: F401
    losses,
    slurm,
    wait_for,
)
from tests.slurm_cluster import slurm_cluster
from tests.train_runs import SLOWLY

PREEMPTIONS = 100
KILLS = 3

pytestmark = pytest.mark.soak


def kill(out: Path) -> None:
    """Kill the training process, as Linux does where memory runs out."""
    pattern = f"spmd.cli train .*--out {out} "
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def test_preemptions_with_progress_are_free_and_three_kills_end_the_job(folder, environment):  # noqa: F811
    """After a hundred preemptions the run goes on; killed three times without a newer checkpoint, it ends and says
    why, and Slurm does not start it again."""
    out = folder / "preempted"
    flags = ("--steps", 100_000, "--mesh.fsdp", 1, "--checkpoint-every", 0)
    written = ("--nodes", 1, "--name", "tiny", "--out", out, "--file", "job.sh", "--", *flags)
    subprocess.run(
        command("spmd", "script", "slurm", "tiny.py", *written),
        cwd=folder,
        env=environment,
        check=True,
        timeout=120,
    )
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        slurm_cluster(Path(short) / "slurm", nodes=1) as cluster,
    ):
        variables = {
            **environment,
            **SLOWLY,
            **{n: cluster[n] for n in cluster if n.startswith("SLURM")},
        }
        job = slurm(variables, folder, "sbatch", "--parsable", "job.sh").strip()
        log = folder / f"tiny-{job}.log"

        def state() -> str:
            shown = slurm(variables, folder, "scontrol", "show", "job", job)
            return " ".join(re.findall(r"(?:JobState|Restarts|ExitCode)=\S+", shown))

        def describe() -> str:
            return f"{state()}\n{log.read_text()[-3000:] if log.exists() else ''}"

        def begin_again(restarts: int) -> None:
            """Wait until the job is requeued, and start it: Slurm would let it wait for two minutes."""
            queued = f"JobState=PENDING Restarts={restarts} "
            wait_for(f"restart {restarts}", lambda: queued in f"{state()} ", 120, describe)
            slurm(variables, folder, "scontrol", "update", f"JobId={job}", "StartTime=now")

        reached = 0
        for preempted in range(1, PREEMPTIONS + 1):
            wait_for("a step", lambda: max(losses(out), default=0) > reached, 120, describe)  # noqa: B023
            slurm(variables, folder, "scancel", "--signal=TERM", job)
            begin_again(preempted)
            reached = max(losses(out))
        assert len(read_attempts(out)) == PREEMPTIONS
        assert (out / "checkpoints" / str(reached)).is_dir()
        for killed in range(1, KILLS + 1):
            attempts = PREEMPTIONS + killed
            wait_for("an attempt", lambda: len(read_attempts(out)) == attempts, 120, describe)  # noqa: B023
            kill(out)
            begin_again(PREEMPTIONS + killed)
        wait_for("the end", lambda: "JobState=FAILED" in state(), 120, describe)
        assert f"Restarts={PREEMPTIONS + KILLS} ExitCode=2:0" in state(), describe()
    said = log.read_text()
    assert f"3 attempts in a row ended without a newer checkpoint than step {reached}" in said
    assert f"attempt {PREEMPTIONS + KILLS}: ended without a word: killed" in said
