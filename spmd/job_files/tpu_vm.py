"""Shell scripts for TPU VMs of Google Cloud, without a scheduler."""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from spmd.analysis.topology import Topology, cloud_slice
from spmd.errors import MeshError, Problem
from spmd.job_files.job import CACHE, RESTARTED, WrappedJob, command_line_problems
from spmd.storage.address import is_address

_COMMAND_LINES = {
    "wrapper": "sudo docker run --privileged --net=host image",
    "create_options": "--network=my-network --internal-ips",
    "ssh_options": "--internal-ip",
}
_ZONE = re.compile(r"[a-z0-9-]+")
_STOPPED = "PREEMPTED | STOPPED | TERMINATED | SUSPENDED | FAILED"
"""States of a node, and of a queued resource, that never become usable again."""

_KEEP = """\
  on_all "$forget" || echo "spmd: not every host was told to train when the script runs again" >&2
  echo "the slice is kept: delete it to stop its costs"\
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuVmJob(WrappedJob):
    """Shell script for a TPU slice of Google Cloud, to run on any machine with gcloud.

    It creates the slice, installs spmd, starts one process on each host, follows the log of the
    first, and creates the slice again after a preemption. Flags of `spmd train` follow after `--`.
    CONFIG is copied; the run folder must be on a disk that all hosts mount.
    """

    tpu: str
    """Accelerator type, such as v5litepod-64."""
    zone: str
    """Zone, such as us-west4-a."""
    package: str
    """What pip installs as spmd: a wheel on this machine, which is copied, or a requirement."""
    project: str = ""
    """Project; by default that of gcloud."""
    slices: int = 1
    """Number of slices, which one queued resource has."""
    spot: bool = False
    """Take spot capacity, which is cheaper and may be preempted."""
    queued: bool = False
    """Wait for capacity in the queue, as a queued resource."""
    version: str = ""
    """Software version of the virtual machines; by default that for the TPU."""
    copy: tuple[str, ...] = ()
    """Further files and folders to copy beside CONFIG, such as a corpus."""
    create_options: str = ""
    """Further options of the create command, such as --create-options="--network=my-network"."""
    ssh_options: str = ""
    """Further options of ssh and scp, such as --ssh-options="--internal-ip"."""
    attempts: int = 60
    """Failures in a row to create, reach or prepare the slice, a minute apart, until the script
    gives up."""
    keep: bool = False
    """Keep the slice when training has ended; it costs until it is deleted."""

    @property
    def topology(self) -> Topology:
        """All slices."""
        found = cloud_slice(self.tpu)
        return dataclasses.replace(found, slices=self.slices)

    @property
    def processes(self) -> int:
        """Number of processes of the run: one for each host."""
        return self.topology.hosts

    @property
    def devices(self) -> int:
        """Number of devices, as JAX counts them."""
        return self.topology.devices

    @property
    def platform(self) -> str:
        """Platform of the devices."""
        return "tpu"

    @property
    def _is_queued(self) -> bool:
        return self.queued or self.slices > 1

    @property
    def _version(self) -> str:
        chip = cloud_slice(self.tpu).chip
        if self.version or chip.cloud is None:
            return self.version
        return chip.cloud.vm_version

    def _rules(self) -> dict[str, str]:
        return {**super()._rules(), "slices": "at least 1", "attempts": "at least 1"}

    def problems(self) -> list[Problem]:
        """Return the problems of the options."""
        problems = super().problems() + command_line_problems(self, _COMMAND_LINES)
        problems += self._slice_problems()
        if not (self.out.startswith("/") or is_address(self.out)):
            what = f"{self.out!r} is a folder of each host, and all hosts write to it"
            fix = "gs://BUCKET/KEY, or an absolute path on a disk that setup mounts on every host"
            problems.append(Problem("out", what, fix=fix))
        if not _ZONE.fullmatch(self.zone):
            problems.append(Problem("zone", f"{self.zone!r} is no zone", fix="such as us-west4-a"))
        for path in self.copy:
            if not Path(path).exists():
                problems.append(Problem("copy", f"{path!r} is not on this machine"))
        if self.package.endswith(".whl") and not Path(self.package).is_file():
            problems.append(Problem("package", f"{self.package!r} is not on this machine"))
        return problems

    def _slice_problems(self) -> list[Problem]:
        if re.match(r"\d+x", self.tpu):
            fix = "--slices N before --tpu TYPE"
            return [Problem("tpu", f"{self.tpu!r} has a number of slices", fix=fix)]
        try:
            found = cloud_slice(self.tpu)
        except MeshError as error:
            return [dataclasses.replace(problem, where="tpu") for problem in error.problems]
        if not self._version:
            what = f"{found.name} is of a kind that Cloud TPU VMs do not offer"
            return [Problem("tpu", what, fix="spmd script kubernetes, or give version")]
        return []

    def render(self, train: Sequence[str]) -> str:
        """Return the script of `command(train)`, with a copy of the config's file."""
        train = list(train)
        copied = [*self.copy]
        if Path(train[0]).is_file():
            copied.append(train[0])
            train[0] = Path(train[0]).name
        package = self.package
        if Path(package).is_file():
            copied.append(package)
            package = f"./{Path(package).name}"
        folder = f"spmd-{self.name}"
        is_running = f'[ -f pid ] && grep -qs "{folder}/train.sh" "/proc/$(cat pid)/cmdline"'
        size = f"chips: {self.topology.chips}, hosts: {self.topology.hosts}"
        machines = f"{self.slices} x {self.tpu} ({size})"
        cache = f'"$PWD/{CACHE}"'  # in the folder of the script on each host
        if not is_address(self.out):
            cache = shlex.quote(str(Path(self.out).parent / CACHE))
        return _SCRIPT.format(
            machines=machines,
            name=self.name,
            zone=self.zone,
            common=self._words(f"--zone={self.zone}", self._project()),
            ssh_options=f" {self.ssh_options}".rstrip(),
            copied=shlex.join(copied),
            folder=folder,
            package=shlex.quote(f"{package}[tpu]"),
            package_hash=self._package_hash(),
            is_running=is_running,
            setup=self.setup or "# --setup: none",
            cache=cache,
            train=self.wrapped(self.command(train)),
            hosts=self.topology.hosts,
            attempts=self.attempts,
            seconds=self.save_seconds + 180,
            restarted=" | ".join(map(str, RESTARTED)),
            stopped=_STOPPED,
            end=self._end(),
            **self._commands(),
        )

    def _project(self) -> str:
        if self.project:
            return f"--project={self.project}"
        return ""

    def _words(self, *words: str) -> str:
        """Return words for the shell, without empty ones."""
        return shlex.join(filter(None, words))

    def _package_hash(self) -> str:
        """Return a hash of the file of the package, or of the requirement."""
        content = self.package.encode()
        if Path(self.package).is_file():
            content = Path(self.package).read_bytes()
        return hashlib.sha256(content).hexdigest()[:12]

    def _end(self) -> str:
        if self.keep:
            return _KEEP
        return "  delete"

    def _commands(self) -> dict[str, str]:
        """Return the parts of gcloud's commands for a node, or for a queued resource."""
        spot = ""
        if self.spot:
            spot = "--spot"
        kind = f"--accelerator-type={self.tpu}"
        if not self._is_queued:
            options = self._words(kind, f"--version={self._version}", spot)
            return {
                "group": "tpu-vm",
                "state": "state",
                "ready": "READY",
                "create": f"{options} {self.create_options}".rstrip(),
                "force": "",
                "all_nodes": "",
                "first_node": "",
            }
        nodes = [f"--node-id={self.name}"]
        if self.slices > 1:
            nodes = [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
        options = self._words(kind, f"--runtime-version={self._version}", *nodes, spot)
        return {
            "group": "queued-resources",
            "state": "state.state",
            "ready": "ACTIVE",
            "create": f"{options} {self.create_options}".rstrip(),
            "force": " --force",
            "all_nodes": " --node=all",
            "first_node": " --node=0",
        }


# For bash 3.2 too, which macOS has: here-documents are read, not substituted.
_SCRIPT = r"""#!/bin/bash
# Trains on {machines} in {zone}: creates the slice, installs spmd, starts one process on each
# host, prints the log of the first, and creates the slice again after a preemption.
# Keep it running, such as in tmux. If it is interrupted, training goes on, and the same script
# follows it.
# shellcheck disable=SC2016  # hosts expand what is quoted for them
set -u
common=({common})

# Part 1: what runs on the hosts.

# A run that has ended, and whose exit code was not collected, counts as well. It may end meanwhile,
# and its code is there before its process is gone: look for the code last.
IFS= read -r -d '' find_run << 'REMOTE'
cd "$HOME/{folder}" 2> /dev/null || exit 0
{{ {is_running}; }} || [ -f code ] || exit 0
echo run-found
REMOTE

# Files that a process has open or mapped are replaced, not overwritten.
prepare='rm -rf "$HOME/{folder}/copy.part" && mkdir -p "$HOME/{folder}/copy.part"'
IFS= read -r -d '' replace << 'REMOTE'
cd "$HOME/{folder}/copy.part" || exit 1
shopt -s dotglob
for file in *; do
  [ ! -d "../$file" ] || rm -r "../$file" || exit 1
  mv -f "$file" ../ || exit 1
done
rmdir ../copy.part
REMOTE

IFS= read -r -d '' install << 'REMOTE'
cd "$HOME/{folder}" || exit 1
[ -f installed-{package_hash} ] && exit 0
rm -f installed-*
python3 -m pip install --quiet --user uv ||
  python3 -m pip install --quiet --user --break-system-packages uv || exit 1
uv="$HOME/.local/bin/uv"
"$uv" venv --quiet --allow-existing --python 3.12 .venv || exit 1
"$uv" pip install --quiet --python .venv --reinstall-package spmd {package} &&
  touch installed-{package_hash}
REMOTE

IFS= read -r -d '' train << 'REMOTE'
cd "$HOME/{folder}" || exit 1
export PATH="$PWD/.venv/bin:$PATH"
{setup}
export JAX_COMPILATION_CACHE_DIR={cache}
{train}
echo $? > code.part
mv code.part code
REMOTE

# Hosts that gave up because another did not start have an exit code: they start again.
IFS= read -r -d '' start << 'REMOTE'
cd "$HOME/{folder}" || exit 1
{is_running} && exit 0
rm -f code
setsid nohup bash "$PWD/train.sh" > log.txt 2>&1 < /dev/null &
echo $! > pid
REMOTE

# Lets a run that has ended start again.
forget='rm -f "$HOME/{folder}/code"
'
follow='cd "$HOME/{folder}" && tail -n +1 -f --pid="$(cat pid)" log.txt'

# The others end soon after the first; one that does not is stuck.
IFS= read -r -d '' collect << 'REMOTE'
cd "$HOME/{folder}" || exit 1
for second in $(seq {seconds}); do
  [ -f code ] && break
  [ -d "/proc/$(cat pid)" ] || break
  sleep 1
done
kill -KILL -- "-$(cat pid)" 2> /dev/null
[ -f code ] || echo 137 > code
case "$(cat code)" in
  0 | 69 | 75) ;;
  *) {{ echo "spmd: end of the log of $(uname -n):"; tail -n 30 log.txt; }} >&2 ;;
esac
echo "exit-code=$(cat code)"
REMOTE

# Part 2: gcloud.

tpus() {{
  local verb=$1
  shift
  gcloud compute tpus {group} "$verb" "${{common[@]}}" "$@"
}}
state() {{
  tpus list --filter='name~"(^|/){name}$"' --format='value({state})'
}}
create() {{
  tpus create {name} {create}
}}
delete() {{
  tpus delete {name} --quiet{force}
}}
on_all() {{
  tpus ssh {name} --quiet{all_nodes} --worker=all{ssh_options} --command="$1"
}}
on_first() {{
  tpus ssh {name} --quiet{first_node} --worker=0{ssh_options} --command="$1"
}}
copy() {{
  local script
  script=$(mktemp -d) || return 1
  printf '%s' "$train" > "$script/train.sh"
  on_all "$prepare" &&
    tpus scp --recurse {copied} "$script/train.sh" "{name}:{folder}/copy.part/" \
      --quiet{all_nodes} --worker=all{ssh_options} &&
    on_all "$replace"
  local status=$?
  rm -r "$script"
  return $status
}}

# Part 3: until training has ended.

failures=0
failed() {{
  failures=$((failures + 1))
  if [ "$failures" -ge {attempts} ]; then
    echo "spmd: $1; given up after $failures failures in a row" >&2
    exit 1
  fi
  echo "spmd: $1; failure $failures in a row of at most {attempts}, again in a minute" >&2
  sleep 60
}}
ended() {{
  echo "spmd: training ended with exit code $1"
{end}
  exit "$1"
}}
interrupted() {{
  echo "spmd: training goes on, if it was started; the same script follows it" >&2
  exit 130
}}
trap interrupted INT

last=
again=
while true; do
  if ! now=$(state); then
    failed "gcloud cannot list what is in {zone}"
    continue
  fi
  [ "$now" = "$last" ] || echo "spmd: {name} is ${{now:-not there}}"
  last=$now
  case "$now" in
    {ready}) ;;
    "") create || failed "the slice was not created"; continue ;;
    {stopped}) delete; failed "the slice was $now"; continue ;;
    *) sleep 30; continue ;;
  esac
  if ! found=$(on_all "$again$find_run"); then
    failed "not every host was reached"
    continue
  fi
  again=
  if [ "$(echo "$found" | grep -c run-found)" -ne {hosts} ]; then
    if ! {{ copy && on_all "$install"; }}; then
      failed "spmd was not installed on every host"
      continue
    fi
    if ! on_all "$start"; then
      failed "training was not started on every host"
      continue
    fi
  fi
  began=$SECONDS
  on_first "$follow"
  status=$?
  [ $((SECONDS - began)) -le 600 ] || failures=0
  if [ "$status" -ne 0 ]; then
    failed "the connection to the first host was lost"
    continue
  fi
  codes=$(on_all "$collect" | sed -n 's/.*exit-code=\([0-9][0-9]*\).*/\1/p')
  if [ "$(echo "$codes" | grep -c .)" -ne {hosts} ]; then
    failed "not every host could tell its exit code"
    continue
  fi
  failures=0
  again=$forget
  result=0
  for code in $codes; do
    case "$code" in
      0) ;;
      {restarted}) result=$code ;;
      *) ended "$code" ;;
    esac
  done
  [ "$result" = 0 ] && ended 0
  sleep 60
  echo "spmd: exit code $result: training starts again"
done
"""
