"""`spmd eval`."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic

import jax
import tyro

from spmd.checkpoint.manager import CheckpointManager
from spmd.commands.parsing import (
    F,
    LaunchFields,
    StepFlags,
    parse_flags,
    parse_step,
    value_of,
)
from spmd.commands.processes import start_devices
from spmd.data.tokenizer import Tokenizer, load_tokenizer
from spmd.distributed.cluster_env import LaunchArgs
from spmd.distributed.initialize import initialize
from spmd.errors import ConfigError, Problem, check_fields
from spmd.observe.spinner import spin_until_each, spinner
from spmd.observe.wrap_text import wrap_to_terminal
from spmd.plan.plan import ShardingPlan
from spmd.run.build import TrainSetup, config_mesh, evaluation_config, make_setup
from spmd.run.config import TrainConfig
from spmd.run.evaluate import (
    Evaluation,
    PairEvaluation,
    evaluate,
    evaluate_batches,
    evaluate_pairs,
    held_out_sets,
    open_sets,
    with_stride,
)
from spmd.run.lm_eval_tasks import TaskModel, TaskOptions, evaluate_tasks, open_tasks
from spmd.run.load_params import restore_model
from spmd.run.open_text import find_chat_template, open_text_dataset
from spmd.run.preflight import check_microbatches
from spmd.run.reference import find_references, pairs_with_reference
from spmd.run.run_dir import RunDir
from spmd.run.step_source import ConfigSource, load_source, shape_problems
from spmd.sharding.mesh import MeshShape, mesh_of
from spmd.storage.address import locate
from spmd.training.evaluated_params import plan_evaluation_point
from spmd.training.state import ModelState


@dataclasses.dataclass(frozen=True)
class EvalCommand:
    """Evaluate a trained model: loss, perplexity, bits per byte and accuracy, on any mesh; of pairs
    of answers, loss and rewards.

    Without --data, on the validation split of the run.
    """

    run: tyro.conf.Positional[str]
    """Run directory, such as runs/demo."""
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to evaluate on, SOURCE or NAME=SOURCE, as in --data.source of a config."""
    tokens: int = 0
    """Evaluate on about this many tokens of each set; 0 for all."""
    batch: int | None = None
    """Sequences per batch; by default as in the run."""
    step: int | None = None
    """Checkpoint to load; the newest by default."""
    trained: bool = False
    """Evaluate the trained parameters, where the run evaluates others, such as an average."""
    mesh: MeshShape = MeshShape()
    """Size of each mesh axis; by default the run's. For one device: --mesh.fsdp -1 --devices 1."""
    devices: int | None = None
    """Simulate this many CPU devices (0: use the real ones); by default as in the run."""
    json: bool = False
    """Print one JSON object for each set or task."""
    launch_args: LaunchFields = LaunchArgs()
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, such as arc_easy hellaswag, instead of texts: pip install 'spmd[lm-eval]'."""
    task_folder: tuple[str, ...] = ()
    """Folders with task files of your own."""
    fewshot: int | None = None
    """Examples before each question; by default as the task says."""
    limit: int | None = None
    """Documents of each task; all by default."""
    chat: bool = False
    """Write the prompts of tasks by the chat template."""
    stride: int = 0
    """Begin windows of text every so many tokens, so that each token has more context; 0: every
    window where the last one ends."""


@dataclasses.dataclass(frozen=True)
class EvalStepCommand(Generic[F]):
    """Evaluate a run of your own train step: the means of its loss function over the batches of FILE.

    FILE defines make(mesh, **settings), which returns the step and a list of batches; a setting
    such as --split chooses which.
    """

    run: tyro.conf.Positional[str]
    """Run directory."""
    flags: StepFlags[F]
    step: int | None = None
    """Checkpoint to load; the newest by default."""
    trained: bool = False
    """Evaluate the trained parameters, where the run evaluates others, such as an average."""
    json: bool = False
    """Print one JSON object."""
    launch_args: LaunchFields = LaunchArgs()


def run_eval(arguments: list[str]) -> int:
    """Print the figures and return the exit code."""
    names = list(itertools.takewhile(lambda each: not each.startswith("-"), arguments))
    if len(names) == 2:
        return _eval_step(names[0], names[1], arguments[2:])
    command: EvalCommand = parse_flags(EvalCommand, arguments, "spmd eval")
    limits = {"tokens": "at least 0", "batch": "at least 1"}
    limits |= {"fewshot": "at least 0", "limit": "at least 1", "stride": "at least 0"}
    problems = check_fields(command, limits) + _without_effect(command)
    if problems:
        raise ConfigError("Nothing can be evaluated:", problems)
    run_dir = RunDir(locate(command.run))
    config = _override(command, run_dir.config())
    start_devices(config.devices, command)
    plain = evaluation_config(config)
    setup = make_setup(plain, config_mesh(config))
    check_microbatches(setup)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if command.tasks:
        return _eval_tasks(command, config, setup, run_dir, tokenizer)
    with spinner("reading the text"):
        if command.data:
            sets = open_sets(config, command.data, tokenizer, "--data")
        else:
            sets = held_out_sets(open_text_dataset(config))
    if command.stride:
        sets = with_stride(sets, command.stride)
    pairs = pairs_with_reference(part for each in sets for part in each.parts)
    if pairs:
        with spinner("finding log-probabilities of the reference model"):
            rows = math.ceil(command.tokens / config.data.sequence)
            find_references(setup, pairs, run_dir.fetch_reference(), rows)
    model, step = _restore(command, run_dir, setup.plan)
    if config.task == "dpo":
        of_pairs = evaluate_pairs(setup, model, sets, command.tokens)
        pair_results = list(spin_until_each(of_pairs, "evaluating"))
        _print(command, pair_results, _title(command, step, setup), _rows_of_pairs(pair_results))
        return 0
    results = evaluate(setup, model, sets, tokenizer, command.tokens)
    found = list(spin_until_each(results, "evaluating"))
    title = f"{_title(command, step, setup)}; losses in nats per token"
    _print(command, found, title, _rows_of_texts(found))
    return 0


def _restore(
    command: EvalCommand | EvalStepCommand[Any], run_dir: RunDir, plan: ShardingPlan
) -> tuple[ModelState, int | None]:
    """Return the model of the command's checkpoint, and its step."""
    with (
        spinner("restoring a checkpoint"),
        CheckpointManager(run_dir.checkpoints, read_only=True) as checkpoints,
    ):
        model = restore_model(checkpoints, command.step, plan, trained=command.trained)
        step = command.step
        if step is None:
            step = checkpoints.latest()
    return model, step


def _without_effect(command: EvalCommand) -> list[Problem]:
    """Return a problem for each flag of tasks without tasks, and of texts beside tasks."""
    of_texts = ("data", "tokens", "stride")
    of_tasks = ("task_folder", "fewshot", "limit", "chat")
    names: tuple[str, ...] = of_tasks
    what, fix = "is for tasks", "--tasks NAME"
    if command.tasks:
        names = of_texts
        what, fix = "is for texts, and --tasks is given", "leave out one of them"
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    problems = list[Problem]()
    for name in names:
        if getattr(command, name) != defaults[name]:
            problems.append(Problem(f"--{name.replace('_', '-')}", what, fix=fix))
    return problems


def _eval_tasks(
    command: EvalCommand,
    config: TrainConfig,
    setup: TrainSetup,
    run_dir: RunDir,
    tokenizer: Tokenizer,
) -> int:
    """Print the figures of tasks and return the exit code."""
    template = None
    if command.chat:
        template = find_chat_template(config, tokenizer)
    options = TaskOptions(
        command.tasks, command.task_folder, command.fewshot, command.limit, command.chat
    )
    with spinner("reading the tasks"):
        loaded = open_tasks(options)
    model, step = _restore(command, run_dir, setup.plan)
    with spinner("evaluating"):
        found = evaluate_tasks(TaskModel(setup, model, tokenizer, template), options, loaded)
    if command.json:
        for name, figures in found.items():
            print(json.dumps({"task": name, **figures}, default=str))
        return 0
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "± standard error")]
    for name, figures in found.items():
        rows += _rows_of_task(name, figures)
    print(wrap_to_terminal(_table(_title(command, step, setup), rows)))
    return 0


def _rows_of_task(name: str, figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each metric of a task."""
    for key, value in figures.items():
        metric, _, filtered = key.partition(",")
        if metric.endswith("_stderr") or not isinstance(value, float):
            continue
        error = figures.get(f"{metric}_stderr,{filtered}")
        shown = ""
        if isinstance(error, float):
            shown = f"{error:.4f}"
        if filtered not in ("", "none"):
            metric = f"{metric} ({filtered})"
        yield name, metric, f"{value:.4f}", shown


def _eval_step(run: str, file: str, flags: list[str]) -> int:
    """Evaluate a run with the step and the batches of a file."""
    devices = value_of("--devices", flags)
    if devices.isdigit():  # before the file is executed, which may use them
        initialize(int(devices))
    loaded = load_source(file)
    if isinstance(loaded, ConfigSource):
        problem = Problem(file, "has a config, and a run its own", fix=f"spmd eval {run}")
        raise ConfigError("Nothing can be evaluated:", [problem])
    parsed = parse_step(EvalStepCommand, loaded, [run, *flags], f"spmd eval {file}")
    command, source = parsed
    start_devices(source.devices, command)
    step, batches = source.make_on(mesh_of(source.shape, jax.devices()))
    problems = shape_problems(batches)
    if problems:
        raise ConfigError("Nothing can be evaluated:", problems)
    model, number = _restore(command, RunDir(locate(run)), step.plan)
    with spinner(f"evaluating {len(batches)} batches"):
        found = evaluate_batches(step, model, batches)
    if command.json:
        print(json.dumps({"step": number, **found}))
        return 0
    print(f"{run}, step {number}, {len(batches)} batches of {file}")
    for name, value in found.items():
        print(f"{name:<15} {value:.6g}")
    return 0


def _override(command: EvalCommand, config: TrainConfig) -> TrainConfig:
    """Return the run's config on the mesh and with the batch of the command."""
    if command.devices is not None:
        config = dataclasses.replace(config, devices=command.devices)
    if command.mesh != MeshShape():
        config = dataclasses.replace(config, mesh=command.mesh, slices=MeshShape())
    if command.batch is not None:
        data = dataclasses.replace(config.data, batch=command.batch)
        config = dataclasses.replace(config, data=data, accumulate=1)
    return config


def _title(command: EvalCommand, step: int | None, setup: TrainSetup) -> str:
    parts = [command.run, f"step {step}"]
    if not command.trained:
        point = plan_evaluation_point(setup.plan).name
        if point:
            parts.append(point)
    return ", ".join(parts)


def _print(
    command: EvalCommand,
    found: Sequence[Evaluation] | Sequence[PairEvaluation],
    title: str,
    rows: Sequence[tuple[str, ...]],
) -> None:
    """Print JSON, or a table with a title."""
    if command.json:
        lines = [json.dumps(each.to_json()) for each in found]
        print("\n".join(lines))
    else:
        print(wrap_to_terminal(_table(title, rows)))


def _rows_of_pairs(found: Sequence[PairEvaluation]) -> list[tuple[str, ...]]:
    """Return the head of a table, and a row for each set of pairs."""
    rows: list[tuple[str, ...]] = [
        ("set", "loss", "preferred", "margin", "chosen reward", "rejected reward", "pairs")
    ]
    for each in found:
        means = each.means
        row = (
            each.name,
            f"{means['loss']:.4f}",
            f"{means['reward_accuracy']:.1%}",
            f"{means['reward_margin']:.4f}",
            f"{means['chosen_reward']:.4f}",
            f"{means['rejected_reward']:.4f}",
            f"{each.pairs:,}",
        )
        rows.append(row)
    return rows


def _rows_of_texts(found: Sequence[Evaluation]) -> list[tuple[str, ...]]:
    """Return the head of a table, and a row for each text."""
    rows: list[tuple[str, ...]] = [("set", "loss", "perplexity", "bits/byte", "accuracy", "tokens")]
    for each in found:
        row = (
            each.name,
            f"{each.loss:.4f}",
            f"{each.perplexity:.4g}",
            f"{each.bits_per_byte:.4f}",
            f"{each.accuracy:.2%}",
            f"{each.tokens:,.0f}",
        )
        rows.append(row)
    return rows


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    """Return a line for each row; columns are as wide as their longest cell."""
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    lines = [f"{title}\n"]
    for name, *figures in rows:
        cells = [name.ljust(widths[0])]
        for figure, width in zip(figures, widths[1:], strict=True):
            cells.append(figure.rjust(width))
        lines.append("  ".join(cells))
    return "\n".join(lines)
