"""Backtest of the predicted step time against published throughput.

    python -m benchmarks.backtest
    python -m benchmarks.backtest --rows FILE --shipped
    python -m benchmarks.backtest --compile --json

Each row (`benchmarks/published_throughput.json`, or FILE) is rebuilt by
`benchmarks.published_rows`, and its tokens/s of one chip are predicted by closed forms; with
`--compile`, those of dense TPU rows by the schedule of the compiled program
(`benchmarks.backtest_compile`).

Rates are fitted for each chip on the rows of all model families but one, and that one is predicted;
a chip with one family is fitted on it. Dense steps of 16 bits are fitted first, then the rate of
8-bit products, then that of experts, so that no row changes what others show. A GPU without dense
rows starts from the rates of an H100. With `--shipped`, the rates of `spmd/chips.py` predict
instead, and nothing is fitted.

The baseline is one constant MFU of each chip and kind of step, the median of the same folds. Of
each chip and kind are printed: rows, mean absolute error, the baseline's, the range (nine of ten
rows of other families), the share of rows in the range that the other families give, and Kendall's
rank correlation within families of five rows.

`--fit` prints the rates fitted on all rows, for the entries of `spmd/chips.py`.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from benchmarks.backtest_compile import CompiledRow, compile_rows, describe, make_config
from benchmarks.published_rows import ROWS, Rebuilt, Row, chip_kind, read_rows, rebuild
from spmd.chips import CHIPS, ClosedRates, Rates
from spmd.errors import SpmdError
from spmd.run.build import make_setup
from spmd.run.planned_step import estimate_step
from spmd.sharding.mesh import abstract_mesh
from spmd.step_time.closed_form import closed_form

CLOSED_PRIORS = {
    "cuda": ClosedRates(
        matmul=0.8,
        half=500,
        attention=0.5,
        passes=1.6,
        exposed=1.0,
        hop=3e-5,
        exposed_tensor=1.0,
        eight_bits=0.9,
        experts=0.6,
    ),
    "tpu": ClosedRates(
        matmul=0.72,
        half=300,
        attention=0.6,
        passes=1.5,
        exposed=0.5,
        hop=1e-5,
        exposed_tensor=0.4,
        eight_bits=0.9,
        experts=0.6,
    ),
}
"""Rates before any row of a chip is seen; a fit is drawn to them, so that few rows move what
they show."""

COMPILED_PRIOR = Rates()
_CLOSED_NAMES = (
    "matmul",
    "half",
    "attention",
    "passes",
    "exposed",
    "exposed_tensor",
    "hop",
    "straggling",
)
_COMPILED_NAMES = ("matmul", "memory", "attention", "network", "straggling")
_SHARES = ("exposed", "exposed_tensor")
"""Rates that are at most about 1."""
_KIN = {"h200": "h100", "b200": "h100", "b300": "h100", "gb200": "h100", "gb300": "h100"}
"""Chip without dense rows → chip whose rates its fit starts from."""
_PULL = 0.25
"""Weight of a relative deviation from the prior, where that of a row's relative error is 1."""
_TOLERANCE = 0.1  # relative error above which a row pulls less than in proportion
_BOUNDS = 6.0  # a rate stays within this factor of its prior
_FAMILY = 5
"""Fewest rows of a family whose order is judged."""
_LEAST_SPREAD = 0.05
_FEW = 4
"""Families, below which the largest error is the range, and half as much again."""
_ONE_FAMILY = 0.3
"""Least half of the range of a kind of step that one family alone shows."""

Predict = Callable[[Rebuilt, Any], float]
Fit = Callable[[Sequence[Rebuilt]], Any]


def predict_closed(job: Rebuilt, rates: ClosedRates) -> float:
    """Return the tokens in a second on one chip, by closed forms."""
    rates = dataclasses.replace(rates, attention=rates.attention * job.attention_speed)
    return job.tokens_per_second(sum(closed_form(job.work, job.network, rates).values()))


def fit(jobs: Sequence[Rebuilt], predict: Predict, prior: Any, names: Sequence[str]) -> Any:
    """Return the rates that fit rows best: relative errors, with a pull to the prior.

    Args:
        names: Fields of the prior that are fitted.
    """
    if not jobs:
        return prior
    start = np.log([getattr(prior, name) for name in names])

    def rates(x: np.ndarray) -> Any:
        return dataclasses.replace(prior, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def errors(x: np.ndarray) -> np.ndarray:
        found = rates(x)
        rows = [np.log(predict(job, found) / job.published) for job in jobs]
        return np.array([*rows, *(_PULL * (x - start))])

    bounds = (start - np.log(_BOUNDS), start + np.log(_BOUNDS))
    return rates(least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=_TOLERANCE).x)


def fit_closed(jobs: Sequence[Rebuilt], prior: ClosedRates) -> ClosedRates:
    """Return the rates of closed forms that fit the rows of one chip, one kind after the other."""
    dense = [job for job in jobs if job.kind == "dense"]
    narrow = [job for job in jobs if job.kind in ("8 bits", "pipelines")]
    experts = [job for job in jobs if job.kind == "experts"]
    rates: ClosedRates = fit(dense, predict_closed, prior, _CLOSED_NAMES)
    names = ["eight_bits"]
    if not dense:
        names += _CLOSED_NAMES
    rates = fit(narrow, predict_closed, rates, names)
    return fit(experts, predict_closed, rates, ["experts"])


def family(job: Rebuilt) -> str:
    """Return the model family of a row: rows of one model belong together."""
    return str(job.row["model"])


def leave_one_out(
    jobs: Sequence[Rebuilt], predict: Predict, make_rates: Fit
) -> tuple[list[float], list[float]]:
    """Return the prediction and the baseline of each row, fitted on the rows of other families."""
    predicted, baseline = dict[int, float](), dict[int, float]()
    for held in sorted({family(job) for job in jobs}):
        others = [job for job in jobs if family(job) != held] or list(jobs)
        found = make_rates(others)
        for job in jobs:
            if family(job) == held:
                predicted[id(job)] = predict(job, found)
                baseline[id(job)] = _constant_mfu(job, others)
    return [predicted[id(job)] for job in jobs], [baseline[id(job)] for job in jobs]


def _constant_mfu(job: Rebuilt, others: Sequence[Rebuilt]) -> float:
    """Return the tokens/s of a row with the median MFU of others, of its kind if there are some."""
    alike = [other for other in others if other.kind == job.kind] or others
    flops = [other.published * other.flops_per_token for other in alike]
    return statistics.median(flops) / job.flops_per_token


def spread(jobs: Sequence[Rebuilt], predicted: Sequence[float]) -> float:
    """Return the half of a range that nine of ten steps of another family are in.

    Steps are as long as predicted, multiplied or divided by at most 1 + the result.
    """
    wrong = sorted(map(_factor, jobs, predicted))
    families = len({family(job) for job in jobs})
    if families == 1:
        return max(_ONE_FAMILY, 1.5 * wrong[-1])
    if families < _FEW:
        return max(_LEAST_SPREAD, 1.5 * wrong[-1])
    # The rank of a further row among them is at most this one, nine times of ten.
    rank_of = min(len(wrong), math.ceil(0.9 * (len(wrong) + 1)))
    return max(_LEAST_SPREAD, wrong[rank_of - 1])


def _factor(job: Rebuilt, predicted: float) -> float:
    """Return by how much a prediction is off, as the larger of both quotients, less 1."""
    ratio = predicted / job.published
    return max(ratio, 1 / ratio) - 1


def held_share(jobs: Sequence[Rebuilt], predicted: Sequence[float]) -> float | None:
    """Return the share of rows in the range that the other families give; None for one family."""
    pairs = list(zip(jobs, predicted, strict=True))
    inside = []
    for held in {family(job) for job in jobs}:
        others = [pair for pair in pairs if family(pair[0]) != held]
        if not others:
            return None
        limit = spread(*zip(*others, strict=True))
        inside += [_factor(*pair) <= limit for pair in pairs if family(pair[0]) == held]
    return statistics.mean(inside)


def error(jobs: Sequence[Rebuilt], predicted: Sequence[float]) -> float:
    """Return the mean absolute relative error."""
    return statistics.mean(
        abs(p / job.published - 1) for job, p in zip(jobs, predicted, strict=True)
    )


def rank(jobs: Sequence[Rebuilt], predicted: Sequence[float]) -> dict[str, float]:
    """Return family → Kendall's τ of its rows."""
    groups = collections.defaultdict(list)
    for job, p in zip(jobs, predicted, strict=True):
        groups[family(job)].append((job.published, p))
    found = {}
    for name, pairs in groups.items():
        if len(pairs) < _FAMILY:
            continue
        tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
        if not math.isnan(tau):  # of equal predictions there is no order
            found[name] = tau
    return found


_SLOPES: Mapping[str, Callable[[Rebuilt], float]] = {
    "slices": lambda job: job.topology.slices,
    "sequence": lambda job: job.work.sequence,
    "tensor": lambda job: job.work.mesh["tensor"],
}


def slopes(jobs: Sequence[Rebuilt], predicted: Sequence[float]) -> list[str]:
    """Return changes of speed, published and predicted, between rows of one model that differ in little else."""
    lines = []
    for what, key in _SLOPES.items():
        groups = collections.defaultdict(list)
        for job, p in zip(jobs, predicted, strict=True):
            alike = [other(job) for name, other in _SLOPES.items() if name != what]
            each = job.topology.chips // job.topology.slices
            groups[family(job), job.row["remat"], each, *alike].append((key(job), job.published, p))
        for (name, *_), rows in groups.items():
            (a, before, guess), (b, after, guessed) = min(rows), max(rows)
            if a != b:
                change = f"{after / before - 1:+.1%}, predicted {guessed / guess - 1:+.1%}"
                lines.append(f"{name}, {what} {a} → {b}: {change}")
    return lines


@dataclasses.dataclass(frozen=True)
class KindResult:
    """Backtest of one kind of step on one chip.

    Attributes:
        mape: Mean absolute error; `baseline`: that of a constant MFU.
        spread: Half of the range; None if it is not known.
        held: Share of rows in the range of the other families, or in that of the shipped rates;
            None for one family.
        tau: Family → Kendall's τ.
    """

    rows: int
    families: int
    mape: float
    baseline: float
    spread: float | None
    held: float | None
    tau: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class ChipResult:
    """Backtest of one chip."""

    rows: int
    built: int
    mape: float
    baseline: float
    kinds: Mapping[str, KindResult]
    rates: Any
    slopes: Sequence[str]
    predictions: Sequence[tuple[Rebuilt, float]]


def backtest(
    jobs: Sequence[Rebuilt],
    rows: int,
    predict: Predict,
    make_rates: Fit,
    shipped: ClosedRates | None = None,
) -> ChipResult:
    """Backtest the rows of one chip; with `shipped`, ranges are those of its kinds of steps."""
    predicted, baseline = leave_one_out(jobs, predict, make_rates)
    kinds = {}
    for kind in dict.fromkeys(job.kind for job in jobs):
        chosen = [job.kind == kind for job in jobs]
        of_kind = list(itertools.compress(jobs, chosen))
        guesses = list(itertools.compress(predicted, chosen))
        limit: float | None = spread(of_kind, guesses)
        held = held_share(of_kind, guesses)
        if shipped is not None:
            limit = shipped.spread_of(kind)
            held = _share_within(of_kind, guesses, limit)
        kinds[kind] = KindResult(
            rows=len(of_kind),
            families=len({family(job) for job in of_kind}),
            mape=error(of_kind, guesses),
            baseline=error(of_kind, list(itertools.compress(baseline, chosen))),
            spread=limit,
            held=held,
            tau=rank(of_kind, guesses),
        )
    return ChipResult(
        rows=rows,
        built=len(jobs),
        mape=error(jobs, predicted),
        baseline=error(jobs, baseline),
        kinds=kinds,
        rates=make_rates(jobs),
        slopes=slopes(jobs, predicted),
        predictions=list(zip(jobs, predicted, strict=True)),
    )


def _share_within(
    jobs: Sequence[Rebuilt], predicted: Sequence[float], limit: float | None
) -> float | None:
    """Return the share of rows in a range."""
    if limit is None:
        return None
    return statistics.mean(factor <= limit for factor in map(_factor, jobs, predicted))


Results = tuple[dict[str, ChipResult], dict[int, str]]


def run(
    rows: Sequence[Row], compiled: Mapping[int, CompiledRow] | None, shipped: bool = False
) -> Results:
    """Backtest the rows of all chips.

    Return kind of chip → result, and number of a row → why it is in none.
    """
    found = {number: rebuild(row) for number, row in enumerate(rows)}
    reasons = {number: job for number, job in found.items() if isinstance(job, str)}
    jobs = {n: job for n, job in found.items() if isinstance(job, Rebuilt)}
    if compiled is not None:
        jobs = {n: job for n, job in jobs.items() if n in compiled}
    programs = {id(found[number]): program for number, program in (compiled or {}).items()}

    def predict_compiled(job: Rebuilt, rates: Rates) -> float:
        return programs[id(job)].tokens_per_second(job, rates)

    results = {}
    for chip in dict.fromkeys(job.chip for job in jobs.values()):
        mine = [job for job in jobs.values() if job.chip == chip]
        total = len(mine) + sum(chip_kind(rows[number]) == chip for number in reasons)
        if compiled is None:
            make_rates = _closed_fit(chip, list(jobs.values()), shipped)
            rates = CHIPS[chip].closed if shipped else None
            results[chip] = backtest(mine, total, predict_closed, make_rates, rates)
            continue
        others = [job for job in jobs.values() if job.chip != chip]
        results[chip] = backtest(
            mine, total, predict_compiled, _compiled_fit(others, predict_compiled)
        )
    return results, reasons


def _closed_fit(chip: str, jobs: Sequence[Rebuilt], shipped: bool) -> Fit:
    """Return the fit of closed forms for one chip; all of `jobs` are at hand for its kin."""
    if shipped:
        rates = CHIPS[chip].closed
        return lambda _: rates
    prior = CLOSED_PRIORS[CHIPS[chip].platform]

    def make_rates(mine: Sequence[Rebuilt]) -> ClosedRates:
        start = prior
        if chip in _KIN and not any(job.kind == "dense" for job in mine):
            kin = [job for job in jobs if job.chip == _KIN[chip]]
            start = fit_closed(kin, prior)
        return fit_closed(mine, start)

    return make_rates


def _compiled_fit(others: Sequence[Rebuilt], predict: Predict) -> Fit:
    """Return the fit of compiled programs for one chip, which is drawn to that of other chips."""

    def make_rates(mine: Sequence[Rebuilt]) -> Any:
        families = {family(job) for job in mine}
        kin = [job for job in others if family(job) in families]
        start = fit(kin, predict, COMPILED_PRIOR, _COMPILED_NAMES)
        return fit(mine, predict, start, _COMPILED_NAMES)

    return make_rates


def memory_lines(jobs: Iterable[Rebuilt]) -> Iterator[str]:
    """Yield the memory of rows that have it: the peak of PyTorch's allocator, and our ledger's estimate."""
    for job in jobs:
        if published := job.row.get("memory_gib"):
            what = f"{job.row['model']} on {job.topology}, {job.row['precision']}"
            try:
                config = make_config(describe(job))
                setup = make_setup(config, abstract_mesh(config.mesh))
            except SpmdError as error:  # such as layers that do not divide over stages
                reason = " ".join(str(error).split())
                yield f"memory of {what}: {published} GiB, not estimated: {reason}"
                continue
            estimate = estimate_step(setup, job.topology.platform).total / 2**30
            yield f"memory of {what}: {published} GiB, estimated {estimate:.1f} GiB ({estimate / published - 1:+.1%})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default=str(ROWS), metavar="FILE", help="published rows, a JSON list"
    )
    parser.add_argument(
        "--shipped", action="store_true", help="predict by the rates of spmd/chips.py, fit none"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the rows of TPUs and read their schedules"
    )
    parser.add_argument(
        "--cache",
        default="build/backtest",
        metavar="FOLDER",
        help="compiled programs, to resume from",
    )
    parser.add_argument("--workers", type=int, default=2, help="programs compiled at a time")
    parser.add_argument("--json", action="store_true", help="print one object, chip → figures")
    parser.add_argument("--fit", action="store_true", help="print the rates fitted on all rows")
    parser.add_argument("--verbose", action="store_true", help="print a line for each row")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers is {options.workers}: 1 or more")
    try:
        rows = read_rows(options.rows)
    except SpmdError as problem:
        print(f"backtest: {problem}", file=sys.stderr)
        return 2
    jobs = {n: job for n, row in enumerate(rows) if isinstance(job := rebuild(row), Rebuilt)}
    compiled, failed = (
        compile_rows(jobs, options.cache, options.workers) if options.compile else (None, {})
    )
    results, reasons = run(rows, compiled, options.shipped)
    reasons |= failed
    if options.json:
        print(json.dumps({chip: _json(result) for chip, result in results.items()}, indent=2))
        return 0
    _print(results, reasons, rows, options.fit, options.verbose)
    for line in memory_lines(jobs.values()):
        print(line)
    return 0


def _json(result: ChipResult) -> dict[str, Any]:
    kinds = {kind: dataclasses.asdict(found) for kind, found in result.kinds.items()}
    figures = ("rows", "built", "mape", "baseline")
    return {name: getattr(result, name) for name in figures} | {"kinds": kinds}


def _print(
    results: Mapping[str, ChipResult],
    reasons: Mapping[int, str],
    rows: Sequence[Row],
    fitted: bool,
    verbose: bool,
) -> None:
    print(
        f"{'chip':12}{'kind':12}{'rows':>5}{'families':>9}{'error':>8}{'constant MFU':>14}"
        f"{'range':>9}{'held':>7}  rank correlation (τ) in families"
    )
    for chip, result in results.items():
        for kind, found in result.kinds.items():
            print(_line(chip, kind, found))
    for chip, result in results.items():
        for line in result.slopes:
            print(f"{chip}: {line}")
        if verbose:
            for job, predicted in result.predictions:
                print(f"{chip}: {_row_text(job, predicted)}")
        if fitted:
            print(f"{chip}: {_with_spreads(result)}")
    counts = collections.Counter(
        (reason, rows[number]["chip"]) for number, reason in reasons.items()
    )
    built = len(rows) - len(reasons)
    print(f"{built} of {len(rows)} rows are built ({built / len(rows):.1%})")
    for (reason, chip), count in counts.items():
        print(f"not rebuilt: {count} of {chip}: {reason}")


def _row_text(job: Rebuilt, predicted: float) -> str:
    row = job.row
    mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    how = f"{row['seq']} tokens, {row['remat'][:20]}, {row['precision'][:12]}"
    off = f"{predicted / job.published - 1:+.1%}"
    speeds = f"{job.published:.5g}, predicted {predicted:.5g} ({off})"
    return f"{row['model']} on {job.topology}, {mesh}, {how}: {speeds}"


def _line(chip: str, kind: str, found: KindResult) -> str:
    taus = ", ".join(f"{name} {tau:.2f}" for name, tau in found.tau.items())
    held = "" if found.held is None else f"{found.held:.0%}"
    spread = "unknown" if found.spread is None else f"{found.spread:.0%}"
    return (
        f"{chip:12}{kind:12}{found.rows:5}{found.families:9}{found.mape:8.1%}"
        f"{found.baseline:14.1%}{spread:>9}{held:>7}  {taus}"
    )


def _with_spreads(result: ChipResult) -> Any:
    """Return the rates of a chip with the ranges of its kinds of steps."""
    spreads = {}
    for kind, found in result.kinds.items():
        if found.spread is not None:
            spreads[kind] = round(found.spread, 2)
    dense = spreads.pop("dense", result.rates.spread)
    rates = dataclasses.replace(result.rates, spread=dense)
    if isinstance(rates, ClosedRates):
        spreads.pop("4 bits", None)
        rates = dataclasses.replace(rates, spreads=spreads)
    return rates


if __name__ == "__main__":
    sys.exit(main())
