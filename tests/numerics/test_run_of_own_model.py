"""Runs of one's own model, loss and batches: resumed, rolled back, stopped, evaluated and refused like others."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import CheckpointError, ConfigError, NonFiniteError
from spmd.observe.goodput import measure_goodput
from spmd.run.run_dir import RunDir
from spmd.training.state import abstract_state

RULES = spmd.Rules(params=[("w", P("fsdp", "tensor"))], activations=[])
MODEL = spmd.Model(
    lambda key: {"w": jax.random.normal(key, (4, 2))}, lambda params, x: x @ params["w"]
)


def loss_fn(params, variables, batch, key):
    """Squares, with noise from the step's key."""
    y = MODEL.apply(params, batch["x"]) + 0.01 * jax.random.normal(key, (8, 2))
    return {"loss": ((y - batch["y"]) ** 2).sum(), "weight": jnp.float32(8)}, variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(spmd.RunConfig):
    """A run's config with a field of its own."""

    width: int = 4


CONFIG = OwnConfig(steps=6, log_every=1, checkpoint_every=2)


@pytest.fixture(scope="module")
def step():
    """The step, compiled once for all runs."""
    mesh = spmd.make_mesh(data=2, fsdp=2, tensor=2)
    return spmd.make_train_step(spmd.make_plan(mesh, RULES, MODEL, optax.adam(0.1)), loss_fn)


def numbers(start, steps, bad=(), stop=None):
    """Batches, each from its own number; those in `bad` are NaN, and at `stop` the source fails."""
    for n in range(start, steps):
        if n == stop:
            raise OSError("the disk is gone")
        draws = np.random.default_rng(n)
        x = draws.normal(size=(8, 4)).astype(np.float32)
        yield {"x": np.where(n in bad, np.nan, x).astype(np.float32), "y": x[:, :2]}


def metrics(run):
    """Lines of the metrics by step, without times."""
    lines = map(json.loads, run.run_dir.metrics.read_text().splitlines())
    return [
        {k: v for k, v in line.items() if k in ("step", "loss", "near_loss", "examples")}
        for line in lines
    ]


def same(a, b):
    """Whether two states have the same bits."""
    return all(
        jax.tree.leaves(
            jax.tree.map(lambda x, y: bool((x == y).all()), jax.device_get(a), jax.device_get(b))
        )
    )


def test_a_resumed_run_ends_with_the_same_bits(step, tmp_path):
    """After its data failed; the control took one other batch."""
    whole = spmd.Run(tmp_path / "whole", step, numbers, config=CONFIG, data="numbers")
    expected = whole.train()
    cut = spmd.Run(
        tmp_path / "cut", step, lambda a, b: numbers(a, b, stop=5), config=CONFIG, data="numbers"
    )
    with pytest.raises(OSError, match="the disk is gone"):
        cut.train()
    again = dataclasses.replace(cut, batches=numbers)
    result = again.train("auto")
    assert result.steps == 2
    assert result.checkpoint == 6
    assert same(result.state, expected.state)
    assert metrics(again) == metrics(whole)
    assert metrics(again)[0]["examples"] == 8
    other = spmd.Run(tmp_path / "other", step, lambda a, b: numbers(a + 1, b + 1), config=CONFIG)
    assert not same(other.train().state, expected.state)


def test_results_are_a_line_in_a_notebook(step, tmp_path):
    """Of a run, its state, model, plan, step and table; the control is what a dataclass prints of itself.

    A state that was donated, and one that is traced or abstract, are described too.
    """
    run = spmd.Run(tmp_path / "run", step, numbers, config=dataclasses.replace(CONFIG, steps=1))
    result = run.train()
    state = spmd.init_state(step.plan)
    shown = [result, result.state, MODEL, step.plan, step, RULES, run]
    for value in shown:
        assert len(repr(value)) < 500
        assert "Array" not in repr(value)
    plain = dataclasses.make_dataclass(
        "TrainState", [each.name for each in dataclasses.fields(state)]
    )
    fields = {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}
    assert len(repr(plain(**fields))) > 500
    assert repr(result).startswith("RunResult(1 step in ")
    assert "checkpoint of step 1; TrainState(step 1: params 1 array of " in repr(result)
    assert repr(MODEL).startswith("Model(lambda of test_run_of_own_model.py:")
    jax.eval_shape(lambda state: shown.append(repr(state)), state)
    shown.append(repr(abstract_state(step.plan)))
    assert all("TrainState(step int32[]" in text for text in shown[-2:])
    step(state, next(numbers(0, 1)))
    assert "step deleted, as the state was donated" in repr(state)


def test_goodput_counts_from_the_call(step, tmp_path):
    """All of it, and nothing before: the control has a session that began 1,000 seconds ago."""
    run = spmd.Run(tmp_path / "run", step, numbers, config=dataclasses.replace(CONFIG, steps=1))
    called = time.time()
    run.train()
    took = time.time() - called
    assert 0.5 * took < measure_goodput(run.run_dir.path).total <= took
    other = dataclasses.replace(run, folder=tmp_path / "other")
    other.train(began=called - 1000)
    assert measure_goodput(other.run_dir.path).seconds["start"] > 1000


def test_a_run_rolls_back_and_skips_what_led_there(step, tmp_path, capsys):
    """To the last checkpoint; without it, the error names the batch."""
    config = dataclasses.replace(CONFIG, on_nan="roll-back")
    run = spmd.Run(tmp_path / "back", step, lambda a, b: numbers(a, b, bad=(3,)), config=config)
    assert np.isfinite(run.train().metrics["loss"])
    assert "skipping 2 batches of the data" in capsys.readouterr().out
    stops = spmd.Run(tmp_path / "stops", step, lambda a, b: numbers(a, b, bad=(3,)), config=CONFIG)
    with pytest.raises(NonFiniteError, match="sequences 24 … 31"):
        stops.train()


class Numbered:
    """Batches one after the other, with the number of the next one as a state."""

    def __init__(self, bad=(), stop=None):
        self.next, self.bad, self.stop = 0, bad, stop

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return next(numbers(self.next - 1, self.next, self.bad, self.stop))

    def get_state(self):
        """Return the number of the next batch."""
        return {"next": self.next}

    def set_state(self, state):
        """Go to a batch."""
        self.next = state["next"]


@pytest.mark.parametrize("process_batches", [False, True])
def test_a_loader_with_a_state_is_a_function_of_the_step(step, tmp_path, process_batches):
    """Resumed and rolled back, its run has the bits of that with the function; one that is not set back has not."""
    config = dataclasses.replace(CONFIG, on_nan="roll-back")
    options = {"config": config, "process_batches": process_batches}
    back = spmd.Run(tmp_path / "f", step, lambda a, b: numbers(a, b, (3,)), config=config).train()
    loader = spmd.Run(tmp_path / "back", step, Numbered((3,)), **options).train()
    assert same(loader.state, back.state)
    cut = spmd.Run(tmp_path / "cut", step, Numbered((3,), stop=7), **options)
    with pytest.raises(OSError, match="the disk is gone"):
        cut.train()
    again = dataclasses.replace(cut, batches=Numbered((3,))).train("auto")
    assert again.steps == 2  # of a checkpoint with two batches skipped before it
    assert same(again.state, back.state)
    keeps = Numbered((3,))
    keeps.set_state = lambda state: None
    assert not same(spmd.Run(tmp_path / "k", step, keeps, **options).train().state, back.state)


class Stop(spmd.Hook):
    """Stops after the third step."""

    def wants_stop(self, step):
        """Return whether to stop."""
        return step == 3


class Memory(spmd.Writer):
    """Keeps what it is given."""

    def __init__(self):
        self.rows, self.is_closed = [], False

    def write(self, step, values):
        """Keep."""
        self.rows.append((step, dict(values)))

    def close(self):
        """Close."""
        self.is_closed = True


def test_a_hook_stops_sets_are_evaluated_and_writers_write(step, tmp_path):
    """The stop is saved and can be resumed; checkpoints are ranked by the first set."""
    memory, sets = Memory(), {"near": lambda: numbers(50, 52), "far": lambda: numbers(60, 61)}
    config = dataclasses.replace(
        CONFIG,
        checkpoint_every=0,
        evaluate=spmd.EvaluationInterval(every=3),
        sdc_checks=spmd.SDCConfig(3, 3),
        log_every=5,
    )
    run = spmd.Run(
        tmp_path,
        step,
        numbers,
        config=config,
        evaluation=sets,
        evaluation_loss=loss_fn,
        hooks=[Stop()],
        writers=[memory],
    )
    result = run.train()
    assert (result.steps, result.checkpoint, result.exit_code) == (3, 3, 0)
    assert result.weights == {"near": 16, "far": 8}
    assert [step for step, _ in memory.rows] == [3, 3]  # no line was due
    assert "loss" in memory.rows[0][1]
    assert memory.rows[-1] == (3, result.evaluation)
    assert result.evaluation.keys() == {"near_loss", "far_loss"}
    assert memory.is_closed
    resumed = dataclasses.replace(run, hooks=[], writers=[]).train("always")
    assert (resumed.steps, resumed.checkpoint) == (3, 6)
    assert json.loads((tmp_path / "checkpoints/6/metrics.json").read_text()) == resumed.evaluation


def test_what_a_resumed_run_cannot_change_is_refused(step, tmp_path):
    """Own fields, the data and the size of batches, all with what they were."""
    run = spmd.Run(tmp_path, step, numbers, config=CONFIG, data="numbers")
    run.train()
    for changes, said in (
        ({"config": dataclasses.replace(CONFIG, width=5, steps=8)}, "width: was 4 and is 5"),
        ({"data": "other"}, "data: is not that with which the run was started"),
        (
            {"batch": {"x": np.zeros((16, 4)), "y": np.zeros((16, 2))}},
            "batch: had 8 examples and has 16",
        ),
    ):
        with pytest.raises(CheckpointError) as caught:
            dataclasses.replace(run, **changes).train("always")
        assert [str(problem).splitlines()[0] for problem in caught.value.problems] == [said]


def test_a_folder_without_a_config_file_cannot_be_read_by_commands(step, tmp_path):
    """Which names the argument that was missing."""
    spmd.Run(tmp_path, step, numbers, config=CONFIG).run_dir.describe(CONFIG, None, "plan")
    with pytest.raises(CheckpointError, match="started in Python"):
        RunDir(tmp_path).config()


def test_mistakes_are_told_at_once(step):
    """Each with what to give instead."""
    with pytest.raises(ConfigError) as caught:
        spmd.Run(
            "runs/x",
            step,
            [1, 2],
            config=dataclasses.replace(CONFIG, on_nan="skip"),
            evaluation={"val": []},
            hooks=[Stop],
        )
    where = [problem.where for problem in caught.value.problems]
    assert where == [
        "batches",
        "evaluation val",
        "evaluation, evaluation_loss",
        "hooks",
        "on_nan, recovery.on_spike",
    ]
    with pytest.raises(ConfigError, match="log_every"):
        OwnConfig(log_every=0)


def test_a_run_stops_early_and_resumed_it_remembers(step, tmp_path, capsys):
    """After two evaluations without a lower loss, and one step more; a longer patience goes on from the count."""
    sets = {"rising": lambda: ({"x": b["x"], "y": b["y"] + next(later)} for b in numbers(50, 51))}
    later = iter(range(100))
    config = dataclasses.replace(
        CONFIG, steps=12, evaluate=spmd.EvaluationInterval(every=1, patience=2)
    )
    run = spmd.Run(tmp_path, step, numbers, config=config, evaluation=sets, evaluation_loss=loss_fn)
    result = run.train()
    assert (result.steps, result.checkpoint, result.exit_code) == (4, 4, 0)
    assert "stopped early: 3 evaluations without a loss below" in capsys.readouterr().out
    more = dataclasses.replace(
        run, config=dataclasses.replace(config, evaluate=spmd.EvaluationInterval(1, 4))
    )
    result = more.train("auto")
    assert (result.steps, result.checkpoint) == (2, 6)
