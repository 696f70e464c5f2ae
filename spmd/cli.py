"""The command line: `spmd train | launch | script | plan | check | generate | import | export`.

Every field of a `TrainConfig` is a flag by its dotted path. Errors that a user can mend are printed without a traceback
and exit with 2; a check that fails exits with 1, and a plan that does not fit its chips with 3.
"""

import os
import sys
from collections.abc import Callable, Sequence

from spmd.commands.check import run_check
from spmd.commands.export_hf import run_export
from spmd.commands.generate import run_generate
from spmd.commands.import_hf import run_import
from spmd.commands.launch import run_launch
from spmd.commands.plan import run_plan
from spmd.commands.script import run_script
from spmd.commands.train import run_train
from spmd.distributed.initialize import exit_process
from spmd.errors import ConfigError, Problem, SpmdError, did_you_mean
from spmd.run.config import shipped

VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": run_train,
    "launch": run_launch,
    "script": run_script,
    "plan": run_plan,
    "check": run_check,
    "generate": run_generate,
    "import": run_import,
    "export": run_export,
}
USAGE = """\
usage: spmd VERB …

  spmd train CONFIG [--out DIR] [--FIELD VALUE …]              train, with checkpoints and metrics in DIR
       [--resume auto]                                         … going on from the newest checkpoint, if there is one
       [--profile 10:15]                                       … tracing these steps
  spmd launch --processes N -- train CONFIG …                  a rehearsal on this machine, in N processes
  spmd script slurm|kubernetes CONFIG --nodes N [-- …]         a batch file or manifest that trains on N nodes
  spmd plan CONFIG [--FIELD VALUE …]                           how every parameter is split, and what a device holds
       [--all] [--json]                                        … and gradients and optimizer state; as JSON
       [--topology v5e:16x16]                                  for a machine that need not be here; 3 if it does not fit
       [--compile]                                             what the compiled step holds and sends over each axis
       [--diff CONFIG]                                         what differs from another config's plan
       [--schedule] [--svg FILE]                               the pipeline's stages over time, drawn here and in FILE
  spmd check CONFIG [--FIELD VALUE …]                          the same steps on the mesh and on one device, compared
       [--check-steps N] [--leaves] [--json] [--inject BUG]    … by leaf; as JSON; with a bug that must be found
       [--products 2]                                          … on every axis and every pair of axes, one line for each
  spmd generate RUN --prompt TEXT [--prompt TEXT …]            text from a trained model, as it is drawn
       [--temperature T] [--top-k K] [--top-p P]               … and how it is drawn; temperature 0 takes the likeliest
       [--mesh.fsdp 4 …] [--devices N]                         … on another mesh than the run's
  spmd import HF_DIR --out RUN [--mesh.fsdp 4 …]               a run folder from a Hugging Face folder of safetensors
  spmd export RUN --out HF_DIR [--dtype bf16]                  the reverse, as `transformers` loads it

CONFIG is a Python file that defines `config = spmd.TrainConfig(...)`, or a shipped one: {names}.
Any field is a flag by its dotted path: --steps 100 --mesh.fsdp 4 --zero 2 --remat full --optimizer.learning-rate 1e-3.
--devices N simulates N CPU devices. `spmd VERB --help` lists everything.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `spmd`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_dispatch(arguments))
    except SpmdError as error:
        print(f"spmd: {error}", file=sys.stderr)
        exit_process(2)
    except KeyboardInterrupt:
        exit_process(130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_process(141)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(names=", ".join(shipped())), end="")
        return 0 if arguments else 2
    if arguments[0] not in VERBS:
        problem = Problem(arguments[0], "is no verb", fix=did_you_mean(arguments[0], VERBS))
        raise ConfigError("There is no such command:", [problem])
    return VERBS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    main()
