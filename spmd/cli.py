"""The command line: `spmd train | plan | check | generate`.

Every field of a `TrainConfig` is a flag by its dotted path. Errors that a user can mend are printed without a traceback
and exit with 2; a check that fails exits with 1, and a plan that does not fit its chips with 3.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal

import jax
import tyro

from spmd import launch
from spmd.check import Check, Sweep, axes_text
from spmd.checkpoint import Checkpoints
from spmd.config import M, TrainConfig, load_config, shipped
from spmd.data import bigram_loss
from spmd.errors import ConfigError, Problem, SpmdError, did_you_mean
from spmd.foresight.collectives import CollectiveAudit
from spmd.foresight.memory import CATEGORIES, Ledger
from spmd.foresight.timeline import chart, to_json, write_svg
from spmd.foresight.topology import missing_extra, parse_topology
from spmd.gradients.lockstep import how_executed
from spmd.gradients.simulate import simulate
from spmd.metrics import Console, device_memory
from spmd.recipe import Recipe, config_mesh, planned_mesh, topology_mesh
from spmd.run import RunFolder, train, write_sample
from spmd.state import abstract_state
from spmd.tree import human_bytes

USAGE = """\
usage: spmd VERB …

  spmd train CONFIG [--out DIR] [--resume] [--FIELD VALUE …]   train, with checkpoints and metrics in DIR
  spmd plan CONFIG [--FIELD VALUE …]                           how every parameter is split, and what a device holds
       [--all] [--json]                                        … and gradients and optimizer state; as JSON
       [--topology v5e:16x16]                                  for a machine that need not be here; 3 if it does not fit
       [--compile]                                             what the compiled step holds and sends over each axis
       [--diff CONFIG]                                         what differs from another config's plan
       [--schedule] [--svg FILE]                               the pipeline's stages over time, drawn here and in FILE
  spmd check CONFIG [--FIELD VALUE …]                          the same steps on the mesh and on one device, compared
       [--check-steps N] [--leaves] [--json] [--inject BUG]    … by leaf; as JSON; with a bug that must be found
       [--products 2]                                          … on every axis and every pair of axes, one line for each
  spmd generate RUN --prompt TEXT                              text from a trained model

CONFIG is a Python file that defines `config = spmd.TrainConfig(...)`, or a shipped one: {names}.
Any field is a flag by its dotted path: --steps 100 --mesh.fsdp 4 --zero 2 --remat full --optimizer.learning-rate 1e-3.
--devices N simulates N CPU devices. `spmd VERB --help` lists everything.
"""

_Config = Annotated[TrainConfig[M], tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True)
class TrainCommand(Generic[M]):
    """Trains a model and keeps everything about it in a run folder.

    Metrics go to the terminal and to DIR/metrics.jsonl, checkpoints to DIR/checkpoints. A folder that holds a run is
    refused without --resume, which goes on bitwise as if the run had never stopped.
    """

    config: _Config
    resume: bool = False
    """Go on from the newest checkpoint in the run folder."""
    coordinator: str = ""
    """HOST:PORT of process 0, when several processes train together."""
    processes: int = 1
    """How many processes train together."""
    process_id: int = 0
    """The number of this process, from 0."""


@dataclasses.dataclass(frozen=True)
class PlanCommand(Generic[M]):
    """Shows how every parameter is split, one line for each parameter, and what each device holds during a step.

    Nothing is allocated and no device is needed: a plan for 16,384 chips takes seconds on a laptop.
    """

    config: _Config
    all: bool = False
    """Print a line for each gradient and each leaf of the optimizer's state, too."""
    json: bool = False
    """Print one JSON object with a record for each parameter, gradient and leaf of the optimizer's state."""
    topology: str = ""
    """The machine that is planned for, such as v5e:16x16, h100:16x8 or cpu:8; it need not be here."""
    diff: str = ""
    """Print what differs from the plan of another config: lines of this plan with -, of the other with +."""
    schedule: bool = False
    """Draw what each stage of the pipeline does over time, and write the picture to a file."""
    svg: str = "schedule.svg"
    """The file of that picture; empty for none."""
    compile: bool = False
    """Compile the step, print what its collectives send, by axis and by source, and its memory as compiled."""


@dataclasses.dataclass(frozen=True)
class CheckCommand(Generic[M]):
    """Takes the same steps on the config's mesh and on one device, and compares initial parameters, losses, gradients
    and parameters leaf by leaf. Exits with 1 if any differs by more than is allowed.
    """

    config: _Config
    check_steps: int = 3
    """How many steps to take."""
    leaves: bool = False
    """Print a line for every leaf, not only for the worst of each kind."""
    json: bool = False
    """Print one JSON object with a record for every leaf."""
    products: int = 0
    """Instead of the config's mesh, check each axis alone, each pair of axes, and so on up to products of so many axes,
    each of size 2: a line for each, and for each that the config cannot run on, why."""
    inject: Literal["", "reduction", "token-weight", "gradient-scale"] = ""
    """Put a bug into the run on the mesh, which the check must find: gradients summed over half of the examples,
    padding that counts, gradients 1 % too large."""


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Writes text with a trained model, on the mesh it was trained on."""

    run: tyro.conf.Positional[str]
    """The run folder, such as runs/demo."""
    prompt: str
    """What to go on from."""
    tokens: int | None = None
    """How many tokens to add; by default 200, or as many as the model was trained to see."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 samples the model's own distribution."""
    top_k: int = 40
    """Draw among the k likeliest tokens; 0 for all."""
    seed: int = 0
    """Of the draws."""
    step: int | None = None
    """The checkpoint to use; the newest by default."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `spmd`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_dispatch(arguments))
    except SpmdError as error:
        print(f"spmd: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _dispatch(arguments: list[str]) -> int:
    verbs: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "plan": _plan,
        "check": _check,
        "generate": _generate,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(names=", ".join(shipped())), end="")
        return 0 if arguments else 2
    if arguments[0] not in verbs:
        problem = Problem(arguments[0], "is no verb", fix=did_you_mean(arguments[0], verbs))
        raise ConfigError("There is no such command:", [problem])
    return verbs[arguments[0]](arguments[1:])


def _parse(command: Any, arguments: list[str], verb: str) -> tuple[Any, Path]:
    """The command with its config, and the config's file."""
    named = bool(arguments) and not arguments[0].startswith("-")
    if not named and not {"-h", "--help"} & set(arguments):
        problem = Problem("CONFIG", "comes first", fix=f"a Python file, or one of: {', '.join(shipped())}")
        raise ConfigError(f"spmd {verb} CONFIG needs a config:", [problem])
    name = arguments[0] if named else "demo"
    config = load_config(name)
    parsed = tyro.cli(
        command[type(config.model)],
        args=arguments[1:] if named else arguments,
        default=command(config),
        prog=f"spmd {verb} {name if named else 'CONFIG'}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return parsed, shipped().get(name, Path(name))


def _train(arguments: list[str]) -> int:
    command, source = _parse(TrainCommand, arguments, "train")
    config: TrainConfig = command.config
    folder = RunFolder(Path(config.out or f"runs/{source.stem.replace('_', '-')}"))
    folder.check_use(resume=command.resume)
    launch.start(launch.Launch(config.devices, command.coordinator, command.processes, command.process_id))
    recipe = Recipe(config, config_mesh(config))
    recipe.audit()
    first = jax.process_index() == 0
    show: Callable[[str], None] = print if first else lambda line: None
    corpus = recipe.corpus
    show(f"{recipe.plan}{recipe.pipeline_line}")
    show(
        f"\ncorpus: {corpus.documents:,} documents, {len(corpus.train):,} tokens to train on, "
        f"{len(corpus.validation):,} held out\n"
    )
    console = Console(config.steps) if first else None
    outcome = train(recipe, folder, source, console, resume=command.resume)
    if console and outcome.steps:
        tokens = outcome.steps * config.data.batch * config.data.sequence
        console.summary(
            steps=outcome.steps,
            seconds=outcome.seconds,
            tokens=tokens,
            loss=outcome.loss,
            flops=recipe.flops,
            mfu=outcome.mfu,
            memory=device_memory(),
        )
    if outcome.val_loss is not None:
        show(f"\nvalidation loss {outcome.val_loss:.3f} nats/token over {outcome.val_tokens:,} tokens")
        if recipe.tokenizer.vocab <= 256:
            show(f"                {_bigram(recipe):.3f} for a bigram count model of the same corpus")
    show(f"checkpoint      {folder.checkpoints}/{outcome.checkpoint}")
    show(f"metrics         {folder.metrics}")
    if config.sample.prompt:
        options = dataclasses.asdict(config.sample)
        text = write_sample(recipe, outcome.state, options.pop("prompt"), seed=config.seed, **options)
        show(f"\nsample at temperature {config.sample.temperature}, top-k {config.sample.top_k}:\n{text}")
    return 0


def _bigram(recipe: Recipe) -> float:
    corpus, config = recipe.corpus, recipe.config
    return bigram_loss(corpus.train, corpus.validation[: config.evaluate.tokens + 1], recipe.tokenizer.vocab)


def _plan(arguments: list[str]) -> int:
    command, _ = _parse(PlanCommand, arguments, "plan")
    chosen = [name for name in ("all", "diff", "compile", "schedule") if getattr(command, name)]
    if len(chosen) > 1:
        problems = [Problem(f"--{name}", "is one of several views", fix="ask for one of them") for name in chosen]
        raise ConfigError("A plan has one view at a time:", problems)
    config = command.config
    if command.topology:
        topology = parse_topology(command.topology)
        config = dataclasses.replace(config, devices=topology.devices)
    recipe = Recipe(config, planned_mesh(config))
    topology = topology if command.topology else parse_topology(f"cpu:{recipe.mesh.size}")
    if command.schedule:
        return _print_schedule(command, recipe)
    recipe.audit()
    if command.diff:
        other = load_config(command.diff)
        difference = recipe.plan.diff(Recipe(other, planned_mesh(other)).plan)
        lines = difference.split("\n") if difference else []
        print(json.dumps(lines, indent=2) if command.json else difference or "the plans are the same")
        return 0
    ledger, audit, refused = Ledger(topology, recipe.memory(topology.platform)), None, ""
    absent = missing_extra(topology) if command.compile else None
    if command.compile and not absent:
        simulated = topology.devices if topology.platform == "cpu" else 0
        launch.start(launch.Launch(simulated, absent="" if simulated else topology.platform))
        try:
            audit, compiled = Recipe(config, topology_mesh(config, topology)).compile()
            ledger = dataclasses.replace(ledger, compiled=compiled)
        except MemoryError as error:
            refused = str(error)
    _print_plan(command, recipe, ledger, audit, refused)
    if absent:
        print(SpmdError("The step was not compiled:", [absent]), file=sys.stderr)
        return 2
    return 3 if refused or ledger.fits is False else 0


def _print_schedule(command: PlanCommand, recipe: Recipe) -> int:
    """The pipeline over time, and whether and how it is executed."""
    if recipe.stages == 1:
        problem = Problem("mesh.pipe", "is 1: there are no stages", fix="--mesh.pipe 4")
        raise ConfigError("There is no schedule to draw:", [problem])
    timeline = simulate(recipe.pipeline)
    execution = how_executed(recipe.pipeline)
    if command.svg:
        write_svg(timeline, command.svg)
    if command.json:
        print(json.dumps({**to_json(timeline), "execution": execution, "svg": command.svg or None}, indent=2))
        return 0
    print(chart(timeline))
    print(execution)
    if command.svg:
        print(f"written to {command.svg}")
    return 0


def _print_plan(
    command: PlanCommand, recipe: Recipe, ledger: Ledger, audit: CollectiveAudit | None, refused: str
) -> None:
    """The plan and its ledger, or what is sent and the ledger; and what would fit, where it does not."""
    fits = False if refused else ledger.fits
    settings = recipe.fitting(ledger.topology) if fits is False else []
    if command.json:
        memory = {**ledger.to_json(), "fits": fits}
        if fits is False:
            memory |= {"blame": ledger.blame, "would_fit": [{"flags": f, "total": n} for f, n in settings]}
        about = {"pipeline": recipe.pipeline_line.strip() or None, "topology": str(ledger.topology)}
        record = {**recipe.plan.to_json(), **about, "memory": memory, "fits": fits}
        print(json.dumps(record | (audit.to_json() if audit else {}), indent=2))
        return
    tables = ("params", "variables", "gradients", "optimizer_state") if command.all else ("params", "variables")
    print(audit if audit else recipe.plan.text(*tables), end=f"{recipe.pipeline_line}\n")
    print(f"\nmemory of one device, {ledger.topology}\n{ledger}")
    if refused:
        print(f"\nthe compiler refuses: {refused}")
    if fits is False:
        print(f"\nDOES NOT FIT: most of it is {CATEGORIES[ledger.blame]}")
        for flags, total in settings:
            print(f"  {human_bytes(total)} with {flags}")
        if not settings:
            print("  nothing was found that fits: more devices, or a smaller batch")


def _check(arguments: list[str]) -> int:
    command, _ = _parse(CheckCommand, arguments, "check")
    config: TrainConfig = command.config
    problems = []
    if command.check_steps < 1:
        problems.append(Problem("check-steps", f"is {command.check_steps}", fix="1 or more"))
    if command.products < 0:
        problems.append(Problem("products", f"is {command.products}", fix="how many axes to combine, such as 2"))
    if command.products and command.leaves:
        problems.append(Problem("leaves", "shows one mesh", fix="--mesh.AXIS sizes instead of --products"))
    if problems:
        raise ConfigError("Nothing to check:", problems)
    launch.start(launch.Launch(config.devices))
    check = Check(config, command.check_steps)
    return _check_products(command, check) if command.products else _check_mesh(command, check)


def _check_mesh(command: CheckCommand, check: Check) -> int:
    """The config's own mesh, leaf by leaf."""
    mesh = config_mesh(check.config)
    parity = check.compare(mesh, command.inject)
    if command.json:
        about = {"mesh": dict(mesh.shape), "steps": check.steps, "precision": check.config.precision}
        print(json.dumps({**about, "injected": command.inject or None, **parity.to_json()}, indent=2))
        return 0 if parity.ok else 1
    print(f"{axes_text(mesh.shape)} against one device, {check};")
    print("differences relative to the largest value of each leaf:")
    print(parity.lines(parity.rows) if command.leaves else parity)
    print(f"allowed because {parity.tolerance.why}")
    for number, (loss, alone) in enumerate(zip(parity.losses, parity.reference_losses, strict=True), 1):
        print(f"step {number}: loss {loss:.7f} on the mesh, {alone:.7f} on one device")
    if command.inject:
        found = "THE INJECTED BUG WENT UNNOTICED" if parity.ok else "the layouts differ: the injected bug was found"
        print(f"{command.inject}: {found}")
    else:
        print("the layouts agree" if parity.ok else "THE LAYOUTS DIFFER")
    return 0 if parity.ok else 1


def _check_products(command: CheckCommand, check: Check) -> int:
    """Every product of so many axes; a line for each is printed as soon as it is known."""
    sweep = Sweep(check, command.products, command.inject)
    for line in sweep.lines():
        if not command.json:
            print(line, flush=True)
    if command.json:
        about = {"steps": check.steps, "precision": check.config.precision, "injected": command.inject or None}
        print(json.dumps({**about, **sweep.to_json()}, indent=2))
    return 0 if sweep.ok else 1


def _generate(arguments: list[str]) -> int:
    command = tyro.cli(GenerateCommand, args=arguments, prog="spmd generate")
    folder = RunFolder(Path(command.run))
    config = folder.config()
    launch.start(launch.Launch(config.devices))
    recipe = Recipe(config, config_mesh(config))
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        state, _ = checkpoints.restore(command.step, abstract_state(recipe.plan))
    room = config.data.sequence - len(recipe.tokenizer.encode(command.prompt))
    print(
        write_sample(
            recipe,
            state,
            command.prompt,
            tokens=max(min(200, room), 0) if command.tokens is None else command.tokens,
            temperature=command.temperature,
            top_k=command.top_k,
            seed=command.seed,
        )
    )
    return 0


if __name__ == "__main__":
    main()
