"""Times of steps on simulated CPU devices follow from counted work and rates; what cannot be measured is an error."""

import pytest

from benchmarks import cpu_prediction
from benchmarks.cpu_prediction import MESHES, Work, count, parse_mesh, predict, report, tau
from benchmarks.cpu_rates import DEVICES, CpuRates
from spmd.errors import ConfigError

RATES = CpuRates(
    matmul=1e9,
    bytes={"cached": 1e9, "memory": 1e8, "strided": 1e8, "exponential": 1e8},
    operation=1e-6,
    collectives={("all-gather", 2): (1e-4, 1e9)},
    kept=1e-9,
    new=2e-9,
)

PROGRAM = """HloModule step, num_partitions=2

%fused (p: f32[8,4]) -> f32[4,8] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %t = f32[4,8]{LAYOUT} transpose(%p), dimensions={1,0}
}

ENTRY %main (a: f32[4,4], b: f32[8,4]) -> f32[4,8] {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %g = f32[8,4]{1,0} all-gather(%a), replica_groups={{0,1}}, dimensions={0}
  %d = f32[8,4]{1,0} dot(%g, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = f32[8,4]{1,0} add(%d, %b)
  ROOT %f = f32[4,8]{LAYOUT} fusion(%s), kind=kLoop, calls=%fused
}
"""


@pytest.mark.parametrize(("layout", "name"), [("1,0", "strided"), ("0,1", "cached")])
def test_a_program_is_counted(layout: str, name: str) -> None:
    """FLOPs, bytes and operations of all devices; a transpose is strided only if its elements change places."""
    work = count(PROGRAM.replace("LAYOUT", layout), temporaries=100)
    assert work.flops == 2 * (2 * 8 * 4 * 4)
    assert work.operations == 2 * 3
    assert work.collectives == {("all-gather", 2): (1, 8 * 4 * 4)}
    expected = {"cached": 2 * 2 * 128, "memory": 2 * 128}
    expected[name] = expected.get(name, 0) + 2 * 2 * 128
    assert work.bytes == expected
    assert (work.temporaries, work.is_new) == (200, False)


def test_time_is_work_over_rates() -> None:
    """Each line is its amount over its rate; temporaries cost more where they are new memory."""
    collectives = {("all-gather", 2): (3.0, 2e6)}
    work = Work(
        flops=2e6, bytes={"cached": 1e6, "strided": 1e6}, operations=1e3, collectives=collectives
    )
    expected = {"matmuls": 2e-3, "operations": 1e-3, "cached": 1e-3, "strided": 1e-2}
    assert predict(work, RATES) == pytest.approx(
        {**expected, "temporaries": 0.0, "collectives": 2.3e-3}
    )
    old, new = Work(temporaries=1e6), Work(temporaries=1e6, is_new=True)
    assert (
        predict(new, RATES)["temporaries"]
        == 2 * predict(old, RATES)["temporaries"]
        == pytest.approx(2e-3)
    )


def test_rank_correlation_counts_pairs() -> None:
    """τ is the share of pairs in the right order less the share of the others."""
    assert tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx((5 - 1) / 6)
    assert tau([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("own", "order", "is_met"),
    [(1.19, (2, 3, 4), True), (1.21, (2, 3, 4), False), (1.0, (4, 3, 2), False)],
)
def test_both_targets_are_judged(own: float, order: tuple[int, ...], is_met: bool) -> None:
    """The demo's own mesh within 20 % and the order of all meshes."""
    others = {str(n): (guess, n) for n, guess in zip((2, 3, 4), order, strict=True)}
    lines, found = report({MESHES[0]: (own, 1.0), **others})
    assert found == is_met
    assert f"{own - 1:+.1%}" in lines[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=3", "has 3 devices"),
        ("rows=8", "'rows=8' is none of data"),
        ("data=2,data=4", "there twice"),
        ("pipe=8", "none of data"),
        ("", "none of data"),
    ],
)
def test_a_mesh_that_cannot_be_measured(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error with a sentence, before anything is compiled."""
    with pytest.raises(ConfigError, match=message):
        parse_mesh(text)
    monkeypatch.setattr("sys.argv", ["cpu_prediction", "--mesh", text])
    assert cpu_prediction.main() == 2
    assert message in capsys.readouterr().err


def test_eight_meshes_are_compared() -> None:
    """Each is of eight devices or of one, and none is there twice."""
    shapes = {parse_mesh(name) for name in MESHES}
    assert len(shapes) == 8
    assert {shape.total() for shape in shapes} == {1, DEVICES}
