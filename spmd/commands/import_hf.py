"""`spmd import`."""

import contextlib
import dataclasses
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
from spmd.commands.parsing import parse_flags
from spmd.data.loader import DataConfig
from spmd.data.tokenizer import TOKENIZER
from spmd.distributed.initialize import initialize
from spmd.errors import CheckpointError, Problem
from spmd.hf.family import families
from spmd.hf.fields import collect_errors
from spmd.hf.folder import CONFIG, HFFolder, inside, open_folder
from spmd.hf.load import check_published, load_published
from spmd.hf.save import whole_folder
from spmd.hf.sidecar_files import ORIGINAL, files_of, tokenizer_problems
from spmd.model_api.model import PRNG
from spmd.run.build import TrainSetup, config_mesh
from spmd.run.config import TrainConfig, config_values
from spmd.run.run_dir import IMPORTED, RunDir
from spmd.sharding.mesh import MeshShape

_LONGEST = 2048
"""Tokens of a sequence, where the model has room for more and nothing else is asked for."""


@dataclasses.dataclass(frozen=True)
class ImportCommand:
    """Makes a run folder of a Hugging Face folder: its parameters in their shards, its tokenizer, a config.

    Only safetensors are read. Every file is checked first: an import that cannot be is one error that lists everything,
    and writes nothing.
    """

    folder: tyro.conf.Positional[str]
    """The folder with config.json and safetensors files."""
    out: str
    """The run folder; it must not exist."""
    mesh: MeshShape = MeshShape(fsdp=-1)
    """The size of each mesh axis; one may be -1."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: parameters are split over fsdp at 3."""
    precision: Literal["float32", "bf16", "bf16-params"] = "float32"
    """float32; bf16: compute in it; bf16-params: parameters are stored in it, too."""
    sequence: int = 0
    """Tokens of the longest text that it generates, and of a sequence in training (0: what the model has room for, at
    most 2048)."""
    devices: int = 0
    """Simulate this many CPU devices (0: use the real ones)."""


def run_import(arguments: list[str]) -> int:
    """Imports; the exit code."""
    command: ImportCommand = parse_flags(ImportCommand, arguments, "spmd import")
    began, source, out = time.perf_counter(), Path(command.folder), Path(command.out)
    initialize(command.devices)
    with _checked(command, source, out) as (found, setup):
        params = load_published(found, setup.plan.abstract_params)
        state = {"params": params, "variables": _variables(setup)}
        with whole_folder(out) as folder:
            _describe(found, setup, folder)
            record = {"step": 0, IMPORTED: str(source.absolute()), "config": config_values(setup.config)}
            with CheckpointManager(folder / "checkpoints") as checkpoints:
                checkpoints.save(0, state, {**record, "versions": library_versions()}, copied=False)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"{found.family.architectures[0]}: {tree.size(params):,} parameters, {tree.human_bytes(size)}, "
        f"in {time.perf_counter() - began:.3g} s\n"
        f"write with it    spmd generate {out} --prompt …\n"
        f"train from it    spmd train {out / 'config.py'} --init {out} --data.source FILES --out …"
    )
    if not (out / TOKENIZER).exists():
        print(f"tokenizer        none: the folder has no {TOKENIZER}, so text is read as bytes")
    return 0


@contextlib.contextmanager
def _checked(command: ImportCommand, source: Path, out: Path) -> Iterator[tuple[HFFolder, TrainSetup]]:
    """The folder and the setup of its model, once nothing is in the way.

    Raises:
        CheckpointError: Everything that is.
    """
    problems = [Problem(str(out), "exists", fix="another --out")] if out.exists() else []
    with contextlib.ExitStack() as stack:
        found: HFFolder | None = None
        setup: TrainSetup | None = None
        with collect_errors(problems):
            found = stack.enter_context(open_folder(source))
        problems += (
            tokenizer_problems(source, getattr(found and found.config, "vocab", None)) if source.is_dir() else []
        )
        with collect_errors(problems):
            if found is not None:
                config = _config(command, found, out)
                setup = TrainSetup(config, config_mesh(config))
                check_published(found, setup.plan.abstract_params)
        if problems or found is None or setup is None:
            raise CheckpointError("Nothing was imported:", problems)
        yield found, setup


def _config(command: ImportCommand, found: HFFolder, out: Path) -> TrainConfig:
    room = getattr(found.config, "context", found.values.get("max_position_embeddings", _LONGEST))
    sequence = command.sequence or min(room if isinstance(room, int) and room > 0 else _LONGEST, _LONGEST)
    has_one = (found.path / TOKENIZER).exists()
    tokenizer = str(out.absolute() / TOKENIZER) if has_one else DataConfig.tokenizer
    return TrainConfig(
        model=found.config,
        rules=found.family.rules(found.config),
        mesh=command.mesh,
        zero=command.zero,
        precision=command.precision,
        data=DataConfig(tokenizer=tokenizer, sequence=sequence),
        devices=command.devices,
    )


def _variables(setup: TrainSetup) -> Any:
    """What the model keeps beside its parameters, as it starts with; most models keep nothing."""
    abstract = setup.plan.abstract_variables
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = setup.model.init_variables
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0, impl=PRNG)) if jax.tree.leaves(abstract) else {}


def _describe(found: HFFolder, setup: TrainSetup, folder: Path) -> None:
    """Writes all of the run folder but its checkpoint."""
    source = folder / "config.py"
    source.write_text(config_source(setup.config, found), encoding="utf-8")
    for name, file in files_of(found.path).items():
        shutil.copyfile(file, folder / name)
    shutil.copyfile(inside(found.path, CONFIG), folder / ORIGINAL)
    RunDir(folder).describe(setup.config, source, str(setup.plan))


def config_source(config: TrainConfig, found: HFFolder) -> str:
    """The Python file of an imported model's config, with what differs from the defaults.

    Args:
        config: The config.
        found: Where it comes from.
    """
    family = next(name for name, family in families().items() if family is found.family)
    imports = sorted({f"from {kind.__module__} import {kind.__qualname__}" for kind in _classes(config.model)})
    ours = [line for line in imports if line.startswith("from spmd.")]
    fields = {name: value for name, value in _changed(config).items() if name not in ("model", "rules")}
    lines = [
        json.dumps(f"{found.values['architectures'][0]}, imported from {found.path.absolute()}."),
        "",
        "import spmd",
        *(line for line in imports if line not in ours),
        *sorted([*ours, "from spmd.hf.family import families"]),
        "",
        f"model = {_source(config.model)}",
        "config = spmd.TrainConfig(",
        "    model=model,",
        f"    rules=families()[{json.dumps(family)}].rules(model),",
        *(f"    {name}={_source(value, 'spmd.')}," for name, value in fields.items()),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are by default."""
    fields = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: found for name, default in fields.items() if (found := getattr(value, name)) != default}


def _source(value: Any, prefix: str = "") -> str:
    """An expression for a value; dataclasses by the names of their classes."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    inner = ", ".join(f"{name}={_source(part, prefix)}" for name, part in _changed(value).items())
    return f"{prefix}{type(value).__qualname__}({inner})"


def _classes(value: Any) -> Iterator[type]:
    """The classes that `_source` names."""
    if dataclasses.is_dataclass(value):
        yield type(value)
        for part in _changed(value).values():
            yield from _classes(part)
