"""Command line: `spmd train | launch | script | plan | report | search | check | eval | generate | import | export`.

Every field of a `TrainConfig` is a flag by its dotted path. User errors are printed without a traceback and exit with
2, as do errors of the operating system, such as a full disk; a check that fails exits with 1, a plan that exceeds the
memory of its chips with 3. `spmd_command` runs this as a process.
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
from spmd.commands.evaluate import EvalCommand, run_eval
from spmd.commands.export_hf import ExportCommand, run_export
from spmd.commands.flag_names import name_flags
from spmd.commands.generate import GenerateCommand, run_generate
from spmd.commands.import_hf import ImportCommand, run_import
from spmd.commands.launch import LaunchCommand, run_launch
from spmd.commands.plan import PlanCommand, run_plan
from spmd.commands.report import ReportCommand, ReportRunCommand, run_report
from spmd.commands.script import run_script
from spmd.commands.search import SearchCommand, run_search
from spmd.commands.train import TrainCommand, run_train
from spmd.distributed.initialize import exit_process
from spmd.errors import ConfigError, Problem, SpmdError, did_you_mean, print_traceback
from spmd.run.job_files import KubernetesJob, SlurmJob
from spmd.run.load_config import shipped

USAGE = """\
usage: spmd COMMAND …

  spmd train CONFIG [--out DIR] [--FIELD VALUE …]              train, with checkpoints and metrics in DIR
       [--resume auto]                                         … resuming from the newest checkpoint, if there is one
       [--profile 10:15]                                       … tracing these steps
  spmd launch --processes N -- train CONFIG …                  the same in N processes on this machine, to try them
  spmd script slurm|kubernetes CONFIG --nodes N [-- …]         a batch file or manifest that trains on N nodes
  spmd plan CONFIG [--FIELD VALUE …]                           sharding of every parameter, and memory per device
       [--all] [--json]                                        … also of gradients and optimizer state; as JSON
       [--topology v5e:16x16]                                  for a machine that is not here; 3 if it does not fit
       [--compile]                                             memory and collectives of the compiled step, by mesh axis
       [--estimate] [--time] [--trace FILE]                    time of a step: closed forms; its compiled schedule
       [--diff CONFIG]                                         difference from another config's plan
       [--schedule] [--svg FILE]                               chart of the pipeline schedule, here and in FILE
  spmd report CONFIG [--topology T] --out FILE.html            a page with charts of a plan, which opens offline
  spmd report RUN [RUN] --out FILE.html                        … of a run, or of two side by side
  spmd search CONFIG --topology v5p:4x4x8                      the fastest layout of a machine: flags to paste
       [--confirm K] [--write FILE]                            … compiling the best K; as a config
       [--days N] [--largest-batch]                            the fewest chips; the largest batch that fits
  spmd check CONFIG [--FIELD VALUE …]                          compare the first steps on the mesh with one device
       [--check-steps N] [--leaves] [--json] [--inject BUG]    … by leaf; as JSON; with a bug that must be found
       [--products 2]                                          … on every axis and every pair of axes, one line for each
  spmd check FILE.py:FUNCTION [--mesh.AXIS SIZE …]             the same for a train step of your own
  spmd eval RUN [--data NAME=SOURCE …] [--json]                loss, perplexity, bits per byte and accuracy, by text
  spmd generate RUN --prompt TEXT [--prompt TEXT …]            text from a trained model, token by token
       [--temperature T] [--top-k K] [--top-p P]               … with these sampling parameters; temperature 0 is greedy
       [--mesh.fsdp 4 …] [--devices N]                         … on another mesh than the run's
  spmd import HF_DIR --out RUN [--mesh.fsdp 4 …]               a run folder from a Hugging Face folder of safetensors
  spmd export RUN --out HF_DIR [--dtype bf16]                  a Hugging Face folder, as `transformers` loads it

CONFIG is a Python file that defines `config = spmd.TrainConfig(...)`, or a shipped one: {names}.
Any field is a flag by its dotted path: --steps 100 --mesh.fsdp 4 --zero 2 --remat full --optimizer.learning-rate 1e-3.
--devices N simulates N CPU devices. `spmd COMMAND --help` lists everything, `spmd --version` the versions.
"""
COMMANDS: Mapping[str, tuple[Callable[[list[str]], int], tuple[Any, ...]]] = {
    "train": (run_train, (TrainCommand,)),
    "launch": (run_launch, (LaunchCommand, TrainCommand)),
    "script": (run_script, (SlurmJob, KubernetesJob, TrainCommand)),
    "plan": (run_plan, (PlanCommand,)),
    "report": (run_report, (ReportCommand, ReportRunCommand)),
    "search": (run_search, (SearchCommand,)),
    "check": (run_check, (CheckCommand, CheckStepCommand)),
    "eval": (run_eval, (EvalCommand,)),
    "generate": (run_generate, (GenerateCommand,)),
    "import": (run_import, (ImportCommand,)),
    "export": (run_export, (ExportCommand,)),
}
"""Name → function, and the dataclasses whose fields are its flags."""
_LONGEST_ERROR = 100
"""Lines of an error on the terminal; the whole of a longer one is written to a file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.excepthook = print_traceback
    end: Callable[[int], NoReturn] = exit_process
    try:
        code, end = _dispatch(arguments), sys.exit
        sys.stdout.flush()
    except SpmdError as error:
        _, commands = COMMANDS.get(arguments[0] if arguments else "", (None, ()))
        _say(f"spmd: {SpmdError(error.title, name_flags(error.problems, commands, arguments))}")
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader, such as `head`, has exited
        code = 141
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fix = "spmd plan CONFIG says what takes the memory, and which settings take less"
        _say(f"spmd: {SpmdError('Out of memory:', [Problem('device', str(error).splitlines()[0], fix=fix)])}")
        code = 2
    except OSError as error:
        if error.errno is None:  # not of the operating system
            raise
        problem = Problem(str(error.filename or "the system"), error.strerror or str(error))
        _say(f"spmd: {SpmdError('A file cannot be read or written:', [problem])}")
        code = 2
    try:
        sys.stdout.flush()
    except OSError:  # nothing may be flushed there at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    end(code)


def _say(text: str) -> None:
    """Write an error to standard error: its first lines, and all of a long one to a file."""
    lines = text.split("\n")
    with contextlib.suppress(OSError):
        if len(lines) > _LONGEST_ERROR:
            more = f"… and {len(lines) - _LONGEST_ERROR:,} more lines"
            with (
                contextlib.suppress(OSError),
                tempfile.NamedTemporaryFile(
                    "w", prefix="spmd-error-", suffix=".txt", delete=False, encoding="utf-8"
                ) as file,
            ):
                file.write(f"{text}\n")
                more += f": see {file.name}"
            text = "\n".join([*lines[:_LONGEST_ERROR], more])
        print(text, file=sys.stderr, flush=True)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(names=", ".join(shipped())), end="")
        return 0 if arguments else 2
    command = arguments[0]
    if command == "--version":
        versions = [f"{name} {library_version(name)}" for name in ("spmd", "jax", "jaxlib", "flax", "optax")]
        print(*versions, f"Python {platform.python_version()}", sep=", ")
        return 0
    if command not in COMMANDS:
        problem = Problem(command, "is an unknown command", fix=did_you_mean(command, COMMANDS))
        raise ConfigError("There is no such command:", [problem])
    run, _ = COMMANDS[command]
    return run(arguments[1:])


if __name__ == "__main__":
    main()
