"""`spmd import`."""

import contextlib
import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from spmd import tree
from spmd.checkpoint.manager import CheckpointManager
from spmd.checkpoint.versions import library_versions
from spmd.commands.parsing import LaunchFields, parse_flags
from spmd.commands.processes import start_devices
from spmd.data.loader import DataConfig
from spmd.data.tokenizer import TOKENIZER
from spmd.distributed.cluster_env import LaunchArgs
from spmd.errors import CheckpointError, Problem
from spmd.hf.family import families
from spmd.hf.fields import collect_errors
from spmd.hf.folder import CONFIG, HFFolder, inside, open_folder
from spmd.hf.load import check_published, load_model
from spmd.hf.save import shared_folder
from spmd.hf.sidecar_files import ORIGINAL, files_of, tokenizer_problems
from spmd.model_interface.model import PRNG
from spmd.model_interface.model_config import HasVocab, context_of
from spmd.resilience.lease_files import FOLDER
from spmd.run.build import TrainSetup, config_mesh, make_setup
from spmd.run.config import TrainConfig, config_values
from spmd.run.run_dir import IMPORTED, RunDir
from spmd.sharding.mesh import MeshShape
from spmd.sharding.optimizer_state import ZeroStage
from spmd.storage.address import Location, address_of, locate
from spmd.storage.bucket import Bucket
from spmd.tree import with_noun

_DEFAULT_SEQUENCE = 2048
_PATIENCE = 30.0
"""Seconds until a bucket that does not answer is an error, before anything is read."""


@dataclasses.dataclass(frozen=True)
class ImportCommand:
    """Create a run folder from a Hugging Face folder: sharded parameters, tokenizer and config.

    Only safetensors are read. All files are checked first: an error lists all problems, and nothing
    is written.
    """

    folder: tyro.conf.Positional[str]
    """Folder with config.json and safetensors files, or a gs:// or s3:// path of one."""
    out: str
    """Run folder, or a gs:// or s3:// path; it must not exist."""
    mesh: MeshShape = MeshShape(fsdp=-1)
    """Size of each mesh axis; one may be -1."""
    zero: ZeroStage = 3
    """ZeRO stage: parameters are sharded over fsdp and sequence at 3."""
    precision: Literal["float32", "bf16", "bf16-params", "fp32", "bfloat16"] = "float32"
    """float32; bf16: compute in it; bf16-params: also store parameters in it. bfloat16 is bf16, and
    fp32 is float32."""
    sequence: int = 0
    """Sequence length for training and generation (0: the model's context length, at most 2048)."""
    devices: int = 0
    """Simulate this many CPU devices (0: use the real ones)."""
    launch_args: LaunchFields = LaunchArgs()


def run_import(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    command: ImportCommand = parse_flags(ImportCommand, arguments, "spmd import")
    began = time.perf_counter()
    source = _absolute(locate(command.folder))
    out = locate(command.out)
    start_devices(command.devices, command)
    with _checked(command, source, out) as (found, setup):
        plan = setup.plan
        params, variables = load_model(found, plan.abstract_params, plan.abstract_variables)
        state = {"params": params, "variables": tree.merge(_variables(setup), variables)}
        with _new_run(out) as run:
            _write_run(run, address_of(source), found, setup, state)
    if jax.process_index() != 0:
        return 0
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    took = time.perf_counter() - began
    config_file = address_of(out / "config.py")
    place = address_of(out)
    print(
        f"{found.family.architectures[0]}: {tree.size(params):,} parameters, "
        f"{tree.human_bytes(size)}, in {took:.3g} s\n"
        f"generate         spmd generate {place} --prompt …\n"
        f"fine-tune        spmd train {config_file} --init {place} --data.source FILES --out …"
    )
    if not (found.path / TOKENIZER).exists():
        print(f"tokenizer        none: the folder has no {TOKENIZER}, so text is encoded as bytes")
    return 0


@dataclasses.dataclass(frozen=True)
class _NewRun:
    """Folder of an imported run.

    Attributes:
        folder: Local folder of its files.
        checkpoints: Its checkpoints, open for writing.
    """

    folder: Path
    checkpoints: CheckpointManager


@contextlib.contextmanager
def _new_run(out: Location) -> Iterator[_NewRun]:
    """Make a run folder, complete or not at all.

    In a bucket, it is a run from the moment that the checkpoint exists, which comes last.
    """
    if isinstance(out, Path):
        with (
            shared_folder(out) as folder,
            CheckpointManager(folder / "checkpoints") as checkpoints,
        ):
            yield _NewRun(folder, checkpoints)
        return
    run_dir = RunDir(out)
    with run_dir.lease(resume=False, take_over=False) as lease, run_dir.uploads(lease):
        checkpoints = CheckpointManager(
            run_dir.checkpoints,
            before_write=lease.renew,
            owner=lease.number,
            say=lease.show,
            before_commit=functools.partial(run_dir.upload_all, lease),
        )
        with checkpoints:
            yield _NewRun(run_dir.path, checkpoints)


def _write_run(
    run: _NewRun, source: str, found: HFFolder, setup: TrainSetup, state: dict[str, Any]
) -> None:
    """Write the config, the published files and a checkpoint of step 0 into a folder.

    Process 0 writes the files, and each process its shards of the checkpoint.
    """
    if jax.process_index() == 0:
        _write_files(run.folder, source, found, setup)
    record = {
        "step": 0,
        IMPORTED: source,
        "config": config_values(setup.config),
        "versions": library_versions(),
    }
    run.checkpoints.save(0, state, record, copied=False)


def _write_files(folder: Path, source: str, found: HFFolder, setup: TrainSetup) -> None:
    """Write the config and the published files into a folder."""
    config_file = folder / "config.py"
    config_file.write_text(config_source(setup.config, source, found), encoding="utf-8")
    files = files_of(found.path)
    files[ORIGINAL] = inside(found.path, CONFIG)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)
    RunDir(folder).describe(setup.config, config_file, str(setup.plan))


@contextlib.contextmanager
def _checked(
    command: ImportCommand, source: Location, out: Location
) -> Iterator[tuple[HFFolder, TrainSetup]]:
    """Open the folder and build its model.

    Raises:
        CheckpointError: All problems of the folder, the tokenizer, the mesh and `out`.
    """
    problems = _out_problems(out)
    with contextlib.ExitStack() as stack:
        found: HFFolder | None = None
        setup: TrainSetup | None = None
        with collect_errors(problems):
            found = stack.enter_context(open_folder(source))
        folder = _files_beside(source, found)
        if folder is not None:
            vocab = None
            if found is not None and isinstance(found.config, HasVocab):
                vocab = found.config.vocab
            problems += tokenizer_problems(folder, vocab)
        with collect_errors(problems):
            if found is not None:
                config = _config(command, found, out)
                setup = make_setup(config, config_mesh(config))
                plan = setup.plan
                check_published(found, plan.abstract_params, plan.abstract_variables)
        if problems or found is None or setup is None:
            raise CheckpointError("Nothing was imported:", problems)
        yield found, setup


def _out_problems(out: Location) -> list[Problem]:
    """Return why no run can be made at a place."""
    fix = "choose another --out"
    problems: list[Problem] = []
    if isinstance(out, Path):
        if out.exists():
            problems.append(Problem(str(out), "exists", fix=fix))
        return problems
    with collect_errors(problems):
        objects = Bucket(out, print, _PATIENCE).list()
        is_of_run = any(name.startswith(f"{FOLDER}/") for name in objects)
        if objects and not is_of_run:
            more = f"{with_noun(len(objects), 'object')}, the first {objects[0]}"
            problems.append(Problem(str(out), "exists", more, fix))
        elif objects and RunDir(out).has_run:  # otherwise an import has failed there
            problems.append(Problem(str(out), "contains a run", fix=fix))
        elif Bucket(out.parent, print, _PATIENCE).exists(out.name):
            problems.append(Problem(str(out), "is an object", fix=fix))
    return problems


def _files_beside(source: Location, found: HFFolder | None) -> Path | None:
    """Return the local folder of the files beside the weights; None if there is none."""
    if found is not None:
        return found.path
    if isinstance(source, Path) and source.is_dir():
        return source
    return None


def _absolute(location: Location) -> Location:
    if isinstance(location, Path):
        return location.absolute()
    return location


def _config(command: ImportCommand, found: HFFolder, out: Location) -> TrainConfig:
    tokenizer = DataConfig.tokenizer
    if (found.path / TOKENIZER).exists():
        tokenizer = address_of(_absolute(out / TOKENIZER))
    sequence = command.sequence or min(_context(found), _DEFAULT_SEQUENCE)
    return TrainConfig(
        model=found.config,
        rules=found.family.rules(found.config),
        mesh=command.mesh,
        zero=command.zero,
        precision=command.precision,
        data=DataConfig(tokenizer=tokenizer, sequence=sequence),
        devices=command.devices,
    )


def _context(found: HFFolder) -> int:
    """Return the context length of a model, or a default if it has none."""
    context = found.values.get("max_position_embeddings")
    if context_of(found.config) is not None:
        context = context_of(found.config)
    if isinstance(context, int) and context > 0:
        return context
    return _DEFAULT_SEQUENCE


def _variables(setup: TrainSetup) -> Any:
    """Return the model's initial variables besides its parameters; most models have none."""
    abstract = setup.plan.abstract_variables
    if not jax.tree.leaves(abstract):
        return {}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(setup.plan.model.init_variables, out_shardings=shardings)
    return make(jax.random.key(0, impl=PRNG))


def config_source(config: TrainConfig, source: str, found: HFFolder) -> str:
    """Return the source of an imported model's config.py, with all fields unlike the defaults.

    Args:
        source: Where the model was imported from.
    """
    architecture = found.values["architectures"][0]
    docstring = json.dumps(f"{architecture}, imported from {source}.")
    lines = [
        docstring,
        "",
        "import spmd",
        *_import_lines(config.model),
        "",
        f"model = {_source(config.model)}",
        "config = spmd.TrainConfig(",
        "    model=model,",
        f"    rules=families()[{json.dumps(_family_name(found))}].rules(model),",
    ]
    for name, value in _changed(config).items():
        if name not in ("model", "rules"):
            lines.append(f"    {name}={_source(value, 'spmd.')},")
    lines.append(")")
    return "\n".join(lines) + "\n"


def _family_name(found: HFFolder) -> str:
    return next(name for name, family in families().items() if family is found.family)


def _import_lines(model: Any) -> list[str]:
    """Return the imports of a model's classes and of `families`, other packages first."""
    ours = {"from spmd.hf.family import families"}
    others = set()
    for kind in _classes(model):
        line = f"from {kind.__module__} import {kind.__qualname__}"
        if line.startswith("from spmd."):
            ours.add(line)
        else:
            others.add(line)
    return [*sorted(others), *sorted(ours)]


def _changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with other values than their defaults."""
    changed = {}
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if found != field.default:
            changed[field.name] = found
    return changed


def _source(value: Any, prefix: str = "") -> str:
    """Return a Python expression for a value; dataclasses are called by their class names."""
    if isinstance(value, tuple):
        parts = [f"{_source(part, prefix)}," for part in value]
        return f"({' '.join(parts)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [f"{name}={_source(part, prefix)}" for name, part in _changed(value).items()]
    return f"{prefix}{type(value).__qualname__}({', '.join(fields)})"


def _classes(value: Any) -> Iterator[type]:
    """Yield the classes in the expression of `_source`."""
    if isinstance(value, tuple):
        for part in value:
            yield from _classes(part)
    if dataclasses.is_dataclass(value):
        yield type(value)
        for part in _changed(value).values():
            yield from _classes(part)
