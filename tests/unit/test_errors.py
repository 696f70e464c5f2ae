"""An error of a user's code ends with its reason, and an error of `spmd` about one has all of it."""

import contextlib
import sys
from pathlib import Path

import jax
import optax
import pytest

import spmd
from spmd.errors import ConfigError, Problem, RuleError, SpmdError, Together, print_traceback
from spmd.hf.save import whole_folder
from spmd.optim.extra_args import check_update
from spmd.run.run_dir import RunDir

A, B = Problem("a", "is 0"), Problem("b", "is 1")


def raised(added: list[Exception], last: Exception | None = None) -> ConfigError | RuleError:
    """What a block raises in which errors are added, and which one may end."""
    try:
        with Together("Both:") as errors:
            for error in added:
                errors.add(error)
            if last:
                raise last
    except (ConfigError, RuleError) as caught:
        return caught
    raise AssertionError


def test_errors_are_raised_together():
    """With each problem once, equal ones too; an error that has all of them is raised itself."""
    both = raised([ConfigError("One:", [A, A])], RuleError("Two:", [B]))
    assert (type(both), both.title, both.problems) == (ConfigError, "Both:", (A, B))
    assert raised([ConfigError("One:", [A])]).title == "One:"
    assert raised([], RuleError("Two:", [B])).title == "Two:"
    whole = raised([ConfigError("One:", [A])], RuleError("Two:", [A, B]))
    assert (type(whole), whole.title) == (RuleError, "Two:")


def test_without_a_problem_nothing_is_raised():
    """And errors of other kinds go through as they are."""
    with Together("Both:") as errors:
        errors.add(ConfigError("One:"))

    def fail() -> None:
        with Together("Both:") as errors:
            errors.add(ConfigError("One:", [A]))
            raise KeyError("of another")

    with pytest.raises(KeyError):
        fail()


def failing() -> Exception:
    """An error of a user's function, with the note that JAX adds where it leaves out its own frames."""
    try:
        jax.eval_shape(jax.jit(lambda x: x @ x[:, 0]), jax.ShapeDtypeStruct((3, 4), "float32"))
    except TypeError as error:
        return error
    raise AssertionError


@pytest.mark.compat
def test_the_reason_of_an_error_is_printed_last(capsys):
    """Also where it is the cause of another one; JAX's note comes first; control: Python alone ends with the note."""
    error = failing()
    outer = RuntimeError("the step failed")
    outer.__cause__ = error
    outer.add_note("of step 3")
    sys.__excepthook__(type(error), error, error.__traceback__)
    assert "internal frames" in capsys.readouterr().err.splitlines()[-1]
    for each, last in ((error, "dot_general"), (outer, "of step 3")):
        print_traceback(type(each), each, each.__traceback__)
        first, *lines = capsys.readouterr().err.splitlines()
        assert "JAX has removed its internal frames" in first
        assert "JAX_TRACEBACK_FILTERING" not in "".join(lines)
        assert last in lines[-1]
        assert "test_errors.py" in "".join(lines)
    assert any("internal frames" in note for note in error.__notes__), (
        "the error itself does not change"
    )


def test_an_error_says_all_of_its_reason():
    """Of a loop whose carry changes its type, JAX says so in later lines than the first; control: its first line."""

    def update(updates, state, params=None):
        return jax.lax.fori_loop(0, 2, lambda _, x: x[None], updates), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    (problem,) = check_update(optimizer, jax.ShapeDtypeStruct((3,), "float32"))
    assert "float32[1,3]" in problem.what
    assert "float32[1,3]" not in problem.what.splitlines()[0]


BUCKET = "gs://bucket/a"


@pytest.mark.parametrize(
    ("where", "use"),
    [
        ("compiled_step", lambda path: spmd.RunConfig(compiled_step=path)),
        ("folder", lambda path: RunDir(Path(path))),
        ("out", lambda path: contextlib.ExitStack().enter_context(whole_folder(Path(path)))),
    ],
)
def test_buckets_are_refused_by_name(where, use, tmp_path, monkeypatch):
    """Before anything is written, with what to do instead; the control is a local path with a colon."""
    monkeypatch.chdir(tmp_path)
    for path in (BUCKET, BUCKET.replace("gs", "s3")):
        with pytest.raises(SpmdError) as caught:
            use(path)
        (problem,) = caught.value.problems
        assert problem.where == where
        assert path in problem.what
        assert "gcsfuse" in problem.fix
    assert list(tmp_path.iterdir()) == []
    use("runs/at 12:30/s3")
