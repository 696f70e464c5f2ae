"""The command line does what its help says, and bad input is an error with what, where, the arithmetic and the fix."""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spmd import cli
from spmd.analysis import topology
from spmd.commands.plan import PlanCommand
from spmd.errors import ConfigError, Problem
from spmd.run.load_config import load_config, shipped
from tests.command_line import run, write_config


@pytest.fixture
def config(tmp_path):
    """A config file of a tiny model on a small text."""
    return write_config(tmp_path)


def test_train_writes_what_it_says(config, tmp_path, capsys):
    """A run shows the plan and its numbers, and leaves config, plan, metrics and a checkpoint."""
    out = tmp_path / "run"
    assert (
        run("train", config, "--out", out, "--sample.prompt", "To be", "--sample.tokens", "8") == 0
    )
    printed = capsys.readouterr().out
    for expected in (
        "layers/attention/q_proj/kernel",
        "P(pipe, fsdp+sequence, tensor)",
        "step 4/4",
        "validation loss",
        "bigram count model",
        f"{out}/checkpoints/4",
        f"{out}/metrics.jsonl",
        "sample at temperature",
        "To be",
    ):
        assert expected in printed
    lines = read_metrics(out)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {"step", "loss", "tokens_per_s", "step_s", "gradient_norm", "learning_rate"} <= set(
        steps[-1]
    )
    (evaluated,) = (line for line in lines if "val_loss" in line)
    assert evaluated["step"] == 4
    assert json.loads((out / "config.json").read_text())["changed"]["out"] == ["", str(out)]
    assert "q_proj" in (out / "plan.txt").read_text()

    check_evaluation(out, tmp_path, evaluated["val_loss"], capsys)
    check_generation(out, tmp_path, capsys)
    check_wrong_requests(out, capsys)
    check_taken_folder(config, out, capsys)

    # and the run is as it was
    assert run("train", config, "--out", out, "--resume", "always", "--steps", "6") == 0
    printed = capsys.readouterr().out
    assert "resuming from step 4" in printed
    assert "steps changes from 4 to 6" in printed
    steps = [line["step"] for line in read_metrics(out) if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def read_metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_evaluation(out, folder, val_loss, capsys):
    """It is evaluated on its validation split and on other texts, as in training."""
    (folder / "other.txt").write_text("or not to be, that is the question. " * 9)
    assert (
        run("eval", out, "--tokens", "256", "--json", "--data", f"own={folder / 'other.txt'}") == 0
    )
    (own,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert own["set"] == "own"
    assert own["bits_per_byte"] == pytest.approx(
        own["loss"] * own["tokens"] / own["bytes"] / math.log(2)
    )
    assert run("eval", out, "--tokens", "256", "--mesh.fsdp", "-1", "--mesh.data", "2") == 0
    assert f"{val_loss:.4f}" in capsys.readouterr().out
    assert run("eval", out, "--data", "a=nowhere", "--data", "b=neither") == 2
    assert "neither: does not exist" in capsys.readouterr().err


def check_generation(out, folder, capsys):
    """Generate goes on from it."""
    assert run("generate", out, "--prompt", "To be", "--tokens", "6", "--temperature", "0") == 0
    text = capsys.readouterr().out
    assert text.startswith("To be")
    assert len(text.rstrip("\n")) >= 6
    assert run("generate", out, "--prompt", "To be", "--tokens", "60") == 2
    assert "5 prompt tokens + 60 new ones = 65 > 16" in capsys.readouterr().err

    # several prompts are answered together, and each as by itself
    (folder / "prompts.txt").write_text("or not\n")
    prompts = ["--prompt", "To be", "--prompts", folder / "prompts.txt"]
    assert run("generate", out, *prompts, "--tokens", "6", "--temperature", "0") == 0
    both = capsys.readouterr().out
    assert both.startswith(text.rstrip("\n") + "\n\nor not")

    # on another mesh it is the same text
    other = [
        "--prompt",
        "To be",
        "--tokens",
        "6",
        "--temperature",
        "0",
        "--mesh.fsdp",
        "-1",
        "--devices",
        "0",
    ]
    assert run("generate", out, *other) == 0
    assert capsys.readouterr().out == text


def check_wrong_requests(out, capsys):
    """All that is wrong with a request is said at once."""
    wrong = [
        "--temperature",
        "-1",
        "--top-p",
        "2",
        "--tokens",
        "60",
        "--seed",
        "-1",
        "--prompts",
        "/no/such/file",
    ]
    assert run("generate", out, "--prompt", "To be", "--prompt", "", *wrong) == 2
    complaint = capsys.readouterr().err
    for part in (
        "temperature",
        "top_p",
        "prompt 0",
        "prompt 1: is empty",
        "seed",
        "/no/such/file cannot be read",
    ):
        assert part in complaint
    assert run("generate", out) == 2
    assert "prompt: there is none" in capsys.readouterr().err


def check_taken_folder(config, out, capsys):
    """The folder is taken."""
    assert run("train", config, "--out", out) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert run("train", config, "--out", out, "--resume", "always", "--seed", "3") == 2
    assert "seed: was 0 and is 3" in capsys.readouterr().err

    # another model is refused, also one of equal shapes, and nothing is compiled before
    other = [
        "--model.heads",
        "2",
        "--model.kv-heads",
        "1",
        "--model.rope-theta",
        "500",
        "--mesh.fsdp",
        "4",
    ]
    assert (
        run("train", config, "--out", out, "--resume", "always", *other, "--mesh.tensor", "1") == 2
    )
    report = capsys.readouterr().err.splitlines()
    changes = [
        "heads: was 4 and is 2",
        "kv_heads: was 2 and is 1",
        "rope_theta: was 10000.0 and is 500.0",
    ]
    assert report[1::2] == [f"  model.{change}" for change in changes]


def test_plan_needs_no_devices_and_speaks_json(config, capsys):
    """405B parameters over 16,384 devices are planned here and now."""
    assert run("plan", config) == 0
    assert "lm_head/kernel" in capsys.readouterr().out
    assert run("plan", config, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"] == 8
    assert (
        plan["parameters"]
        == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 2 * 256 * 32 + 32
    )
    assert run("plan", "llama3-405b", "--topology", "cpu:16384", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 405_853_388_800
    assert plan["bytes_per_device"]["params"] < 2**31
    assert plan["memory"]["estimated"]["params"] == plan["bytes_per_device"]["params"]


def test_plan_has_a_ledger(config, capsys):
    """It stands beneath the plan; in JSON its categories add up to its total, beside what the compiler says."""
    assert run("plan", config) == 0
    printed = capsys.readouterr().out
    assert "memory of one device, cpu:8" in printed
    assert "estimated on each device" in printed
    assert run("plan", config, "--compile", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    estimated, compiled = plan["memory"]["estimated"], plan["memory"]["compiled"]
    assert {
        "params",
        "grads",
        "optimizer",
        "master",
        "activations",
        "logits",
        "total",
    } <= estimated.keys()
    assert sum(estimated["at_peak"].values()) == estimated["total"]
    assert (
        compiled["arguments"]
        == sum(estimated[name] for name in ("params", "optimizer", "batch", "variables")) + 12
    )
    assert (
        compiled["total"]
        == compiled["arguments"] + compiled["temporaries"]
        > compiled["aliased"]
        > 0
    )
    assert (plan["memory"]["limit"], plan["fits"]) == (None, None)


@pytest.mark.soak
def test_plan_that_does_not_fit_exits_with_3(config, capsys):
    """The category to blame is named, and settings that would fit; with those it fits."""
    large = [
        "--topology",
        "v5e:2x4",
        "--data.batch",
        "1024",
        "--data.sequence",
        "2048",
        "--attention",
        "xla",
    ]
    assert run("plan", config, *large, "--json") == 3
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False
    assert plan["memory"]["limit"] == 15.75 * 2**30 < plan["memory"]["estimated"]["total"]
    flags = plan["memory"]["would_fit"][0]["flags"].split()
    assert run("plan", config, *large, *flags) == 0
    assert run("plan", config, *large) == 3
    assert "DOES NOT FIT: most of it is " in capsys.readouterr().out


def test_an_absent_extra_leaves_the_estimate(config, capsys, monkeypatch):
    """Without the compiler the estimate still prints, and the message has the command that installs it."""
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    assert run("plan", config, "--topology", "v5e:2x4", "--compile") == 2
    printed = capsys.readouterr()
    assert "estimated on each device" in printed.out
    assert "pip install 'spmd[tpu]'" in printed.err
    assert run("plan", config, "--topology", "h100:1x8", "--compile") == 2
    assert "pip install 'spmd[cuda]'" in capsys.readouterr().err


def test_plan_shows_what_differs_from_another(config, capsys):
    """Lines of the one with -, of the other with +; nothing where nothing does."""
    assert run("plan", config, "--zero", "2", "--diff", config) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [(line[:6], "zero 2" in line, "zero 3" in line) for line in lines[:2]] == [
        ("- mesh", True, False),
        ("+ mesh", False, True),
    ]
    assert run("plan", config, "--diff", config) == 0
    assert capsys.readouterr().out == "the plans are the same\n"
    assert run("plan", config, "--zero", "2", "--diff", config, "--json") == 0
    assert json.loads(capsys.readouterr().out) == lines


def test_plan_shows_what_the_compiled_step_sends(config, capsys):
    """`--compile` prints kinds, axes and sources, and the same as records."""
    assert run("plan", config, "--compile") == 0
    printed = capsys.readouterr().out
    assert re.search(r"reduce-scatter +fsdp", printed)
    assert "mlp/down_proj/kernel" in printed
    assert run("plan", config, "--compile", "--json") == 0
    audit = json.loads(capsys.readouterr().out)
    assert {"all-gather", "all-reduce", "reduce-scatter"} <= {
        record["kind"] for record in audit["collectives"]
    }


def test_plan_shows_gradients_and_optimizer_state(config, capsys):
    """`--all` has a line for each of them."""
    assert run("plan", config, "--all") == 0
    printed = capsys.readouterr().out
    assert "gradients: lm_head/kernel" in printed
    assert "optimizer: 0/mu/lm_head/kernel" in printed


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--topology", "v9:16x16"], "there is no chip 'v9'"),
        (["--topology", "v5e:4x4"], "and there are 16 devices"),
        (["--topology", "cpu"], "is 'cpu'"),
        (["--topology", "cpu:0"], "is 'cpu:0'"),
        (["--topology", "cpu:12"], "and there are 12 devices"),
        (["--all", "--compile"], "Conflicting views of a plan"),
        (["--diff", "no-such-config"], "no-such-config"),
    ],
)
def test_plan_refuses_what_it_cannot_show(config, capsys, flags, complaint):
    """Exit code 2, and what to do about it."""
    assert run("plan", config, *flags) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--mesh.data", "3"], "data=3 × fsdp=2 × tensor=2 = 12, and there are 8 devices"),
        (["--mesh.data", "-1", "--mesh.fsdp", "-1"], "data and fsdp are both -1"),
        (["--data.batch", "6"], "6 / "),
        (["--data.source", "/no/such/corpus.txt"], "/no/such/corpus.txt"),
        (["--data.sequence", "100000"], "fewer tokens than one sequence"),
        (
            ["--mesh.pipe", "2", "--mesh.tensor", "1", "--pipeline.microbatches", "8"],
            "8 / (microbatches=8 × data=2",
        ),
        (["--offload", "params"], "needs every layer to be recomputed, and remat is none"),
        (["--offload", "optimiser_state"], 'did you mean "optimizer_state"'),
        (["--pipeline.schedule", "1f2b"], 'did you mean "1f1b"'),
        (["--pipeline.microbatches", "3"], "8 / (microbatches=3 × data=2 × fsdp=2"),
        (["--precision", "fp8"], "invalid choice"),
        (["--remat", "ful"], 'did you mean "full"'),
        (["--steps", "0"], "at least 1"),
        (["--model.heads", "3"], "32 / 3 = 10.67"),
        (["--model.kv-heads", "1"], "1 / (tensor=2) = 0.5"),
        (["--model.vocab", "100"], "is smaller than the tokenizer's vocabulary"),
        (["--optimizer.no-decay", "scales"], "matches no parameter"),
    ],
)
def test_bad_input_is_an_error_that_says_how_to_mend_it(config, tmp_path, capsys, flags, complaint):
    """Exit code 2, no traceback, and the message holds the arithmetic or the fix."""
    assert run("train", config, "--out", tmp_path / "run", *flags) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_an_unknown_flag_is_answered_with_the_nearest(config, tmp_path, capsys):
    """`--mesh.fsd` is a typo of `--mesh.fsdp`."""
    assert run("train", config, "--mesh.fsd", "4") == 2
    assert "--mesh.fsdp" in capsys.readouterr().err


@pytest.mark.soak
def test_a_short_sample_is_shortened_and_said(config, tmp_path, capsys):
    """A sample of more tokens than a training sequence holds has as many as fit."""
    flags = [
        "--steps",
        "1",
        "--sample.prompt",
        "To be",
        "--evaluate.tokens",
        "17",
        "--mesh.data",
        "8",
    ]
    mesh = ["--mesh.fsdp", "1", "--mesh.tensor", "1"]
    assert run("train", config, "--out", tmp_path / "run", *flags, *mesh) == 0
    assert "11 of 200 tokens, because training sequences have 16" in capsys.readouterr().out


def test_version_names_the_libraries(capsys):
    """That a report of a bug needs."""
    assert run("--version") == 0
    printed = capsys.readouterr().out
    assert [
        name for name in ("spmd ", "jax ", "jaxlib ", "flax ", "Python ") if name not in printed
    ] == []


@pytest.mark.soak
def test_a_long_error_is_cut_and_kept(config, tmp_path, capsys, monkeypatch):
    """200,001 lines are 101 on the terminal, and all of them in the file that the last one names."""

    def fail(arguments):
        raise ConfigError(
            "Everything is wrong:", [Problem(f"{n:06}", "is wrong") for n in range(200_000)]
        )

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "plan", (fail, (PlanCommand,)))
    assert run("plan", config) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 101
    assert lines[-1].startswith("… and 199,901 more lines: see ")
    assert len(Path(lines[-1].partition(": see ")[2]).read_text().splitlines()) == 200_001


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_run_folder_that_cannot_be_made_is_refused(config, tmp_path, capsys, out):
    """Before anything is compiled."""
    (tmp_path / "file").touch()
    for command in (
        ["train", config],
        ["launch", "--processes", "2", "--", "train", config, "--devices", "8"],
    ):
        assert run(*command, "--out", tmp_path / out) == 2
        assert f"{tmp_path / 'file'}: is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_config_has_a_plan(name, capsys):
    """No shipped config has a problem in its table, and its docstring says how to run it.

    Those that take any machine ask for one.
    """
    machine = []
    if load_config(name).mesh.total() is None:
        assert run("plan", name) == 2
        assert "such as --topology v5e:4x4" in capsys.readouterr().err
        machine = ["--devices", 64]
    assert run("plan", name, *machine) == 0
    assert "parameters   on each device" in capsys.readouterr().out
    assert f"spmd train {name}" in shipped()[name].read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["plan", "--help"],
        ["check", "--help"],
        ["generate", "--help"],
    ],
)
def test_help_is_there(arguments, capsys):
    """Each verb explains itself."""
    assert run(*arguments) == 0
    assert len(capsys.readouterr().out) > 300


def test_the_installed_command_runs_in_a_process_of_its_own(config, tmp_path):
    """`python -m spmd_command` with --devices simulates them and prints nothing on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "spmd_command", "plan", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path.cwd(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "lm_head" in done.stdout
