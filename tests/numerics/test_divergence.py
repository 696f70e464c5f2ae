"""A loss that is not finite or leaps stops the run, is skipped, or rolls the run back past the batches since."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd.cli import main
from spmd.data.loader import Windows, batches, load_corpus
from spmd.errors import DivergenceError, NonFiniteError, SpikeError
from spmd.loss_scaling.loss_scale import LossScale
from spmd.optim.skip_updates import skip_bad_updates, skipped_steps
from spmd.resilience.divergence import DivergenceCheck
from spmd.run.build import build_model, build_optimizer, config_mesh, make_setup
from spmd.run.load_config import load_config
from spmd.run.run_config import RecoveryConfig
from spmd.training.state import init_state
from tests.train_runs import assert_same, losses, state, write_tiny

POISON = """
import numpy as np

from spmd.data.loader import Windows

read = getattr(Windows.rows, "clean", Windows.rows)


def rows(self, indices):
    found = read(self, indices)
    # These windows of the training half are damaged; the validation half has another length.
    bad = np.isin(indices, {windows}) & (len(self) == {length})
    found[{name!r}] = np.where(bad[:, None], found[{name!r}].dtype.type({value}), found[{name!r}])
    return found


rows.clean = read
Windows.rows = rows
"""


@pytest.fixture
def clean():
    """What a poisoned config has done to `Windows` ends with the test."""
    yield
    Windows.rows = getattr(Windows.rows, "clean", Windows.rows)


def feed(hook, values, start=1):
    for step, loss in enumerate(values, start):
        hook.on_metrics(step, {"loss": loss, "gradient_norm": 1.0})


def test_a_leap_of_the_loss_is_a_spike():
    """Above the factor times the median; noise below it is not, nor is anything before enough was seen."""
    noisy = [2.0 + 0.5 * (-1) ** n for n in range(40)]
    feed(DivergenceCheck(8, factor=3.0, window=20), [50.0, 2.0, 60.0, *noisy])
    with pytest.raises(SpikeError, match=r"sequences 320 … 327 of the shuffled data") as caught:
        feed(DivergenceCheck(8, factor=3.0, window=20), [*noisy, 7.6])
    assert caught.value.step == 41
    feed(DivergenceCheck(8, factor=0.0), [*noisy, 1e9])


def test_the_position_counts_batches_that_were_passed_over():
    """After a roll-back the message still names the right sequences."""
    with pytest.raises(NonFiniteError, match=r"sequences 56 … 63 of"):
        feed(DivergenceCheck(8, skipped_batches=2), [float("nan")], start=6)


def test_what_is_not_looked_for_is_let_through():
    """With on_nan skip the step itself has left it out."""
    feed(DivergenceCheck(8, non_finite=False), [1.0, float("inf"), 1.0])


def test_an_update_with_a_leaping_gradient_is_left_out():
    """No parameter and no moment changes; the usual norm does not learn from it; a smaller one is taken again."""
    optimizer = skip_bad_updates(optax.adam(0.1), factor=4.0)
    params = {"w": jnp.ones(3)}
    opt_state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for n in range(50):
        _, opt_state = update({"w": jnp.ones(3) * (1 + 0.1 * (n % 3))}, opt_state, params)
    usual = opt_state.usual_norm
    updates, after = update({"w": jnp.full(3, 5.0)}, opt_state, params)
    assert_same(updates, {"w": np.zeros(3)})
    assert_same(after.inner, opt_state.inner)
    assert (int(skipped_steps(after)), float(after.usual_norm)) == (1, float(usual))
    updates, after = update({"w": jnp.full(3, 3.0)}, after, params)
    assert np.all(updates["w"] != 0)
    assert int(skipped_steps(after)) == 1
    # the control: without a factor the same gradient is taken
    free = skip_bad_updates(optax.adam(0.1))
    assert np.all(free.update({"w": jnp.full(3, 5.0)}, opt_state, params)[0]["w"] != 0)


def test_the_window_of_the_config_is_that_of_skipping(tmp_path):
    """A norm that leaps after 6 updates is skipped where the window is 4, and taken where it is 50, the default."""
    config = load_config(str(write_tiny(tmp_path)))
    params = {"w": jnp.ones((2, 3))}

    def skipped_batches(window, *norms):
        recovery = dataclasses.replace(
            config.recovery, on_spike="skip", spike_factor=4.0, spike_window=window
        )
        chosen = dataclasses.replace(config, recovery=recovery)
        optimizer = build_optimizer(chosen, build_model(chosen))
        opt_state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for norm in norms:
            _, opt_state = update({"w": jnp.full((2, 3), norm)}, opt_state, params)
        return int(skipped_steps(opt_state))

    assert [skipped_batches(window, *[1.0] * 6, 5.0) for window in (4, 50)] == [1, 0]
    # once both are past their beginning, a short window has forgotten what was before a rise that
    # was slow enough
    rise = [*[1.0] * 40, *[3.0] * 10, 9.0]
    assert [skipped_batches(window, *rise) for window in (4, 50)] == [0, 1]


def train(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "train",
                *map(str, arguments),
                "--devices",
                "8",
                "--steps",
                "12",
                "--checkpoint-every",
                "4",
            ]
        )
    return caught.value.code


def expected(path):
    """The parameters after 12 steps that pass over batches 4, 5 and 6 of the order (from 0), by hand."""
    config = dataclasses.replace(load_config(str(path)), steps=12)
    setup = make_setup(config, config_mesh(config))
    windows = Windows(load_corpus(setup.config.data).train, config.data.sequence)
    sharding = setup.plan.batch_sharding("tokens")
    at = init_state(setup.plan, config.seed)
    for first, last in ((0, 4), (7, 15)):
        with batches(
            windows, batch=8, sharding=sharding, seed=0, start=first, steps=last
        ) as stream:
            for batch in stream:
                at, _ = setup.step(at, batch)
    return jax.tree.map(np.asarray, at)


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("weights", "np.nan", ("--on-nan", "roll-back")),
        pytest.param(
            "targets",
            "255",
            ("--recovery.on-spike", "roll-back", "--recovery.spike-window", "4"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_run_rolls_back_behind_the_batches_that_led_there(
    tmp_path, capsys, clean, name, value, flags
):
    """Step 7's batch is damaged: back to step 4, on with batch 7, bitwise as trained without batches 4 to 6."""
    path = write_tiny(tmp_path)
    config = load_config(str(path))
    setup = make_setup(config, config_mesh(config))
    windows = Windows(load_corpus(setup.config.data).train, 16)
    with batches(
        windows, batch=8, sharding=setup.plan.batch_sharding("tokens"), seed=0, start=6, steps=7
    ) as stream:
        rows = np.asarray(next(stream)["tokens"])
    every = windows.rows(np.arange(len(windows)))["tokens"]
    damaged = [int(np.flatnonzero((every == row).all(axis=1))[0]) for row in rows]
    flags = (*flags, "--recovery.spike-factor", "1.4")
    out = tmp_path / "run"
    poisoned = write_tiny(
        tmp_path, POISON.format(windows=damaged, length=len(windows), name=name, value=value)
    )

    assert (
        train(poisoned, "--out", tmp_path / "stopped", "--recovery.on-spike", "stop", *flags[2:])
        == 2
    )
    assert "step 7: its batch is sequences 48 … 55" in capsys.readouterr().err

    if name == "weights":  # a single bad step may be skipped, and is counted with itself
        assert train(poisoned, "--out", tmp_path / "skipped", "--on-nan", "skip") == 0
        printed = capsys.readouterr().out
        lines = [
            json.loads(line)
            for line in (tmp_path / "skipped" / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["skipped_steps"] for line in lines if "loss" in line] == [0] * 6 + [1] * 6
        assert [line["step"] for line in lines if line.get("loss", 0) is None] == [7]
        assert "skipped 0" in printed

    assert train(poisoned, "--out", out, *flags) == 0
    printed = capsys.readouterr().out
    assert "rolling back (1 of at most 3 times)" in printed
    assert "skipping 3 batches of the data" in printed
    assert list(losses(out)) == list(range(1, 13))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("skipped_batches", 0) for line in lines if "loss" in line] == [0] * 4 + [3] * 8
    Windows.rows = Windows.rows.clean
    wanted = expected(write_tiny(tmp_path))
    found = state(path, out, 12, fsdp=8)
    assert_same(found.params, wanted.params)
    assert_same(found.optimizer_state, wanted.optimizer_state)


def test_a_run_that_fails_again_and_again_stops(tmp_path, capsys, clean):
    """The number of roll-backs is bounded, and the last error is shown."""
    path = write_tiny(
        tmp_path,
        POISON.format(windows="indices", length="len(self)", name="weights", value="np.nan"),
    )
    assert (
        train(path, "--out", tmp_path / "run", "--on-nan", "roll-back", "--recovery.rollbacks", "2")
        == 2
    )
    printed = capsys.readouterr()
    assert "rolling back (2 of at most 2 times)" in printed.out
    assert "loss is nan" in printed.err


@pytest.mark.soak
def test_a_run_that_skips_every_step_stops_before_its_last_save(tmp_path, capsys, clean):
    """After so many in a row, or at its last step; every line counts its own step; no file has a NaN."""
    path = write_tiny(
        tmp_path,
        POISON.format(windows="indices", length="len(self)", name="weights", value="np.nan"),
    )
    for more, step, field in (
        (("--recovery.skips-in-a-row", 5), 6, "skips_in_a_row"),
        ((), 12, "skipped_share"),
    ):
        out = tmp_path / field
        assert train(path, "--out", out, "--on-nan", "skip", *more) == 2
        printed = capsys.readouterr()
        assert f"Step {step} was skipped" in printed.err
        assert f"recovery.{field}: is exceeded" in printed.err
        assert "skipped 5 " in printed.out
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [line["skipped_steps"] for line in lines] == list(range(1, step))
        assert "NaN" not in (out / "metrics.jsonl").read_text()
        assert not (out / "checkpoints" / "12").exists()
        assert events(out / "tensorboard").isdisjoint({"loss", "gradient_norm"})
        assert "skipped_steps" in events(out / "tensorboard")


def events(folder):
    """The tags of all event files of a folder."""
    data = b"".join(path.read_bytes() for path in folder.iterdir())
    return {
        tag
        for tag in ("loss", "gradient_norm", "skipped_steps")
        if b"\n" + bytes([len(tag)]) + tag.encode() in data
    }


def skipping(flags, **options):
    """The step at which a run stops whose steps are skipped where a flag is 1; None if it does not."""
    check, skipped = DivergenceCheck(8, non_finite=False, **options), 0
    check.on_start(0)
    for step, flag in enumerate(flags, 1):
        skipped += flag
        try:
            check.on_metrics(
                step, {"loss": 1.0, "gradient_norm": 1.0, "skipped_steps": float(skipped)}
            )
        except DivergenceError:
            return step
    return None


def test_skipped_steps_are_limited_in_a_row_and_in_all():
    """One too many in a row; a share of all, once more were skipped than may be in a row; at a skipped last step."""
    limits = {"skips_in_a_row": 4, "skipped_share": 0.25, "steps": 20}
    assert skipping([1, 1, 1, 1, 0] + 20 * [0, 0, 0], **limits) is None
    assert skipping([1, 1, 1, 1, 1], **limits) == 5
    assert skipping(20 * [0, 1], **limits) == 10
    assert skipping(4 * [0, 0, 0, 1], **limits) is None
    assert skipping([1, 1], **{**limits, "steps": 2}) == 2
    assert skipping([1, 1, 0], **{**limits, "steps": 3}) is None
    assert skipping(100 * [1]) is None  # the control: without limits


def test_the_search_of_fp16_for_its_scale_is_within_the_limits():
    """From the initial loss scale to its floor, every step skipped, is no reason to stop by default."""
    scaling = LossScale()
    state, steps = jax.tree.map(np.asarray, scaling.start()), 0
    while state["scale"] > scaling.floor:
        state, steps = jax.tree.map(np.asarray, scaling.after(state, jnp.array(False))), steps + 1
    limits = RecoveryConfig()
    share = {
        "skips_in_a_row": limits.skips_in_a_row,
        "skipped_share": limits.skipped_share,
        "steps": 1000,
    }
    assert steps == 11
    assert skipping(steps * [1] + 40 * [0], **share) is None
    assert skipping(21 * [1], **share) == 21
