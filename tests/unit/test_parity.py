"""What a parity test says of two arrays, and of many rows."""

import dataclasses
import json
import math

import numpy as np

from spmd.parity.result import compare_leaf, worst_of_each
from spmd.testing import TOLERANCES, Parity, Row

ROW = Row("gradients", "w", 0.0, 1e-4, step=2)
NAN = math.nan


def leaf(found, expected, scale=2.0, **allowed):
    """The row of a leaf whose largest value is `scale`."""
    return compare_leaf(
        ROW, np.array(found, np.float32), np.array(expected, np.float32), scale, allowed
    )


def test_a_difference_is_relative_to_the_largest_value():
    """The error is the largest difference over the largest value; the tolerance is the kind's."""
    row = leaf([2.0, 0.5], [2.0, 1.0])
    assert (row.error, row.tolerance, row.ok, row.why) == (0.25, 1e-4, False, "")
    assert leaf([2.0, 1.0], [2.0, 1.0]).ok


def test_what_float32_cannot_tell_apart_is_allowed_and_named():
    """The largest reason replaces a smaller tolerance, and no larger one."""
    row = leaf([2.0, 0.5], [2.0, 1.0], noise=1.0, floor=0.1)
    assert (row.tolerance, row.ok, row.why) == (0.5, True, "noise")
    assert not leaf([2.0, 0.5], [2.0, 1.0], noise=0.4).ok
    assert leaf([2.0, 1.0], [2.0, 1.0], noise=1e-5) == dataclasses.replace(ROW, error=0.0)


def test_a_leaf_that_is_zero_is_compared_absolutely():
    """Where nothing gives a scale, the difference itself is the error."""
    assert leaf([1e-3], [0.0], scale=0.0).error == np.float32(1e-3)


def test_nan_on_both_sides_is_no_difference_and_is_said():
    """Values that are not finite in the same places are not compared; what is finite beside them is compared."""
    row = leaf([NAN, 2.0], [NAN, 2.0])
    assert (row.error, row.ok, row.why) == (0.0, True, "nan on both sides, in 1 of 2")
    assert not leaf([NAN, 1.0], [NAN, 2.0]).ok


def test_nan_on_one_side_alone_fails():
    """On either side, and in other places, whatever the tolerance is."""
    for found, expected in (
        ([NAN, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [math.inf, 1.0]),
        ([NAN, 1.0], [1.0, NAN]),
    ):
        row = leaf(found, expected, noise=1e9)
        assert (row.error, row.ok) == (math.inf, False)
        assert row.why.startswith("not finite: ")


def parity(*rows, stopped=0):
    return Parity((1.0, 2.0), (1.0, NAN), rows, TOLERANCES["float32"], stopped)


def test_of_each_leaf_the_step_where_it_differs_most_is_kept():
    """The largest error in units of its tolerance; of equal ones the tightest tolerance, then the first."""
    rows = [Row("updates", "w", error, tolerance, step=step) for step, error, tolerance in MANY]
    assert [row.step for row in worst_of_each(rows)] == [3]
    assert [
        row.step for row in worst_of_each(dataclasses.replace(row, error=0.0) for row in rows)
    ] == [2]


MANY = ((1, 0.5, 1.0), (2, 1e-5, 1e-4), (3, 9e-4, 1e-3), (4, 0.0, 1e-4))


def test_the_text_has_the_worst_of_each_kind_every_failure_and_the_blunt():
    """A leaf whose tolerance would not show an error of 1 % is named; others that pass are not shown."""
    rows = [Row("loss", "", 0.0, 1e-5, step=1), Row("gradients", "a", 2.0, 1e-4, step=2)]
    rows += [Row("gradients", "b", 1.0, 1e-4, step=2), Row("gradients", "c", 0.1, 3e2, "noise", 1)]
    text = str(parity(*rows, Row("gradients", "hidden", 0.0, 1e-4, step=1)))
    assert [line.split()[:2] for line in text.splitlines()[:3]] == [
        ["loss", "step"],
        ["gradients", "a"],
        ["gradients", "b"],
    ]
    assert text.endswith("1 more with a tolerance above 1e-02: gradients of c")
    assert "hidden" not in text


def test_json_has_every_row_and_no_nan():
    """NaN and infinity are strings; the step, the reason and the early end are there."""
    report = parity(Row("gradients", "a", math.inf, 1e-4, "not finite", 2), stopped=2).to_json()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["reference"] == [1.0, "nan"]
    assert report["stopped"] == 2
    assert report["rows"] == [
        {
            "what": "gradients",
            "path": "a",
            "step": 2,
            "error": "inf",
            "tolerance": 1e-4,
            "ok": False,
            "why": "not finite",
        }
    ]
    assert not report["ok"]
    assert "step 2 leaves parameters that are nan on both sides" in parity(stopped=2).ending
    assert parity().ending == ""
