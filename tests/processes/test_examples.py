"""Every example runs as its docstring says, for a few steps, in a process and a folder of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd.run.load_config import EXAMPLES, shipped
from tests.programs import ROOT

ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",  # or it looks for a TPU, whose compiler is installed
    "PYTHONPATH": str(ROOT),
}
SCRIPTS = {"grpo": 20, "linen_model": 20, "nnx_model": 50, "vit_digits": 50}
"""Scripts and how many steps they take here: enough to print a line of metrics."""

RUNS = {
    "actor_critic": 60,
    "diffusion_transformer": 60,
    "gan": 60,
    "recommender": 60,
    "t5_encoder_decoder": 60,
    "teacher": 60,
}
"""Scripts that train in a run folder, and how many steps they take here: more than one checkpoint needs."""

IMPORTED = {"threshold_exchange"}
"""Modules for a program of one's own: tests/numerics/test_threshold_exchange.py."""

SMALL = (
    *("--steps", "2", "--data.batch", "8", "--data.sequence", "32", "--evaluate.tokens", "256"),
    *("--optimizer.warmup-steps", "1", "--sample.tokens", "4", "--data.cache", "cache"),
)
CONFIGS = {
    "own-text": (*SMALL, "--devices", "2", "--mesh.fsdp", "2"),
    "mixtral-tiny": (*SMALL, "--data.source", "*.txt"),
}
"""Configs small enough to be trained here, and how they are made smaller."""

PLANNED_ONLY = {
    "deepseek-v3",
    "demo",
    "llama3-405b",
    "llama3-70b",
    "llama3-8b",
    "mixtral-8x7b",
    "tinyllama-1b",
}
"""Configs that other tests plan or train."""


def run(folder: Path, *command: str, **environment: str) -> str:
    environment = {**ENVIRONMENT, **environment}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text in it."""
    lines = (f"line {n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(400))
    (tmp_path / "text.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        name if name == "nnx_model" else pytest.param(name, marks=pytest.mark.soak)
        for name in SCRIPTS
    ],
)
def test_a_script_trains(folder: Path, name: str) -> None:
    """It prints its plan and a loss that is a number."""
    printed = run(
        folder, sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", str(SCRIPTS[name])
    )
    assert "parameters   on each device" in printed
    assert f"step {SCRIPTS[name]}   loss " in printed
    assert "nan" not in printed


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_killed_ends_as_if_it_were_not(folder: Path, name: str) -> None:
    """SIGKILL after a checkpoint, and again: the same losses and gradients to the bit."""

    def command(out: str, *more: str) -> list[str]:
        return [
            sys.executable,
            str(EXAMPLES / f"{name}.py"),
            "--steps",
            str(RUNS[name]),
            "--out",
            out,
            *more,
        ]

    def losses(out: str) -> list[tuple[int, float, float]]:
        lines = map(json.loads, (folder / out / "metrics.jsonl").read_text().splitlines())
        return [
            (line["step"], line["loss"], line["gradient_norm"]) for line in lines if "loss" in line
        ]

    run(folder, *command("whole"))
    process = subprocess.Popen(
        command("cut"), cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 400
    while not any(path.name.isdecimal() for path in (folder / "cut" / "checkpoints").glob("*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    printed = run(folder, *command("cut", "--resume", "always"))
    assert "resuming from step" in printed
    assert losses("cut")[-1] == losses("whole")[-1]
    assert losses("cut")[-1][0] == RUNS[name]


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_and_writes(folder: Path, name: str) -> None:
    """`spmd train NAME` and `spmd generate` on what it left."""
    printed = run(folder, sys.executable, "-m", "spmd.cli", "train", name, *CONFIGS[name])
    assert "sample at temperature" in printed
    written = run(
        folder,
        sys.executable,
        "-m",
        "spmd.cli",
        "generate",
        f"runs/{name}",
        "--prompt",
        "The",
        "--tokens",
        "3",
    )
    assert written.startswith("The")


@pytest.mark.soak
def test_a_checkpoint_is_fine_tuned_and_written_again(folder: Path) -> None:
    """The shell script for LoRA, on a folder that `spmd export` wrote."""
    (folder / "spmd").write_text(f'#!/bin/sh\nexec {sys.executable} -m spmd.cli "$@"\n')
    (folder / "spmd").chmod(0o755)
    spmd = str(folder / "spmd")
    run(folder, spmd, "train", "own-text", *SMALL, "--model.layers", "2")
    run(folder, spmd, "export", "runs/own-text", "--out", "hf")
    script = (str(EXAMPLES / "lora_from_hugging_face.sh"), "hf", "text.txt", *SMALL[:-2])
    printed = run(folder, "sh", *script, PATH=f"{folder}:{os.environ['PATH']}")
    assert "layers/attention/q_proj/kernel_lora_a" in printed
    assert "LlamaForCausalLM: 885,696 parameters" in printed
    assert (folder / "tuned-hf" / "model.safetensors").is_file()


def test_no_example_is_forgotten() -> None:
    """Every file of examples/ is run or planned somewhere."""
    scripts = (
        {path.stem for path in EXAMPLES.glob("*.py")}
        - {name.replace("-", "_") for name in shipped()}
        - {"__init__"}
    )
    assert scripts == {*SCRIPTS, *RUNS, *IMPORTED}
    assert set(shipped()) == set(CONFIGS) | PLANNED_ONLY
