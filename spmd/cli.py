"""Command line: `spmd train`, `spmd plan` and the other commands of `USAGE`.

Every field of a `TrainConfig` is a flag by its dotted path. User errors are printed without a
traceback and exit with 2, as do errors of the operating system, such as a full disk; a TPU that
another process holds exits with 69, a check that fails with 1, a plan that exceeds the memory of
its chips with 3. `spmd_command` runs this as a process.
"""

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from spmd.checkpoint.versions import library_version
from spmd.commands.check import CheckCommand, CheckStepCommand, run_check
from spmd.commands.compile import CompileCommand, run_compile
from spmd.commands.data import DataShowCommand, run_data
from spmd.commands.diff import DiffCommand, run_diff
from spmd.commands.doctor import DoctorCommand, run_doctor
from spmd.commands.evaluate import EvalCommand, run_eval
from spmd.commands.export_hf import ExportCommand, run_export
from spmd.commands.flag_names import name_flags
from spmd.commands.generate import GenerateCommand, run_generate
from spmd.commands.import_hf import ImportCommand, run_import
from spmd.commands.launch import LaunchCommand, run_launch
from spmd.commands.plan import PlanCommand, run_plan
from spmd.commands.processes import (
    is_common_error,
    run_command,
)
from spmd.commands.report import ReportCommand, ReportRunCommand, run_report
from spmd.commands.save import SaveCommand, run_save
from spmd.commands.script import JOBS, run_script
from spmd.commands.search import SearchCommand, run_search
from spmd.commands.status import StatusCommand, run_status
from spmd.commands.train import TrainCommand, run_supervised, run_train
from spmd.distributed.initialize import exit_process
from spmd.errors import ConfigError, Problem, SpmdError, did_you_mean, print_traceback
from spmd.run.load_config import shipped

USAGE = """\
usage: spmd COMMAND …

  spmd train CONFIG [--out DIR] [--FIELD VALUE …]    train; checkpoints and metrics go to DIR
       [--resume auto]                               … from the newest checkpoint, if there is one
       [--profile 10:15]                             … tracing these steps
  spmd launch --processes N -- train CONFIG …        the same in N processes on this machine
  spmd launch --processes N -- eval RUN …            … also check, generate, import and export
  spmd script slurm|kubernetes CONFIG --nodes N      a batch file or manifest for N nodes
  spmd script tpu-vm CONFIG --tpu v5litepod-64 …     a script that creates a TPU slice and trains
  spmd plan CONFIG [--FIELD VALUE …]                 sharding of each parameter, memory per device
       [--all] [--json]                              … also of gradients and optimizer state; JSON
       [--topology v5e:16x16]                        for an absent machine; 3 if it does not fit
       [--compile]                                   memory and collectives of the compiled step
       [--estimate] [--time] [--trace FILE]          time of a step: closed forms; its schedule
       [--diff CONFIG]                               difference from another config's plan
       [--schedule] [--svg FILE]                     chart of the pipeline schedule
  spmd diff A B [--topology T] [--limits.time 3]     two compiled steps: what changed, and why; 1 if
                                                     one is worse by more than its limits
  spmd compile CONFIG --topology T [--out DIR]       the step for a machine, before it is rented
  spmd report CONFIG [--topology T] --out FILE.html  a page with charts of a plan
  spmd report RUN [RUN] --out FILE.html              … of a run, or of two side by side
  spmd search CONFIG --topology v5p:4x4x8            the fastest layout of a machine, as flags
       [--confirm K] [--write FILE]                  … compiling the best K; as a config
       [--days N] [--largest-batch]                  the fewest chips; the largest batch that fits
  spmd doctor [--mesh.fsdp 8 …] [--out RUN] [--json] drivers, network and speeds of a machine
  spmd check CONFIG [--FIELD VALUE …]                compare steps on the mesh with one device
       [--check-steps N] [--leaves] [--inject BUG]   … by leaf; with a bug that must be found
       [--products 2]                                … on every axis and every pair of axes
  spmd eval RUN [--data NAME=SOURCE …] [--json]      loss, perplexity, bits per byte and accuracy
  spmd eval RUN FILE                                 … of a train step of your own
  spmd eval RUN --tasks TASK …                       … on tasks of lm-eval
  spmd data show FILE … [--tokenizer T]              conversations or pairs, and what is trained
  spmd generate RUN --prompt TEXT [--prompt TEXT …]  text from a trained model, token by token
       [--temperature T] [--top-k K] [--top-p P]     … sampled; temperature 0 is greedy
       [--mesh.fsdp 4 …] [--devices N]               … on another mesh than the run's
  spmd status RUN [--json]                           step, loss, speed and last save of a run
  spmd save RUN [--wait SECONDS]                     ask a run in progress for a checkpoint
  spmd import HF_DIR --out RUN [--mesh.fsdp 4 …]     a run folder from a Hugging Face folder
  spmd export RUN --out HF_DIR [--dtype bf16]        a Hugging Face folder for `transformers`

CONFIG is a Python file that defines `config = spmd.TrainConfig(...)`, or a shipped one:
{names}.
plan, report, search and check also take a file with a train step of your own: one that defines
`make(mesh, **settings)`, which returns a step and a batch; FILE.py:FUNCTION is another function.
Any field is a flag by its dotted path: --steps 100 --mesh.fsdp 4 --optimizer.learning-rate 1e-3.
--devices N simulates N CPU devices. `spmd COMMAND --help` lists everything, `spmd --version` the
versions.
"""
COMMANDS: Mapping[str, tuple[Callable[[list[str]], int], tuple[Any, ...]]] = {
    "train": (run_train, (TrainCommand,)),
    "launch": (run_launch, (LaunchCommand, TrainCommand)),
    "script": (run_script, (*JOBS.values(), TrainCommand)),
    "plan": (run_plan, (PlanCommand,)),
    "diff": (run_diff, (DiffCommand,)),
    "compile": (run_compile, (CompileCommand,)),
    "report": (run_report, (ReportCommand, ReportRunCommand)),
    "search": (run_search, (SearchCommand,)),
    "doctor": (run_doctor, (DoctorCommand,)),
    "check": (run_check, (CheckCommand, CheckStepCommand)),
    "eval": (run_eval, (EvalCommand,)),
    "data": (run_data, (DataShowCommand,)),
    "generate": (run_generate, (GenerateCommand,)),
    "save": (run_save, (SaveCommand,)),
    "status": (run_status, (StatusCommand,)),
    "import": (run_import, (ImportCommand,)),
    "export": (run_export, (ExportCommand,)),
}
"""Name → function, and the dataclasses whose fields are its flags."""
_LONGEST_ERROR = 100
"""Lines of an error on the terminal; the whole of a longer one is written to a file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    is_process = arguments is None
    if arguments is None:
        arguments = sys.argv[1:]
    arguments = list(arguments)
    sys.excepthook = print_traceback
    end: Callable[[int], NoReturn] = exit_process
    try:
        code = _dispatch(arguments, is_process)
        end = sys.exit
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader, such as `head`, has exited
        code = 141
    except (SpmdError, jax.errors.JaxRuntimeError, OSError) as error:
        shown = _users_error(error, arguments)
        if shown is None:
            raise
        is_common = is_common_error(arguments, str(shown))
        if is_common:
            end = sys.exit
        if not is_common or jax.process_index() == 0:
            _say(f"spmd: {shown}")
        code = 2
        if isinstance(error, SpmdError):
            code = error.exit_code
    try:
        sys.stdout.flush()
    except OSError:  # nothing may be flushed there at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    end(code)


def _users_error(error: Exception, arguments: list[str]) -> SpmdError | None:
    """Return an error as the user reads it; None if it is a bug, with a traceback."""
    if isinstance(error, SpmdError):
        name = ""
        if arguments:
            name = arguments[0]
        _, commands = COMMANDS.get(name, (None, ()))
        return SpmdError(error.title, name_flags(error.problems, commands, arguments))
    if isinstance(error, jax.errors.JaxRuntimeError):
        if "RESOURCE_EXHAUSTED" not in str(error):
            return None
        first_line = str(error).splitlines()[0]
        fix = "spmd plan CONFIG says what takes the memory, and which settings take less"
        return SpmdError("Out of memory:", [Problem("device", first_line, fix=fix)])
    if isinstance(error, OSError) and error.errno is not None:
        file = str(error.filename or "the system")
        problem = Problem(file, error.strerror or str(error))
        return SpmdError("A file cannot be read or written:", [problem])
    return None  # an `OSError` without a number is not of the operating system


def _say(text: str) -> None:
    """Write an error to standard error: its first lines, and all of a long one to a file."""
    lines = text.split("\n")
    with contextlib.suppress(OSError):
        if len(lines) > _LONGEST_ERROR:
            more = f"… and {len(lines) - _LONGEST_ERROR:,} more lines"
            with contextlib.suppress(OSError):
                more += f": see {_write_error(text)}"
            text = "\n".join([*lines[:_LONGEST_ERROR], more])
        print(text, file=sys.stderr, flush=True)


def _write_error(text: str) -> str:
    """Write an error to a new file, and return the file's name."""
    with tempfile.NamedTemporaryFile(
        "w",
        prefix="spmd-error-",
        suffix=".txt",
        delete=False,
        encoding="utf-8",
    ) as file:
        file.write(f"{text}\n")
    return file.name


def _dispatch(arguments: list[str], is_process: bool) -> int:
    """Run a command; a program that calls `main` with arguments is not forked."""
    if not arguments:
        _print_usage()
        return 2
    command = arguments[0]
    if command in ("-h", "--help"):
        _print_usage()
        return 0
    if command == "--version":
        _print_versions()
        return 0
    if command not in COMMANDS:
        problem = Problem(command, "is an unknown command", fix=did_you_mean(command, COMMANDS))
        raise ConfigError("Unknown command:", [problem])
    run, _ = COMMANDS[command]
    if command == "train" and is_process:
        run = run_supervised
    return run_command(command, run, arguments[1:])


def _print_usage() -> None:
    print(USAGE.format(names=", ".join(shipped())), end="")


def _print_versions() -> None:
    versions = []
    for name in ("spmd", "jax", "jaxlib", "flax", "optax"):
        versions.append(f"{name} {library_version(name)}")
    versions.append(f"Python {platform.python_version()}")
    print(", ".join(versions))


if __name__ == "__main__":
    main()
