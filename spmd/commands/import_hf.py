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
from spmd.run.build import TrainSetup, config_mesh, make_setup
from spmd.run.config import TrainConfig, config_values
from spmd.run.run_dir import IMPORTED, RunDir
from spmd.sharding.mesh import MeshShape

_DEFAULT_SEQUENCE = 2048


@dataclasses.dataclass(frozen=True)
class ImportCommand:
    """Create a run folder from a Hugging Face folder: sharded parameters, tokenizer and config.

    Only safetensors are read. All files are checked first: an error lists all problems, and nothing is written.
    """

    folder: tyro.conf.Positional[str]
    """Folder with config.json and safetensors files."""
    out: str
    """Run folder; it must not exist."""
    mesh: MeshShape = MeshShape(fsdp=-1)
    """Size of each mesh axis; one may be -1."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: parameters are sharded over fsdp at 3."""
    precision: Literal["float32", "bf16", "bf16-params"] = "float32"
    """float32; bf16: compute in it; bf16-params: also store parameters in it."""
    sequence: int = 0
    """Sequence length for training and generation (0: the model's context length, at most 2048)."""
    devices: int = 0
    """Simulate this many CPU devices (0: use the real ones)."""


def run_import(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    command: ImportCommand = parse_flags(ImportCommand, arguments, "spmd import")
    began, source, out = time.perf_counter(), Path(command.folder), Path(command.out)
    initialize(command.devices)
    with _checked(command, source, out) as (found, setup):
        params = load_published(found, setup.plan.abstract_params)
        state = {"params": params, "variables": _variables(setup)}
        with whole_folder(out) as folder:
            config_file = folder / "config.py"
            config_file.write_text(config_source(setup.config, found), encoding="utf-8")
            for name, file in {**files_of(found.path), ORIGINAL: inside(found.path, CONFIG)}.items():
                shutil.copyfile(file, folder / name)
            RunDir(folder).describe(setup.config, config_file, str(setup.plan))
            record = {"step": 0, IMPORTED: str(source.absolute()), "config": config_values(setup.config)}
            with CheckpointManager(folder / "checkpoints") as checkpoints:
                checkpoints.save(0, state, {**record, "versions": library_versions()}, copied=False)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"{found.family.architectures[0]}: {tree.size(params):,} parameters, {tree.human_bytes(size)}, "
        f"in {time.perf_counter() - began:.3g} s\n"
        f"generate         spmd generate {out} --prompt …\n"
        f"fine-tune        spmd train {out / 'config.py'} --init {out} --data.source FILES --out …"
    )
    if not (out / TOKENIZER).exists():
        print(f"tokenizer        none: the folder has no {TOKENIZER}, so text is encoded as bytes")
    return 0


@contextlib.contextmanager
def _checked(command: ImportCommand, source: Path, out: Path) -> Iterator[tuple[HFFolder, TrainSetup]]:
    """Open the folder and build its model; raise all problems of the folder, the tokenizer, the mesh and `out`."""
    problems = [Problem(str(out), "exists", fix="choose another --out")] if out.exists() else []
    with contextlib.ExitStack() as stack:
        found: HFFolder | None = None
        setup: TrainSetup | None = None
        with collect_errors(problems):
            found = stack.enter_context(open_folder(source))
        if source.is_dir():
            problems += tokenizer_problems(source, getattr(found and found.config, "vocab", None))
        with collect_errors(problems):
            if found is not None:
                config = _config(command, found, out)
                setup = make_setup(config, config_mesh(config))
                check_published(found, setup.plan.abstract_params)
        if problems or found is None or setup is None:
            raise CheckpointError("Nothing was imported:", problems)
        yield found, setup


def _config(command: ImportCommand, found: HFFolder, out: Path) -> TrainConfig:
    context = getattr(found.config, "context", found.values.get("max_position_embeddings"))
    context = context if isinstance(context, int) and context > 0 else _DEFAULT_SEQUENCE
    has_tokenizer = (found.path / TOKENIZER).exists()
    tokenizer = str(out.absolute() / TOKENIZER) if has_tokenizer else DataConfig.tokenizer
    sequence = command.sequence or min(context, _DEFAULT_SEQUENCE)
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
    """Return the model's initial variables besides its parameters; most models have none."""
    abstract = setup.plan.abstract_variables
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = setup.plan.model.init_variables
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0, impl=PRNG)) if jax.tree.leaves(abstract) else {}


def config_source(config: TrainConfig, found: HFFolder) -> str:
    """Return the source of an imported model's config.py, with all fields that differ from the defaults."""
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
    """Return the fields of a dataclass that differ from their defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: found for name, default in fields.items() if (found := getattr(value, name)) != default}


def _source(value: Any, prefix: str = "") -> str:
    """Return a Python expression for a value; dataclasses are called by their class names."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    inner = ", ".join(f"{name}={_source(part, prefix)}" for name, part in _changed(value).items())
    return f"{prefix}{type(value).__qualname__}({inner})"


def _classes(value: Any) -> Iterator[type]:
    """Yield the classes that `_source` refers to."""
    if dataclasses.is_dataclass(value):
        yield type(value)
        for part in _changed(value).values():
            yield from _classes(part)
