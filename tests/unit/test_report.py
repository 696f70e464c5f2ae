"""Reports: what they show is what is planned and recorded, and their page is one file that needs nothing else."""

import dataclasses
import functools
import html.parser
import importlib
import json
import operator
import re
from pathlib import Path

import numpy as np
import pytest

from spmd.analysis.memory import Estimate
from spmd.analysis.topology import parse_topology
from spmd.errors import CheckpointError
from spmd.report import charts
from spmd.report.plan_data import RESOLUTION, collect_plan, merge_spans
from spmd.report.plan_page import plan_page
from spmd.report.run_data import group_metrics, read_run, read_runs
from spmd.report.run_page import run_page
from spmd.report.shards import MOST_DEVICES, map_devices, shard_pictures
from spmd.run.build import make_setup, planned_mesh
from spmd.run.load_config import load_config
from spmd.run.step_source import ConfigSource
from spmd.sharding.mesh import MeshShape
from spmd.step_time.timeline import Span
from tests import tiny
from tests.command_line import run, write_config

MIB = 2**20
NAME = "<script>alert('&')</script>"
"""A name that a page must escape."""


def sizes(**axes: int) -> dict[str, int]:
    return MeshShape(**axes).sizes


@pytest.mark.parametrize(
    ("topology", "axes", "slices", "panels"),
    [
        ("v5e:4x4", {"fsdp": 8, "tensor": 2}, {}, 1),
        ("v5p:4x4x8", {"data": 2, "fsdp": 64}, {}, 8),
        ("2xv5e:4x4", {"data": 2, "fsdp": 16}, {"data": 2}, 2),
        ("h100:4x8", {"fsdp": 4, "tensor": 8}, {}, 4),
        ("tpu7x:4x4x4", {"fsdp": 128}, {}, 4),
        ("cpu:48", {"data": 6, "pipe": 8}, {}, 1),
    ],
)
def test_each_device_has_its_own_place(topology, axes, slices, panels):
    """Every device of the mesh is drawn once, with its index along each axis and its part of the batch."""
    found = map_devices(parse_topology(topology), sizes(**axes), slices, batch=384)
    assert len({*zip(found.x, found.y, strict=True)}) == found.total == len(found.x)
    assert set(found.indices) == set(axes)
    for axis, index in found.indices.items():
        assert (np.bincount(index) == found.total // axes[axis]).all()
    assert len(found.panels) == panels
    rows = {(int(first), int(end)) for first, end in found.batch}
    assert sorted(x for first, end in rows for x in range(first, end)) == list(range(384))


def test_places_are_those_of_the_machine():
    """The slices of a mesh axis are whole panels, links of a torus of 16 go over its edges, a line's do not."""
    found = map_devices(parse_topology("2xv5e:4x4"), sizes(data=2, fsdp=16), {"data": 2}, batch=32)
    assert {tuple(found.x[found.indices["data"] == i] > 4) for i in range(2)} == {
        (False,) * 16,
        (True,) * 16,
    }
    assert min(x for x, *_ in found.links) == 0
    assert (
        min(
            x
            for x, *_ in map_devices(
                parse_topology("v5e:16x16"), sizes(fsdp=256), {}, batch=256
            ).links
        )
        < 0
    )


@pytest.mark.parametrize(
    ("topology", "axes"), [("cpu:16384", {"fsdp": 16384}), ("h100:2048x8", {"fsdp": 16384})]
)
def test_many_devices_are_not_all_drawn(topology, axes):
    """At most so many devices are drawn, and the number of all is known."""
    found = map_devices(parse_topology(topology), sizes(**axes), {}, batch=16384)
    assert len(found.x) <= MOST_DEVICES < found.total == 16384


def test_a_picture_has_the_bytes_of_the_plan():
    """The parts of a picture, and of what it has no room for, are the shards of the plan's spec."""
    plan = tiny.plan(data=2, fsdp=2, tensor=2)
    pictures = shard_pictures(plan)
    assert {picture.entry.rule for picture in pictures} == {entry.rule for entry in plan.params}
    for picture in pictures:
        size = np.prod(picture.entry.shape) * np.dtype(picture.entry.dtype).itemsize
        assert picture.shards * picture.entry.bytes_per_device == size
        assert picture.shards * picture.copies == plan.mesh.size
        outer = int(np.prod([n for _, axes in picture.outer for n in axes.values()]))
        assert picture.row_parts * picture.column_parts * outer == picture.shards
        assert picture.rows * picture.columns * np.prod([n for n, _ in picture.outer]) == np.prod(
            picture.entry.shape
        )


def test_memory_over_time_is_what_is_live():
    """At each time the buffers that are live then are counted, and the arguments always."""
    peak = {"params": 7, "grads": 5, "temporaries": 6}
    lives = {"grads": [(3, 2, 4), (2, 4, 4)], "temporaries": [(4, 0, 2)]}
    times, used = Estimate({}, peak, {}, {}, lifetimes=lives).over_time()
    found = {int(t): [int(used[name][i]) for name in peak] for i, t in enumerate(times)}
    assert found == {0: [7, 0, 4], 2: [7, 3, 4], 3: [7, 3, 0], 4: [7, 5, 0], 5: [7, 0, 0]}


def test_short_spans_are_drawn_together():
    """Seconds of each lane stay the same, long spans stay as they are, and the number has a bound."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.exponential(1e-6, 20_000), [0.01, 0.02], [0.0]])
    starts = np.cumsum(lengths) - lengths
    found = [
        Span(f"op {i}", "device", "ab"[i % 2], a, n)
        for i, (a, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    merged = merge_spans(found, float(lengths.sum()))
    assert len(merged) <= RESOLUTION + 2
    assert sum(span.seconds for span in merged) == pytest.approx(lengths.sum())
    assert [span for span in found if span.seconds >= 0.01] == [
        span for span in merged if span.seconds >= 0.01
    ]


def write_run(folder: Path, name: str = "demo", metrics: str | None = None) -> Path:
    """A run folder as `spmd train` leaves it, half-way, with a line that a kill has cut."""
    path = folder / name
    (path / "checkpoints" / "4").mkdir(parents=True)
    (path / "logs").mkdir()
    lines = [
        {"step": n, "loss": 4 - n / 3, "gradient_norm": 1 / n, "tokens": 8, "odd </script>": n}
        for n in (1, 2, 3)
    ]
    text = "".join(
        json.dumps(line) + "\n"
        for line in [*lines, {"step": 4, "loss": None, "non_finite": {"loss": "inf"}}]
    )
    (path / "metrics.jsonl").write_text(text + '{"step": 5, "lo' if metrics is None else metrics)
    seconds = {"session": 10.0, "step": 4, "now": 20.0, "seconds": {"step": 6.0, "compile": 4.0}}
    (path / "goodput.jsonl").write_text(json.dumps(seconds) + "\n")
    about = {
        "config": {"steps": 9, "seed": 0, "data": {"source": [NAME]}},
        "changed": {"steps": [5, 9]},
    }
    (path / "config.json").write_text(json.dumps(about))
    log = (
        "process 0 of 1\n{0} step 1   loss 3.7   0.1 s/step\n{0} resuming from step 2\n{0} " + NAME
    )
    (path / "logs" / "process-0.log").write_text(
        "{} ".format("2026-01-02 03:04:05") + log.format("2026-01-02 03:04:06")
    )
    return path


def test_half_a_run_is_read(tmp_path):
    """What is there is shown, values that never change are not drawn, and what is missing is noted."""
    report = read_run(str(write_run(tmp_path)))
    assert report.series["loss"].steps == (1, 2, 3)
    assert "tokens" not in report.series
    assert report.last["tokens"] == 8
    assert dict(report.facts())["step"] == "3 of 9"
    assert dict(report.facts())["checkpoints"] == "4"
    assert report.goodput
    assert report.goodput.goodput == 0.6
    assert report.resumed == (2,)
    texts = [text for _, text in report.events]
    assert texts == ["loss is inf", "process 0 of 1", "resuming from step 2", NAME]
    assert [note.split(",")[0].split(":")[0] for note in report.notes] == [
        "metrics.jsonl has 1 cut or damaged lines",
        "The run is not done",
    ]


@pytest.mark.parametrize(
    ("file", "text", "note"),
    [
        ("metrics.jsonl", "", "no metrics yet"),
        ("metrics.jsonl", None, "no metrics yet"),
        (
            "metrics.jsonl",
            '{"step": 1, "loss": "x", "a": [1], "b": true}\n[]\n\xff',
            "cut or damaged",
        ),
        ("config.json", '{"config": {', "cut or damaged"),
        ("config.json", "[3]", "not of a run"),
        ("config.json", "[" * 200_000, "cut or damaged"),
        ("metrics.jsonl", "[" * 200_000, "no metrics yet"),
        ("metrics.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + "}", "no metrics yet"),
        ("metrics.jsonl", '{"step": 1' + "0" * 400 + "}", "no metrics yet"),
        ("goodput.jsonl", "[" * 200_000, "is damaged"),
        ("goodput.jsonl", '{"step": 1, "session": 1' + "0" * 400 + "}", "is damaged"),
        ("config.json", None, "is missing"),
        ("goodput.jsonl", '{"step": 1}\n', "is damaged"),
        ("checkpoints/4", None, "no checkpoint yet"),
    ],
)
def test_what_is_missing_is_noted(file, text, note, tmp_path):
    """A run with a damaged or missing file has a report that says so."""
    path = write_run(tmp_path) / file
    if path.is_dir():
        path.rmdir()
    elif text is None:
        path.unlink()
    else:
        path.write_bytes(text.encode("latin-1"))
    report = read_run(str(tmp_path / "demo"))
    assert any(note in found for found in report.notes), report.notes
    assert note in run_page([report])


def test_no_run_is_an_error(tmp_path):
    """A folder of something else, and one that is not there, with the nearest name."""
    write_run(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="contains no run"):
        read_run(str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r'does not exist\n.*did you mean "demo"'):
        read_run(str(tmp_path / "demoo"))


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    """Two runs have two names: the folders', or their paths."""
    paths = [
        str(write_run(tmp_path / part, name)) for part, name in (("a", "x"), ("b", "x"), ("b", "y"))
    ]
    assert [run.name for run in read_runs(paths[1:])] == ["x", "y"]
    assert [run.name for run in read_runs(paths[:2])] == paths[:2]


def test_each_metric_is_in_one_chart():
    """No metric is lost between the charts, and losses come first."""
    names = [
        "other",
        "lm_accuracy",
        "tokens_per_s",
        "own_loss",
        "step_s_p95",
        "loss",
        "host_peak_bytes",
    ]
    groups = group_metrics(names)
    assert sorted(functools.reduce(operator.iadd, groups.values(), [])) == sorted(names)
    assert next(iter(groups)) == "loss"
    assert groups["loss"] == ["own_loss", "loss"]


class Markup(html.parser.HTMLParser):
    """Reads a page: tags that are closed in another order than they were opened, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "input", "br", "rect", "path"):
            self.open.append(tag)
        self.loads += [
            value
            for name, value in attributes
            if name in ("src", "href", "srcset", "data", "action")
        ]

    def handle_endtag(self, tag):
        if tag in ("rect", "path"):
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "style" and re.search(r"url\(|@import", data):
            self.loads.append("style")
        self.text += data if not self.open or self.open[-1] not in ("script", "style") else ""


def check_page(text: str) -> Markup:
    """Checks what holds for every page."""
    found = Markup()
    found.feed(text)
    assert not found.wrong
    assert not found.open
    assert all(target.startswith("#s") for target in found.loads), found.loads
    assert len(text.encode()) < 5 * MIB
    return found


def test_the_page_of_a_run_is_one_file(tmp_path):
    """Well-formed, with no address of anything outside, the same twice, and with names as they are."""
    paths = [str(write_run(tmp_path)), str(write_run(tmp_path, "<b>"))]
    text = run_page(read_runs(paths))
    found = check_page(text)
    assert run_page(read_runs(paths)) == text
    assert NAME in found.text
    assert "<b>" in found.text
    assert text.count(NAME) == 0
    data = re.search(r'id="charts">(.*?)</script>', text, re.S)
    assert data
    assert len(json.loads(data[1])) == text.count('class="chart"') == 4
    assert "odd </script>" in data[1].encode().decode("unicode_escape")


def test_control_pages():
    """A page with a picture from elsewhere, and one with a tag that is open, are found."""
    for text in (
        "<p><img src='https://example.org/a.png'></img></p>",
        "<p><b></p>",
        "<style>a{background:url(b)}</style>",
    ):
        with pytest.raises(AssertionError):
            check_page(text)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """A pipeline of the tiny model on a machine that is not here."""
    config = load_config(str(write_config(tmp_path_factory.mktemp("config"))))
    pipeline = dataclasses.replace(config.pipeline, schedule="1f1b", microbatches=2)
    config = dataclasses.replace(
        config, mesh=MeshShape(pipe=2, fsdp=2, tensor=2), pipeline=pipeline
    )
    return make_setup(config, planned_mesh(config))


def test_the_page_of_a_plan_is_one_file(setup):
    """Its figures are those of the plan, the estimate and the prediction, and each part is there."""
    source = ConfigSource(setup.config)
    report = collect_plan(NAME, source, setup, parse_topology("v5e:2x4"), compiles=False)
    text = plan_page(report)
    found = check_page(text)
    assert plan_page(report) == text
    for entry in setup.plan.params:
        assert found.text.count(entry.path) >= 3
    for title in ("Mesh", "Shardings", "Memory", "Step time", "Pipeline"):
        assert f"<h2>{title}</h2>" in text
    assert f"Plan of {NAME}" in found.text
    assert "The step was not compiled (--no-compile)" in found.text
    assert report.time
    assert dict(report.facts())["MFU"] == f"{report.time.mfu:.1%}"
    bars = dict(report.memory_rows())
    assert sum(bars["live at the peak"].values()) == report.memory.total
    times, parts = report.memory_over_time(most=10**6)
    total = sum(parts.values())
    assert len(times) == len(total)
    assert 0.9 * report.memory.total < total.max() <= report.memory.total
    few, fewer = report.memory_over_time(most=20)
    assert len(few) == 20
    assert sum(fewer.values()).max() == total.max()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demoo", "--out", "a.html"], 'did you mean "demo"'),
        (["no/such/run", "--out", "a.html"], "is neither a config nor a run folder"),
        (["no.py", "--out", "a.html"], "is neither a file nor a shipped config"),
        (["--out", "a.html", "demo"], "CONFIG|RUN: comes first"),
        (["demo"], "--out: is not given"),
        (["demo", "--out", "runs/demo"], "a report is an HTML file"),
        (["demo", "--out", "no/such/folder/a.html"], "is in no folder that exists"),
        (["demo", "--out", "a.html", "--topology", "v5e:4x4"], "does not fit v5e:4x4"),
        (["demo", "--out", "s3:///a.html"], "out: s3:///a.html: names the bucket ''"),
        (["{run}"], "--out: is not given"),
        (["{run}", "--out", "a.html", "--topology", "v5e:4x4"], "--topology: is for a plan"),
        (["{run}", "{run}", "{run}", "--out", "a.html"], "is one run too many"),
        (["{run}", "{run}x", "--out", "a.html"], "does not exist"),
        (["{run}", "--out", "{run}/logs/"], "a report is an HTML file"),
    ],
)
def test_errors_name_what_is_wrong(arguments, complaint, tmp_path, monkeypatch, capsys):
    """A mistake is one error with its reason, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path)
    assert run("report", *(argument.format(run=path) for argument in arguments)) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))


def test_the_command_writes_a_file(tmp_path, capsys):
    """The file's name, its size, and what is missing in it are printed."""
    path, out = write_run(tmp_path), tmp_path / "a.html"
    assert run("report", path, "--out", out) == 0
    printed = capsys.readouterr().out
    assert f"written to {out}: " in printed
    assert "note: The run is not done" in printed
    check_page(out.read_text())


def test_a_missing_library_is_named(monkeypatch, tmp_path, capsys):
    """Without Bokeh, the error says what to install."""

    def fail(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert run("report", write_run(tmp_path), "--out", tmp_path / "a.html") == 2
    assert "pip install 'spmd[report]'" in capsys.readouterr().err


def test_a_plan_in_a_notebook():
    """The plan as HTML has its heading, its bytes and every parameter, and escapes what is no markup."""
    plan = tiny.plan(data=2, fsdp=2, tensor=2)
    entry = dataclasses.replace(plan.params[0], path=NAME)
    text = dataclasses.replace(plan, params=(entry, *plan.params[1:]))._repr_html_()
    found = check_page(text)
    assert plan.heading in found.text
    assert str(plan).splitlines()[-1] in found.text
    assert all(entry.path in found.text for entry in plan.params[1:])
    assert NAME in found.text


def test_axes_have_colours_that_are_told_apart():
    """Each index along an axis has its own colour."""
    for size in (2, 8, 9, 64):
        assert len(set(charts.scale(np.arange(size), size))) == size
