"""Backtest of the predicted step time against published throughput.

    python -m benchmarks.backtest --rows FILE
    python -m benchmarks.backtest --rows FILE --compile --json

Each row of FILE (`benchmarks.published_rows`) is rebuilt, and its tokens/s of one chip are
predicted by closed forms; with `--compile`, those of TPUs by the schedule of the compiled program
(`benchmarks.backtest_compile`).

Rates are fitted for each chip on the rows of all model families but one, and that one is predicted;
a chip with one family is fitted on it. The baseline is one constant MFU of each chip, the median of
the same folds. Of each chip are
printed: rows and how many were rebuilt, mean absolute error, the baseline's, and Kendall's rank
correlation within families of five rows.

`--fit` prints the rates fitted on all rows, for the entries of `spmd/chips.py`.
"""

import argparse
import collections
import dataclasses
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
from benchmarks.published_rows import Rebuilt, Row, read_rows, rebuild
from spmd.chips import ClosedRates, Rates
from spmd.errors import SpmdError
from spmd.run.build import make_setup
from spmd.run.planned_step import estimate_step
from spmd.sharding.mesh import abstract_mesh
from spmd.step_time.closed_form import closed_form

CLOSED_PRIORS = {
    "cuda": ClosedRates(matmul=0.8, half=500, attention=0.28, passes=1.6, exposed=1.1, hop=3e-5),
    "tpu": ClosedRates(matmul=0.72, half=300, attention=0.45, passes=1.5, exposed=0.5, hop=1e-5),
}
"""Rates before any row of a chip is seen; a fit is drawn to them, so that few rows move what
they show."""

COMPILED_PRIOR = Rates()
_PULL = 0.25
"""Weight of a relative deviation from the prior, where that of a row's relative error is 1."""
_TOLERANCE = 0.1  # relative error above which a row pulls less than in proportion
_BOUNDS = 6.0  # a rate stays within this factor of its prior
_FAMILY = 5
"""Fewest rows of a family whose order is judged."""

Predict = Callable[[Rebuilt, Any], float]


def predict_closed(job: Rebuilt, rates: ClosedRates) -> float:
    """Return the tokens in a second on one chip, by closed forms."""
    return job.tokens_per_second(sum(closed_form(job.work, job.network, rates).values()))


def fit(jobs: Sequence[Rebuilt], predict: Predict, prior: Any) -> Any:
    """Return the rates that fit rows best: relative errors, with a pull to the prior, which is that of no rows."""
    fixed = {field.name for field in dataclasses.fields(prior)} & {"spread"}
    names = [field.name for field in dataclasses.fields(prior) if field.name not in fixed]
    start = np.log([getattr(prior, name) for name in names])

    def rates(x: np.ndarray) -> Any:
        return dataclasses.replace(prior, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def errors(x: np.ndarray) -> np.ndarray:
        found = rates(x)
        rows = [np.log(predict(job, found) / job.published) for job in jobs]
        return np.array([*rows, *(_PULL * (x - start))])

    bounds = (start - np.log(_BOUNDS), start + np.log(_BOUNDS))
    return rates(least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=_TOLERANCE).x)


def family(job: Rebuilt) -> str:
    """Return the model family of a row: rows of one model belong together."""
    return str(job.row["model"])


def leave_one_out(
    jobs: Sequence[Rebuilt], predict: Predict, prior: Any, kin: Sequence[Rebuilt] = ()
) -> tuple[list[float], list[float]]:
    """Return the prediction and the baseline of each row, fitted on the rows of other families.

    With rows of other chips, `kin`, a fit is drawn to that of theirs, without the family, instead
    of to the prior.
    """
    predicted, baseline = dict[int, float](), dict[int, float]()
    for held in sorted({family(job) for job in jobs}):
        others = [job for job in jobs if family(job) != held] or list(jobs)
        found = fit(
            others, predict, fit([job for job in kin if family(job) != held], predict, prior)
        )
        each = [job.work.model_flops / job.work.tokens for job in others]
        flops = statistics.median(job.published * n for job, n in zip(others, each, strict=True))
        for job in jobs:
            if family(job) == held:
                predicted[id(job)] = predict(job, found)
                baseline[id(job)] = flops / (job.work.model_flops / job.work.tokens)
    return [predicted[id(job)] for job in jobs], [baseline[id(job)] for job in jobs]


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
class ChipResult:
    """Backtest of one chip."""

    rows: int
    built: int
    mape: float
    baseline: float
    tau: Mapping[str, float]
    spread: float
    rates: Any
    slopes: Sequence[str]
    predictions: Sequence[tuple[Rebuilt, float]]


def backtest(
    jobs: Sequence[Rebuilt], rows: int, predict: Predict, prior: Any, kin: Sequence[Rebuilt] = ()
) -> ChipResult:
    """Backtest the rows of one chip; `kin` as for `leave_one_out`."""
    predicted, baseline = leave_one_out(jobs, predict, prior, kin)
    wrong = sorted(abs(p / job.published - 1) for job, p in zip(jobs, predicted, strict=True))
    return ChipResult(
        rows=rows,
        built=len(jobs),
        mape=error(jobs, predicted),
        baseline=error(jobs, baseline),
        tau=rank(jobs, predicted),
        spread=wrong[min(len(wrong) - 1, int(0.9 * len(wrong)))],
        rates=fit(jobs, predict, fit(kin, predict, prior)),
        slopes=slopes(jobs, predicted),
        predictions=list(zip(jobs, predicted, strict=True)),
    )


Results = tuple[dict[str, ChipResult], dict[int, str]]


def run(rows: Sequence[Row], compiled: Mapping[int, CompiledRow] | None) -> Results:
    """Backtest the dense rows of all chips.

    Return chip → result, and number of a row → why it is in none.
    """
    found = {number: rebuild(row) for number, row in enumerate(rows)}
    reasons = {number: job for number, job in found.items() if isinstance(job, str)}
    experts = (n for n, job in found.items() if isinstance(job, Rebuilt) and not job.is_dense)
    reasons |= dict.fromkeys(experts, "mixture of experts: rates are fitted to dense models")
    programs = {id(found[number]): program for number, program in (compiled or {}).items()}

    def predict_compiled(job: Rebuilt, rates: Rates) -> float:
        return programs[id(job)].tokens_per_second(job, rates)

    dense = {n: job for n, job in found.items() if isinstance(job, Rebuilt) and job.is_dense}
    results = {}
    for group in dict.fromkeys(job.group for job in dense.values()):
        jobs = [
            job
            for n, job in dense.items()
            if job.group == group and (compiled is None or n in compiled)
        ]
        if not jobs:
            continue
        chip, platform = jobs[0].row["chip"], jobs[0].topology.platform
        total = sum(row["chip"] == chip for row in rows) if chip == group else len(jobs)
        if compiled is None:
            kin = [
                job
                for job in dense.values()
                if job.topology.kind == jobs[0].topology.kind and job.is_wide
            ]
            kin = [] if jobs[0].is_wide else kin
            results[group] = backtest(jobs, total, predict_closed, CLOSED_PRIORS[platform], kin)
        else:
            kin = [job for n, job in dense.items() if n in compiled and job.group != group]
            results[group] = backtest(jobs, total, predict_compiled, COMPILED_PRIOR, kin)
    return results, reasons


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
    parser.add_argument("--rows", required=True, metavar="FILE", help="published rows, a JSON list")
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
    results, reasons = run(rows, compiled)
    reasons |= failed
    if options.json:
        figures = ("rows", "built", "mape", "baseline", "tau")
        print(
            json.dumps(
                {c: {name: getattr(r, name) for name in figures} for c, r in results.items()},
                indent=2,
            )
        )
        return 0
    _print(results, reasons, rows, options.fit, options.verbose)
    for line in memory_lines(jobs.values()):
        print(line)
    return 0


def _print(
    results: Mapping[str, ChipResult],
    reasons: Mapping[int, str],
    rows: Sequence[Row],
    fitted: bool,
    verbose: bool,
) -> None:
    print(
        f"{'chip':16}{'rows':>6}{'rebuilt':>9}{'error':>8}{'constant MFU':>14}  rank correlation (τ) in families"
    )
    for chip, result in results.items():
        taus = ", ".join(f"{name} {tau:.2f}" for name, tau in result.tau.items())
        print(
            f"{chip:16}{result.rows:6}{result.built:9}{result.mape:8.1%}{result.baseline:14.1%}  {taus}"
        )
    for chip, result in results.items():
        for line in result.slopes:
            print(f"{chip}: {line}")
        if verbose:
            for job, predicted in result.predictions:
                mesh = ", ".join(f"{axis}={size}" for axis, size in job.row["mesh"].items())
                what = f"{job.row['model']} on {job.topology}, {mesh}, {job.row['seq']} tokens, {job.row['remat'][:20]}"
                off = f"{predicted / job.published - 1:+.1%}"
                print(f"{chip}: {what}: {job.published:.5g}, predicted {predicted:.5g} ({off})")
        if fitted:
            print(f"{chip}: {dataclasses.replace(result.rates, **_spread(result))}")
    counts = collections.Counter(
        (reason, rows[number]["chip"]) for number, reason in reasons.items()
    )
    for (reason, chip), count in counts.items():
        print(f"not rebuilt: {count} of {chip}: {reason}")


def _spread(result: ChipResult) -> dict[str, float]:
    return {"spread": result.spread} if hasattr(result.rates, "spread") else {}


if __name__ == "__main__":
    sys.exit(main())
