"""The script for TPU VMs creates, installs, starts, follows and starts again.

`gcloud` is a stub here: hosts are folders, and what the script runs on them runs in bash. `spmd`, pip and uv are stubs
as well. The options of the commands are those of Google Cloud SDK 528.
"""

import dataclasses
import platform
import re
import subprocess

import pytest

from spmd.analysis.topology import cloud_slice
from spmd.chips import CHIPS
from spmd.job_files.tpu_vm import TpuVmJob
from tests.command_line import run, write_config

TRAIN = ["tiny.py", "--steps", "9"]
JOB = TpuVmJob(
    name="tiny", out="/mnt/runs/tiny", tpu="v4-16", zone="us-central2-b", package="spmd", attempts=4
)
HOSTS = 2

GCLOUD = r"""#!/bin/bash
echo "$*" >> calls.txt
group=$3 verb=$4
ready=READY
[ "$group" = tpu-vm ] || ready=ACTIVE
on_hosts() {
  [ "$(cat state 2> /dev/null)" = "$ready" ] || exit 255
  local status=0 host only=
  [[ "$words" != *--worker=0* ]] || only=host-0
  for host in host-*; do
    [ -z "$only" ] || [ "$host" = "$only" ] || continue
    STUBS=$PWD HOME=$PWD/$host HOST=${host#host-} PATH="$PWD/of-host:$PATH" "$@" || status=$?
  done
  return $status
}
words="$*"
case "$verb" in
  list) [ ! -f unreachable ] || exit 1; cat state 2> /dev/null || true ;;
  create)
    [ ! -f no-capacity ] || exit 1
    echo $ready > state
    for host in $(seq 0 $((HOSTS - 1))); do mkdir "host-$host"; done ;;
  delete) rm -rf state host-* ;;
  ssh) on_hosts bash -c "${words#*--command=}" ;;
  scp)
    files=()
    for word in "${@:5}"; do
      case "$word" in
        --*) ;;
        *:*) target=${word#*:} ;;
        *) files+=("$word") ;;
      esac
    done
    on_hosts bash -c 'cp -r "${@:2}" "$HOME/$1"' copy "$target" "${files[@]}" ;;
esac
"""
PYTHON = r"""#!/bin/bash
mkdir -p "$HOME/.local/bin"
cat > "$HOME/.local/bin/uv" << 'UV'
#!/bin/bash
echo "uv $*" >> "$STUBS/installs.txt"
mkdir -p .venv/bin
cp "$STUBS/spmd-stub" .venv/bin/spmd
UV
chmod +x "$HOME/.local/bin/uv"
"""
# A line of attempts.txt has the exit code of each host, or `preempted`.
SPMD = r"""#!/bin/bash
echo "host $HOST: spmd $*" >> "$STUBS/trained.txt"
echo x >> "$STUBS/starts-$HOST.txt"
attempt=$(wc -l < "$STUBS/starts-$HOST.txt")
codes=($(sed -n "${attempt}p" "$STUBS/attempts.txt"))
echo "attempt $attempt on host $HOST"
if [ "${codes[$HOST]}" = preempted ]; then
  echo PREEMPTED > "$STUBS/state"
  kill -9 $PPID
  exit 1
fi
exit "${codes[$HOST]}"
"""

# The real one waits until the process has no number, which takes a second where nothing reaps it.
TAIL = r"""#!/bin/bash
while [ ! -f code ] && [ "$(cat "$STUBS/state")" != PREEMPTED ]; do /bin/sleep 0.02; done
cat log.txt
"""


@pytest.fixture
def stubs(tmp_path):
    """A folder with the stubs, and the files that are copied."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "of-host").mkdir()
    programs = {
        "bin/gcloud": GCLOUD,
        "bin/sleep": "#!/bin/sh\n",
        "of-host/python3": PYTHON,
        "of-host/tail": TAIL,
        "spmd-stub": SPMD,
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tiny.py").write_text("config = 1\n")
    return tmp_path


def execute(job, stubs, monkeypatch, *attempts):
    """Run the script of a job; return its exit code and output, and the calls of gcloud without their options."""
    monkeypatch.chdir(stubs)
    (stubs / "attempts.txt").write_text("".join(f"{line}\n" for line in attempts))
    done = subprocess.run(
        ["bash", "-c", job.render(TRAIN)],
        env={"PATH": f"{stubs / 'bin'}:/usr/bin:/bin", "HOSTS": str(job.processes)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    verbs = re.findall(r"^compute tpus [-\w]+ (\w+)", (stubs / "calls.txt").read_text(), re.M)
    return done.returncode, done.stdout + done.stderr, verbs


def starts(stubs):
    """Return how often training was started on the first host."""
    return len((stubs / "starts-0.txt").read_text().splitlines())


def test_training_is_started_on_every_host_and_followed(stubs, monkeypatch):
    """The slice is created, spmd installed once, the log of the first host printed, and the slice deleted."""
    (stubs / "of-host" / "tail").unlink()
    code, printed, verbs = execute(JOB, stubs, monkeypatch, "0 0")
    assert code == 0, printed
    assert [verb for verb in verbs if verb in ("create", "delete")] == ["create", "delete"]
    trained = sorted((stubs / "trained.txt").read_text().splitlines())
    command = "spmd train tiny.py --steps 9 --out /mnt/runs/tiny --resume auto --max-restarts 3"
    command += " --devices 0 --platform tpu --expect-devices 8"
    assert trained == [f"host {host}: {command}" for host in range(HOSTS)]
    assert "attempt 1 on host 0" in printed
    assert "attempt 1 on host 1" not in printed, "the log of the first host only"
    assert "training ended with exit code 0" in printed
    assert not (stubs / "state").exists(), "nothing is left that costs"


def test_a_preempted_slice_is_created_again(stubs, monkeypatch):
    """Training starts again on it, with spmd installed anew; so it does on the same slice after other codes."""
    code, printed, verbs = execute(
        JOB, stubs, monkeypatch, "preempted 69", "75 75", "134 69", "0 0"
    )
    assert code == 0, printed
    assert verbs.count("create") == 2
    assert verbs.count("delete") == 2
    assert starts(stubs) == 4
    installs = (stubs / "installs.txt").read_text().count("uv pip install")
    assert installs == 2 * HOSTS, "on new machines only"


@pytest.mark.parametrize("codes", ["1 69", "134 2"])
def test_a_final_code_of_any_host_ends(codes, stubs, monkeypatch):
    """Though the others end with codes after which training starts again."""
    code, printed, verbs = execute(JOB, stubs, monkeypatch, "75 75", codes, "0 0")
    assert code in (1, 2), printed
    assert f"ended with exit code {code}" in printed
    assert starts(stubs) == 2
    assert verbs[-1] == "delete"


def test_a_slice_can_be_kept(stubs, monkeypatch):
    """It is not deleted when training has ended."""
    job = dataclasses.replace(JOB, keep=True)
    code, printed, verbs = execute(job, stubs, monkeypatch, "0 0")
    assert (code, verbs.count("delete")) == (0, 0)
    assert "delete it to stop its costs" in printed


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("no-capacity", "was not created"), ("unreachable", "cannot list")],
)
def test_failures_in_a_row_are_limited(trouble, said, stubs, monkeypatch):
    """Of the cloud: those of training are counted by the run."""
    (stubs / trouble).touch()
    code, printed, _ = execute(JOB, stubs, monkeypatch)
    assert code == 1
    assert said in printed
    assert "given up after 4 failures in a row" in printed


def test_an_interrupted_script_follows_a_run_that_goes_on(stubs, monkeypatch):
    """What runs already is not started a second time."""
    monkeypatch.chdir(stubs)
    text = SPMD.replace(
        "attempt=$(wc", 'while [ ! -f "$STUBS/go" ]; do /bin/sleep 0.05; done\nattempt=$(wc'
    )
    (stubs / "spmd-stub").write_text(text)
    (stubs / "attempts.txt").write_text("0 0\n")
    environment = {"PATH": f"{stubs / 'bin'}:/usr/bin:/bin", "HOSTS": str(HOSTS)}
    words = ["bash", "-c", JOB.render(TRAIN)]
    first = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        for _ in range(600):
            subprocess.run(["/bin/sleep", "0.05"], check=True)
            started = [stubs / f"starts-{host}.txt" for host in range(HOSTS)]
            started.append(stubs / "host-1" / "spmd-tiny" / "pid")
            if all(file.exists() for file in started):
                break
    finally:
        first.kill()
        first.wait()
    (stubs / "go").touch()
    code, printed, verbs = execute(JOB, stubs, monkeypatch, "0 0")
    assert code == 0, printed
    assert verbs.count("create") == 1
    assert verbs.count("scp") == 1, "nothing is copied while it runs"
    assert starts(stubs) == 1


LOST = r"""#!/bin/bash
echo x >> "$STUBS/followed.txt"
[ "$(wc -l < "$STUBS/followed.txt")" -gt LIMIT ] || exit 255
"""


def test_after_a_lost_connection_the_run_is_only_followed(stubs, monkeypatch):
    """Files that it uses are not copied again."""
    lost = LOST.replace("LIMIT", "2")
    (stubs / "of-host" / "tail").write_text(lost + TAIL.partition("\n")[2])
    code, printed, verbs = execute(JOB, stubs, monkeypatch, "0 0")
    assert code == 0, printed
    assert printed.count("connection to the first host was lost") == 2
    assert verbs.count("scp") == 1
    assert starts(stubs) == 1


def test_lasting_failures_to_follow_are_limited(stubs, monkeypatch):
    """A start that succeeds does not reset their number."""
    (stubs / "of-host" / "tail").write_text(LOST.replace("LIMIT", "9"))
    code, printed, _ = execute(JOB, stubs, monkeypatch, "0 0")
    assert code == 1
    assert "connection to the first host was lost; given up after 4 failures in a row" in printed


def test_copied_files_are_replaced(stubs, monkeypatch):
    """A process that has mapped the old file keeps its content; folders are replaced as well."""
    text = SPMD.replace(
        'exit "${codes[$HOST]}"', 'ln -f data/corpus mapped-$attempt\nexit "${codes[$HOST]}"'
    )
    (stubs / "spmd-stub").write_text(text)
    (stubs / "data").mkdir()
    (stubs / "data" / "corpus").write_text("text")
    job = dataclasses.replace(JOB, copy=("data",), keep=True)
    code, printed, _ = execute(job, stubs, monkeypatch, "75 75", "0 0")
    assert code == 0, printed
    folder = stubs / "host-1" / "spmd-tiny"
    first, second = (folder / f"mapped-{attempt}" for attempt in (1, 2))
    assert not first.samefile(second)
    assert (folder / "data" / "corpus").samefile(second)
    assert not (folder / "copy.part").exists()


def test_a_kept_slice_trains_when_the_script_runs_again(stubs, monkeypatch):
    """Another package is installed anew; the same one is not."""
    job = dataclasses.replace(JOB, keep=True)
    other = dataclasses.replace(job, package="spmd==2")
    for again, (this, installs) in enumerate([(job, 1), (job, 1), (other, 2), (job, 3)], start=1):
        code, printed, _ = execute(this, stubs, monkeypatch, *["0 0"] * 4)
        assert code == 0, printed
        assert starts(stubs) == again
        commands = (stubs / "installs.txt").read_text().count("uv pip install")
        assert commands == installs * HOSTS


def test_hosts_that_gave_up_start_again(stubs, monkeypatch):
    """Their exit code is forgotten where another host did not start."""
    (stubs / "state").write_text("READY")
    (stubs / "host-0" / "spmd-tiny").mkdir(parents=True)
    (stubs / "host-0" / "spmd-tiny" / "code").write_text("2")
    (stubs / "host-1").mkdir()
    code, printed, _ = execute(JOB, stubs, monkeypatch, "0 0")
    assert code == 0, printed
    assert starts(stubs) == 1


def test_the_log_of_a_host_that_failed_is_shown(stubs, monkeypatch):
    """The slice, and the log with it, is deleted afterwards."""
    code, printed, _ = execute(JOB, stubs, monkeypatch, "75 1")
    assert code == 1
    _, heading, log = printed.partition(f"end of the log of {platform.node()}:\n")
    assert heading
    assert "attempt 1 on host 1" in log
    assert printed.count("end of the log of") == 1, "of that host only"


@pytest.mark.parametrize("changes", [{"queued": True}, {"slices": 2}], ids=["queued", "slices"])
def test_queued_resources(changes, stubs, monkeypatch):
    """A queued resource is one slice with a name, or several with a prefix; each host is reached."""
    job = dataclasses.replace(JOB, spot=True, **changes)
    code, printed, _ = execute(job, stubs, monkeypatch, " ".join("0" for _ in range(job.processes)))
    assert code == 0, printed
    calls = (stubs / "calls.txt").read_text().splitlines()
    create = next(call for call in calls if " create " in call)
    options = {"--accelerator-type=v4-16", "--runtime-version=tpu-ubuntu2204-base", "--spot"}
    assert options <= set(create.split())
    if job.slices > 1:
        assert {"--node-count=2", "--node-prefix=tiny"} <= set(create.split())
        assert job.processes == 2 * HOSTS
    else:
        assert "--node-id=tiny" in create.split()
    assert all("--node=" in call for call in calls if " ssh " in call)
    assert calls[-1].endswith("--quiet --force")


def test_every_kind_that_has_virtual_machines_has_a_software_version():
    """The newest kinds are offered by Kubernetes only."""
    versions = {kind: chip.cloud.vm_version for kind, chip in CHIPS.items() if chip.cloud}
    without = [kind for kind, version in versions.items() if not version]
    assert without == ["tpu7x"]
    for version in filter(None, versions.values()):
        assert re.fullmatch(r"(tpu|v2-alpha)-[a-z0-9-]+", version)


def test_a_wheel_is_copied_and_installed(stubs, monkeypatch):
    """So are further files; a shipped config is not a file."""
    wheel = stubs / "spmd-0.1.0-py3-none-any.whl"
    wheel.touch()
    (stubs / "corpus.txt").write_text("text")
    job = dataclasses.replace(JOB, package=str(wheel), copy=("corpus.txt",), keep=True)
    assert execute(job, stubs, monkeypatch, "0 0")[0] == 0
    assert f"./{wheel.name}[tpu]" in (stubs / "installs.txt").read_text()
    for name in ("corpus.txt", "tiny.py", wheel.name):
        assert (stubs / "host-1" / "spmd-tiny" / name).is_file()


WHERE = ("--zone", "us-central2-b", "--package", "spmd", "--out", "/mnt/runs/tiny")


def test_the_command_writes_a_script(tmp_path, capsys):
    """The config is planned for the devices of the slice."""
    config = write_config(tmp_path)
    assert run("script", "tpu-vm", config, "--tpu", "v5litepod-8", *WHERE) == 0
    printed = capsys.readouterr().out
    assert "--expect-devices 8" in printed
    assert cloud_slice("v5litepod-8").hosts == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tpu", "v5litepod-65", *WHERE], "v5litepod-64"),
        (["--tpu", "h100-8", *WHERE], "no such kind of TPU"),
        (["--tpu", "tpu7x-16", *WHERE], "spmd script kubernetes"),
        (["--tpu", "2xv5litepod-8", *WHERE], "--slices N before"),
        (["--tpu", "v4-16", *WHERE, "--zone", "a; b"], "is no zone"),
        (["--tpu", "v4-8", *WHERE], "there are 4 devices"),
        (["--tpu", "v4-16", *WHERE[:4]], "a folder of each host"),
        (["--tpu", "v4-16", *WHERE, "--copy", "none.txt"], "'none.txt' is not on this machine"),
        (["--tpu", "v4-16", *WHERE, "--package", "a.whl"], "'a.whl' is not on this machine"),
        (["--tpu", "v4-16", *WHERE, "--wrapper", "a 'b"], "no closing quotation"),
        (["--tpu", "v4-16", *WHERE, "--", "--process-id", "0"], "remove --process-id"),
        (["--tpu", "v4-16", *WHERE, "--", "--devices", "8"], "remove --devices"),
    ],
)
def test_what_could_not_run_is_refused(arguments, said, tmp_path, capsys):
    """A slice that does not exist, a folder that the hosts do not share, files that are not here."""
    assert run("script", "tpu-vm", write_config(tmp_path), *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert not printed.out


def test_a_run_in_a_bucket_needs_no_mount():
    """Programs are then kept on each host, beside its script; the control has them beside the run."""
    job = dataclasses.replace(JOB, out="gs://bucket/runs/tiny")
    assert not job.problems()
    assert 'JAX_COMPILATION_CACHE_DIR="$PWD/compiled"' in job.render(TRAIN)
    assert job.command(TRAIN)[5:7] == ["--out", "gs://bucket/runs/tiny"]
    assert "JAX_COMPILATION_CACHE_DIR=/mnt/runs/compiled" in JOB.render(TRAIN)
