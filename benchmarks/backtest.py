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
8-bit products, then that of experts, so that neither changes what dense rows show. A GPU without
dense rows starts from the rates of an H100, and its rows of 8 bits and pipelines set all rates.
With `--shipped`, the rates of `spmd/chips.py` predict instead, and nothing is fitted.

The baseline is one constant MFU of each chip and kind of step, the median of the same folds. Of
each chip and kind are printed: rows, mean absolute error, the baseline's, the range (nine of ten
rows of other families), the share of rows in the range that the other families give, and Kendall's
rank correlation within families of five rows.

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
Fit = Callable[[Sequence[Rebuilt], str], Any]
"""Rows, and the family that no rate may know → rates."""


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


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Prediction of a row by the rows of other families.

    Attributes:
        tokens: Predicted tokens in a second on one chip.
        baseline: The same, by a constant MFU.
    """

    job: Rebuilt
    tokens: float
    baseline: float

    @property
    def family(self) -> str:
        """The model."""
        return family(self.job)

    @property
    def error(self) -> float:
        """Absolute relative error."""
        return abs(self.tokens / self.job.published - 1)

    @property
    def baseline_error(self) -> float:
        """The same, of the baseline."""
        return abs(self.baseline / self.job.published - 1)

    @property
    def off_by(self) -> float:
        """The larger quotient of prediction and publication, less 1."""
        ratio = self.tokens / self.job.published
        return max(ratio, 1 / ratio) - 1


def leave_one_out(jobs: Sequence[Rebuilt], predict: Predict, make_rates: Fit) -> list[Prediction]:
    """Predict each row by the rows of other families; those of the only family by themselves."""
    families = {family(job) for job in jobs}
    found = dict[int, Prediction]()
    for held in sorted(families):
        known, hidden = list(jobs), held
        if len(families) > 1:
            known = [job for job in jobs if family(job) != held]
        else:
            hidden = ""
        rates = make_rates(known, hidden)
        for job in jobs:
            if family(job) == held:
                found[id(job)] = Prediction(job, predict(job, rates), _constant_mfu(job, known))
    return [found[id(job)] for job in jobs]


def _constant_mfu(job: Rebuilt, others: Sequence[Rebuilt]) -> float:
    """Return the tokens/s of a row with the median MFU of others, of its kind if there are some."""
    alike = [other for other in others if other.kind == job.kind] or others
    flops = [other.published * other.flops_per_token for other in alike]
    return statistics.median(flops) / job.flops_per_token


def spread(rows: Sequence[Prediction]) -> float:
    """Return the half of a range that nine of ten steps of another family are in.

    Steps are as long as predicted, multiplied or divided by at most 1 + the result.
    """
    wrong = sorted(row.off_by for row in rows)
    families = len({row.family for row in rows})
    if families == 1:
        return max(_ONE_FAMILY, 1.5 * wrong[-1])
    if families < _FEW:
        return max(_LEAST_SPREAD, 1.5 * wrong[-1])
    # The rank of a further row among them is at most this one, nine times of ten.
    last = min(len(wrong), math.ceil(0.9 * (len(wrong) + 1)))
    return max(_LEAST_SPREAD, wrong[last - 1])


def held_share(rows: Sequence[Prediction]) -> float | None:
    """Return the share of rows in the range that the other families give; None for one family."""
    inside = 0.0
    for held, own in _by_family(rows).items():
        others = [row for row in rows if row.family != held]
        if not others:
            return None
        inside += len(own) * share_within(own, spread(others))
    return inside / len(rows)


def share_within(rows: Sequence[Prediction], limit: float) -> float:
    """Return the share of rows in a range."""
    return statistics.mean(row.off_by <= limit for row in rows)


def _by_family(rows: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    groups = collections.defaultdict[str, list[Prediction]](list)
    for row in rows:
        groups[row.family].append(row)
    return groups


def rank(rows: Iterable[Prediction]) -> dict[str, float]:
    """Return family → Kendall's τ of its rows."""
    found = {}
    for name, own in _by_family(rows).items():
        if len(own) < _FAMILY:
            continue
        published = [row.job.published for row in own]
        tau = float(kendalltau(published, [row.tokens for row in own]).statistic)
        if not math.isnan(tau):  # of equal predictions there is no order
            found[name] = tau
    return found


_SLOPES: Mapping[str, Callable[[Rebuilt], float]] = {
    "slices": lambda job: job.topology.slices,
    "sequence": lambda job: job.work.sequence,
    "tensor": lambda job: job.work.mesh["tensor"],
}


def slopes(rows: Iterable[Prediction]) -> list[str]:
    """Return changes of speed, published and predicted, between rows of one model that differ in little else."""
    lines = []
    for what, key in _SLOPES.items():
        groups = collections.defaultdict[Any, list[Prediction]](list)
        for row in rows:
            alike = [other(row.job) for name, other in _SLOPES.items() if name != what]
            each = row.job.topology.chips // row.job.topology.slices
            groups[row.family, row.job.row["remat"], each, *alike].append(row)
        for (name, *_), own in groups.items():
            ordered = sorted(own, key=lambda row: (key(row.job), row.job.published))
            first, last = ordered[0], ordered[-1]
            if key(first.job) == key(last.job):
                continue
            published = last.job.published / first.job.published - 1
            predicted = last.tokens / first.tokens - 1
            change = f"{published:+.1%}, predicted {predicted:+.1%}"
            lines.append(f"{name}, {what} {key(first.job)} → {key(last.job)}: {change}")
    return lines


@dataclasses.dataclass(frozen=True)
class KindResult:
    """Backtest of one kind of step on one chip.

    Attributes:
        mape: Mean absolute error; `baseline`: that of a constant MFU.
        spread: Half of the range; None if it is not known.
        held: Share of rows in the range of the other families, or in that of the shipped rates;
            None for one family, or without a range.
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
    predictions: Sequence[Prediction]


def backtest(
    jobs: Sequence[Rebuilt],
    rows: int,
    predict: Predict,
    make_rates: Fit,
    shipped: ClosedRates | None = None,
) -> ChipResult:
    """Backtest the rows of one chip; with `shipped`, ranges are those of its kinds of steps."""
    predictions = leave_one_out(jobs, predict, make_rates)
    kinds = {}
    for kind in dict.fromkeys(job.kind for job in jobs):
        own = [row for row in predictions if row.job.kind == kind]
        limit: float | None = spread(own)
        held = held_share(own)
        if shipped is not None:
            limit = shipped.spread_of(kind)
            held = None
            if limit is not None:
                held = share_within(own, limit)
        kinds[kind] = KindResult(
            rows=len(own),
            families=len(_by_family(own)),
            mape=mean_error(own),
            baseline=mean_baseline_error(own),
            spread=limit,
            held=held,
            tau=rank(own),
        )
    return ChipResult(
        rows=rows,
        built=len(jobs),
        mape=mean_error(predictions),
        baseline=mean_baseline_error(predictions),
        kinds=kinds,
        rates=make_rates(jobs, ""),
        slopes=slopes(predictions),
        predictions=predictions,
    )


def mean_error(rows: Iterable[Prediction]) -> float:
    """Return the mean absolute relative error."""
    return statistics.mean(row.error for row in rows)


def mean_baseline_error(rows: Iterable[Prediction]) -> float:
    """Return the mean absolute relative error of a constant MFU."""
    return statistics.mean(row.baseline_error for row in rows)


Results = tuple[dict[str, ChipResult], dict[int, str]]


def run(
    rows: Sequence[Row], compiled: Mapping[int, CompiledRow] | None, shipped: bool = False
) -> Results:
    """Backtest the rows of all chips.

    Return kind of chip → result, and number of a row → why it is in none.
    """
    reasons = dict[int, str]()
    lost = collections.Counter[str]()
    programs = dict[int, CompiledRow]()
    jobs = collections.defaultdict[str, list[Rebuilt]](list)
    for number, row in enumerate(rows):
        job = rebuild(row)
        if isinstance(job, str):
            reasons[number] = job
            lost[chip_kind(row)] += 1
        elif compiled is None:
            jobs[job.chip].append(job)
        elif number in compiled:
            jobs[job.chip].append(job)
            programs[id(job)] = compiled[number]

    def predict_compiled(job: Rebuilt, rates: Rates) -> float:
        return programs[id(job)].tokens_per_second(job, rates)

    results = {}
    for chip, mine in jobs.items():
        total = len(mine) + lost[chip]
        if compiled is not None:
            others = [job for kin, own in jobs.items() if kin != chip for job in own]
            make_rates = _compiled_fit(others, predict_compiled)
            results[chip] = backtest(mine, total, predict_compiled, make_rates)
        elif shipped:
            rates = CHIPS[chip].closed
            results[chip] = backtest(mine, total, predict_closed, _unfitted(rates), rates)
        else:
            make_rates = _closed_fit(chip, jobs.get(_KIN.get(chip, ""), ()))
            results[chip] = backtest(mine, total, predict_closed, make_rates)
    return results, reasons


def _unfitted(rates: Any) -> Fit:
    return lambda jobs, held: rates


def _closed_fit(chip: str, kin: Sequence[Rebuilt]) -> Fit:
    """Return the fit of closed forms for one chip; without dense rows it starts from that of its kin."""
    prior = CLOSED_PRIORS[CHIPS[chip].platform]

    def make_rates(jobs: Sequence[Rebuilt], held: str) -> ClosedRates:
        start = prior
        if all(job.kind != "dense" for job in jobs):
            known = [job for job in kin if family(job) != held]
            start = fit_closed(known, prior)
        return fit_closed(jobs, start)

    return make_rates


def _compiled_fit(others: Sequence[Rebuilt], predict: Predict) -> Fit:
    """Return the fit of compiled programs for one chip, which is drawn to that of other chips."""

    def make_rates(jobs: Sequence[Rebuilt], held: str) -> Any:
        known = [job for job in others if family(job) != held]
        start = fit(known, predict, COMPILED_PRIOR, _COMPILED_NAMES)
        return fit(jobs, predict, start, _COMPILED_NAMES)

    return make_rates


def memory_lines(jobs: Iterable[Rebuilt]) -> Iterator[str]:
    """Yield the memory of rows that have it: the peak of PyTorch's allocator, and our ledger's estimate."""
    for job in jobs:
        published = job.row.get("memory_gib")
        if not published:
            continue
        what = f"{job.row['model']} on {job.topology}, {job.row['precision']}"
        try:
            config = make_config(describe(job))
            setup = make_setup(config, abstract_mesh(config.mesh))
        except SpmdError as error:  # such as layers that do not divide over stages
            reason = " ".join(str(error).split())
            yield f"memory of {what}: {published} GiB, not estimated: {reason}"
            continue
        estimate = estimate_step(setup, job.topology.platform).total / 2**30
        off = f"{estimate / published - 1:+.1%}"
        yield f"memory of {what}: {published} GiB, estimated {estimate:.1f} GiB ({off})"


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
            for row in result.predictions:
                print(f"{chip}: {_row_text(row)}")
        if fitted:
            print(f"{chip}: {_with_spreads(result)}")
    counts = collections.Counter(
        (reason, rows[number]["chip"]) for number, reason in reasons.items()
    )
    built = len(rows) - len(reasons)
    print(f"{built} of {len(rows)} rows are built ({built / len(rows):.1%})")
    for (reason, chip), count in counts.items():
        print(f"not rebuilt: {count} of {chip}: {reason}")


def _row_text(prediction: Prediction) -> str:
    job, row = prediction.job, prediction.job.row
    mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    how = f"{row['seq']} tokens, {row['remat'][:20]}, {row['precision'][:12]}"
    off = f"{prediction.tokens / job.published - 1:+.1%}"
    speeds = f"{job.published:.5g}, predicted {prediction.tokens:.5g} ({off})"
    return f"{row['model']} on {job.topology}, {mesh}, {how}: {speeds}"


def _line(chip: str, kind: str, found: KindResult) -> str:
    taus = ", ".join(f"{name} {tau:.2f}" for name, tau in found.tau.items())
    half, held = "unknown", ""
    if found.spread is not None:
        half = f"{found.spread:.0%}"
    if found.held is not None:
        held = f"{found.held:.0%}"
    return (
        f"{chip:12}{kind:12}{found.rows:5}{found.families:9}{found.mape:8.1%}"
        f"{found.baseline:14.1%}{half:>9}{held:>7}  {taus}"
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
