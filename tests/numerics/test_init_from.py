"""Training starts from the parameters of a run or of a Hugging Face folder, on any mesh, whole or with adapters."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd import tree
from spmd.checkpoint.manager import CheckpointManager
from spmd.errors import CheckpointError
from spmd.lora.adapters import BASE
from spmd.lora.config import LoRAConfig
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import TrainSetup, config_mesh, make_setup
from spmd.run.config import TrainConfig
from spmd.run.init_from import check_init, initial_state
from spmd.run.load_config import load_config
from spmd.run.load_params import frozen_base, read_params, restore_model
from spmd.sharding.mesh import MeshShape
from spmd.training.state import abstract_state
from tests.command_line import run
from tests.train_runs import write_tiny

LORA = LoRAConfig(targets=("attention/(q|v)_proj/kernel",), rank=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of two steps in `base`, and its export in `hf`."""
    folder = tmp_path_factory.mktemp("start")
    config = write_tiny(folder)
    assert (
        run(
            "train",
            config,
            "--out",
            folder / "base",
            "--steps",
            2,
            "--optimizer.warmup-steps",
            1,
            "--devices",
            8,
        )
        == 0
    )
    assert run("export", folder / "base", "--out", folder / "hf") == 0
    return folder


def setup(folder: Path, start: str, **fields: object) -> TrainSetup:
    """A setup of the tiny config that starts from a folder."""
    config: TrainConfig = dataclasses.replace(
        load_config(str(folder / "tiny.py")), **{"init": str(folder / start), **fields}
    )
    return make_setup(config, config_mesh(config))


@functools.cache
def trained(folder: Path) -> dict[str, np.ndarray]:
    """The parameters that the run ended with, read as they are."""
    plan = setup(folder, "base").plan
    with CheckpointManager(folder / "base" / "checkpoints", read_only=True) as checkpoints:
        state, _ = checkpoints.restore(2, {"params": plan.abstract_params}, branches=["params"])
    return {path: np.asarray(x) for path, x in tree.flatten(state["params"]).items()}


@pytest.mark.parametrize("start", ["base", "hf"])
@pytest.mark.parametrize(
    "mesh", [MeshShape(fsdp=8), MeshShape(data=2, fsdp=2, tensor=2)], ids=["fsdp", "all"]
)
def test_parameters_are_bitwise_those_of_the_folder(
    folder: Path, start: str, mesh: MeshShape
) -> None:
    """From a run and from its export, in the shards of another mesh; the optimizer and the step begin anew."""
    began = setup(folder, start, mesh=mesh)
    assert str(folder / start) in check_init(began)
    state = initial_state(began)
    for path, leaf in tree.flatten(state.params).items():
        np.testing.assert_array_equal(leaf, trained(folder)[path], err_msg=path)
        assert leaf.sharding == tree.flatten(began.plan.abstract_params)[path].sharding
    assert int(state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.optimizer_state))


def test_control_without_it_parameters_are_others(folder: Path) -> None:
    """Drawn from the seed, parameters are not those that a run ended with."""
    state = initial_state(setup(folder, "base", init=""))
    assert not np.allclose(state.params["lm_head"]["kernel"], trained(folder)["lm_head/kernel"])


@pytest.mark.soak
def test_with_adapters_what_is_loaded_is_frozen_and_merged_on_export(folder: Path) -> None:
    """`--init` with `--lora.targets`: the base is the folder's; an export of the run has its adapters in it."""
    began = setup(folder, "hf", lora=LORA, mesh=MeshShape(fsdp=4, tensor=2))
    state = initial_state(began)
    for path, leaf in tree.flatten(state.variables[BASE]).items():
        np.testing.assert_array_equal(leaf, trained(folder)[path], err_msg=path)
    tuned, out = folder / "tuned", folder / "tuned-hf"
    flags = (
        "--init",
        folder / "hf",
        "--lora.targets",
        *LORA.targets,
        "--lora.rank",
        2,
        "--steps",
        3,
        "--devices",
        8,
    )
    assert (
        run("train", folder / "tiny.py", "--out", tuned, *flags, "--optimizer.warmup-steps", 1) == 0
    )
    assert run("export", tuned, "--out", out) == 0
    with CheckpointManager(tuned / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.record(3)["reloaded"]["path"] == str(folder / "hf")
        model = restore_model(checkpoints, None, began.plan)
        with pytest.raises(CheckpointError, match=r"variables/base/embed/embedding: missing"):
            checkpoints.restore(None, abstract_state(began.plan))
    for path, leaf in tree.flatten(model.variables[BASE]).items():
        np.testing.assert_array_equal(leaf, trained(folder)[path], err_msg=path)
    merged = tree.flatten(initial_state(setup(folder, "tuned-hf")).params)
    changed = {
        path for path, leaf in merged.items() if not np.array_equal(leaf, trained(folder)[path])
    }
    assert changed == {f"layers/attention/{name}_proj/kernel" for name in "qv"}
    abstract = setup(folder, "base").plan.abstract_params
    for path, leaf in tree.flatten(read_params(tuned, abstract)).items():
        np.testing.assert_array_equal(leaf, merged[path], err_msg=path)


@pytest.mark.soak
def test_adapters_resume_beside_the_folder_they_began_with(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """Bitwise as an uninterrupted run, from a folder or a run; without the folder, or with another, not at all."""
    flags = (
        "--lora.targets",
        *LORA.targets,
        "--lora.rank",
        2,
        "--devices",
        8,
        "--optimizer.warmup-steps",
        1,
    )
    command = ("train", folder / "tiny.py", *flags, "--optimizer.schedule", "constant")
    for start in ("hf", "base"):
        whole, parts = folder / f"whole-{start}", folder / f"parts-{start}"
        init = ("--init", folder / start)
        assert run(*command, *init, "--out", whole, "--steps", 4) == 0
        assert run(*command, *init, "--out", parts, "--steps", 2) == 0
        assert run(*command, *init, "--out", parts, "--steps", 4, "--resume", "always") == 0
        read = [
            tree.flatten(read_params(out, setup(folder, "hf").plan.abstract_params))
            for out in (whole, parts)
        ]
        for path, leaf in read[0].items():
            np.testing.assert_array_equal(leaf, read[1][path], err_msg=path)
        size = sum(
            path.stat().st_size
            for path in (whole / "checkpoints" / "4").rglob("*")
            if path.is_file()
        )
        assert size < sum(path.stat().st_size for path in (folder / "hf").iterdir())
    held = folder / "held"
    assert (
        run(*command, "--init", folder / "hf", "--out", held, "--steps", 2, "--lora.save-base") == 0
    )
    (folder / "hf").rename(folder / "moved")
    capsys.readouterr()
    try:
        assert run("generate", folder / "parts-hf", "--prompt", "a", "--tokens", 1) == 2
        assert "put the folder back, or a link to it" in capsys.readouterr().err
        assert run("generate", held, "--prompt", "a", "--tokens", 1) == 0
    finally:
        (folder / "moved").rename(folder / "hf")
    tuned = setup(folder, "parts-hf", lora=LORA).config
    assert frozen_base(tuned).origin is None, "the sum of a run and its adapters is in no file"


def test_another_model_is_refused(folder: Path) -> None:
    """What changes no shape is a difference too: every field is listed, and nothing is read."""
    other = dataclasses.replace(
        load_config(str(folder / "tiny.py")).model, rope_theta=500.0, norm_eps=1e-3
    )
    for start in ("base", "hf"):
        with pytest.raises(CheckpointError) as caught:
            check_init(setup(folder, start, model=other))
        assert [problem.where for problem in caught.value.problems] == [
            "model.norm_eps",
            "model.rope_theta",
        ]


@pytest.mark.parametrize(
    "sign", ["model.safetensors", "model.safetensors.index.json", "architectures"]
)
def test_a_folder_from_elsewhere_is_never_executed(folder: Path, tmp_path: Path, sign: str) -> None:
    """What could be Hugging Face's is read as that, whatever else is in it."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    about = {
        "config": {},
        **({"architectures": ["LlamaForCausalLM"]} if sign == "architectures" else {}),
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    if sign != "architectures":
        (tmp_path / sign).write_bytes(b"")
    with pytest.raises(CheckpointError):
        check_init(setup(folder, str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_adapters_beside_noise_are_told(folder: Path) -> None:
    """Without `init` what is frozen is drawn at random."""
    assert "drawn at random" in check_init(setup(folder, "base", init="", lora=LORA))
    assert check_init(setup(folder, "base", init="")) == ""


def test_no_folder_and_another_class_are_refused(folder: Path) -> None:
    """A folder that is not there, and a model of another class."""
    with pytest.raises(CheckpointError, match="is not a folder"):
        check_init(setup(folder, "nothing"))

    @dataclasses.dataclass(frozen=True)
    class Other(DecoderConfig):
        pass

    model = Other(**vars(load_config(str(folder / "tiny.py")).model))
    with pytest.raises(CheckpointError) as caught:
        check_init(setup(folder, "base", model=model, rules=LLAMA))
    assert [problem.where for problem in caught.value.problems] == ["model.class"]


@pytest.mark.soak
@pytest.mark.parametrize("more", [(), ("--lora.targets", *LORA.targets)], ids=["whole", "adapters"])
def test_a_check_starts_with_it(
    folder: Path, capsys: pytest.CaptureFixture, more: tuple[str, ...]
) -> None:
    """Both layouts have the folder's parameters; the control: drawn ones have another loss."""
    flags = ("--check-steps", 1, "--optimizer.learning-rate", "1e-3", "--devices", 8, "--json")
    command = ("check", folder / "tiny.py", *flags)
    assert run(*command, "--init", folder / "hf", *more) == 0
    started = json.loads(capsys.readouterr().out)
    assert {row["error"] for row in started["rows"] if row["what"] == "initial state"} == {0.0}
    assert run(*command) == 0
    drawn = json.loads(capsys.readouterr().out)
    assert started["reference"][0] < drawn["reference"][0] - 0.1
    assert run(*command, "--init", folder / "hf", *more, "--model.rope-theta", "500") == 2
    assert "model.rope_theta" in capsys.readouterr().err


@pytest.mark.soak
def test_a_plan_says_what_a_run_starts_with(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """The folder is compared; one that is where the run will be is not asked for here; the control says nothing."""
    for start, says in (
        ("hf", f"starts with {folder / 'hf'}\n"),
        ("far", "which is not on this machine"),
        ("", ""),
    ):
        assert (
            run(
                "plan",
                folder / "tiny.py",
                "--init",
                folder / start if start else "",
                "--devices",
                8,
            )
            == 0
        )
        printed = capsys.readouterr().out
        assert says in printed
        assert ("starts with" in printed) == bool(says)
    assert run("plan", folder / "tiny.py", "--init", folder / "hf", "--devices", 8, "--json") == 0
    assert json.loads(capsys.readouterr().out)["start"] == f"starts with {folder / 'hf'}"
    assert (
        run(
            "plan",
            folder / "tiny.py",
            "--init",
            folder / "hf",
            "--devices",
            8,
            "--model.rope-theta",
            "500",
        )
        == 2
    )
    assert "model.rope_theta" in capsys.readouterr().err


def test_the_wrong_kind_of_folder_is_told_with_the_right_command(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """A Hugging Face folder is imported first, and a run's config is a file in it."""
    assert run("generate", folder / "hf", "--prompt", "x") == 2
    assert f"spmd import {folder / 'hf'} --out RUN" in capsys.readouterr().err
    assert run("plan", folder / "base") == 2
    assert f"{folder / 'base' / 'config.py'}, the config of that run" in capsys.readouterr().err
