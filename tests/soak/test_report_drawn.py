"""Reports in headless Chromium: drawn at once, with no errors, each chart visible, light and dark, wide and narrow.

`make system` installs Chromium. A page is opened from its file; it forbids itself to load anything,
which would be an error in the console.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spmd.analysis.topology import parse_topology
from spmd.report.plan_data import collect_plan
from spmd.report.plan_page import plan_page
from spmd.report.run_data import read_runs
from spmd.report.run_page import run_page
from spmd.run.build import make_setup, planned_mesh
from spmd.run.load_config import load_config
from spmd.run.step_source import ConfigSource
from spmd.sharding.mesh import MeshShape
from tests.unit.test_report import MIB, write_run

SECONDS = 2.0
"""Longest that a page may take until all charts are drawn."""
HIGH = 12_000
PAPER = {"light": 255, "dark": 23}
BOXES = """<script>
addEventListener("load",function look(){
  if(!document.documentElement.dataset.drawn)return setTimeout(look,50);
  const rows=[...document.querySelectorAll(".chart")].map(e=>{const r=e.getBoundingClientRect();
    return [r.left,r.top,r.width,r.height].map(Math.round)});
  const page=document.documentElement;
  console.log("FOUND"+JSON.stringify({rows,width:page.scrollWidth,height:document.body.scrollHeight}))});
</script>"""
"""Says on the console where the charts are, when they are drawn."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """A plan of every kind of chart but those of a TPU's compiler, and two runs."""
    folder = tmp_path_factory.mktemp("runs")
    config = load_config("demo")
    config = dataclasses.replace(
        config, mesh=MeshShape(pipe=2, data=2, fsdp=2, tensor=2), devices=16
    )
    setup = make_setup(config, planned_mesh(config))
    source = ConfigSource(config)
    plan = collect_plan("demo", source, setup, parse_topology("v5e:4x4"), compiles=False)
    metrics = "".join(
        json.dumps(
            {
                "step": n,
                "loss": 4 - n / 300,
                "val_loss": 4.1 - n / 300,
                "learning_rate": 1e-3 / n,
                "mfu": n / 999,
            }
        )
        + "\n"
        for n in range(1, 500)
    )
    runs = read_runs([str(write_run(folder, name, metrics)) for name in ("one", "two")])
    return {"plan": plan_page(plan), "run": run_page(runs[:1]), "runs": run_page(runs)}


def chromium(folder: Path, page: str, scheme: str, *arguments: str) -> str:
    """Opens a page, and returns what Chromium logs; its timers run at once."""
    file = folder / "page.html"
    file.write_text(page)
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={folder}/profile",
        f"--window-size=1280,{HIGH}",
        "--virtual-time-budget=20000",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        *arguments,
        file.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr


def console(log: str) -> list[str]:
    """What a page wrote to the console, besides the version of the library."""
    lines = re.findall(r"CONSOLE(?::\d+|\(\d+\))\] (.*)", log)
    return [line for line in lines if "setting log level" not in line]


def found(lines: list[str]) -> dict:
    """What a script of these tests wrote to the console, which is taken out of the lines."""
    (line,) = [line for line in lines if line.startswith('"FOUND')]
    lines.remove(line)
    return json.loads(line[len('"FOUND') : line.rindex('", source:')])


def shot(folder: Path, page: str, width: int, scheme: str) -> tuple[np.ndarray, list[str]]:
    """The pixels of a page in a frame of a width, for windows have a least width, and its console."""
    (folder / "inner.html").write_text(page.replace("</body>", f"{BOXES}</body>"))
    frame = f'<iframe src="inner.html" style="border:0;width:{width}px;height:{HIGH}px"></iframe>'
    outer = f'<!DOCTYPE html><meta name="color-scheme" content="light dark"><body style="margin:0">{frame}'
    log = chromium(folder, outer, scheme, f"--screenshot={folder}/page.png")
    with Image.open(folder / "page.png") as image:
        return np.asarray(image.convert("RGB")).astype(int)[:, :width], console(log)


def empty_charts(pixels: np.ndarray, boxes: list[list[int]]) -> list[int]:
    """Charts of which less than a hundredth has another colour than the card they are on."""
    found = []
    for number, (left, top, width, height) in enumerate(boxes):
        chart = pixels[top : top + height, left : left + width]
        card = chart[1, 1]
        if chart.size == 0 or (abs(chart - card).max(axis=-1) > 24).mean() < 0.01:
            found.append(number)
    return found


def contrast(pixels: np.ndarray) -> float:
    """The largest difference of brightness from the paper."""
    return float(abs(pixels.mean(axis=-1) - pixels[2, 2].mean()).max())


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [*itertools.product(("plan", "run", "runs"), (1280, 400), ("light", "dark"))],
)
def test_each_chart_is_drawn(name, width, scheme, pages, tmp_path):
    """No error in the console, nothing wider than the window, each chart visible, on paper of its scheme."""
    assert shutil.which("chromium"), "make system installs it"
    pixels, lines = shot(tmp_path, pages[name], width, scheme)
    page = found(lines)
    assert lines == []
    assert page["width"] <= width
    assert page["height"] < HIGH
    assert len(page["rows"]) == pages[name].count('class="chart"') >= 4
    assert empty_charts(pixels, page["rows"]) == []
    assert min(box[2] for box in page["rows"]) > 200
    assert abs(pixels[2, 2].mean() - PAPER[scheme]) < 3
    assert contrast(pixels[:200]) > 150


def test_control_an_empty_chart_and_an_error(pages, tmp_path):
    """A page whose charts cannot be drawn has an error and empty charts; one that loads from elsewhere has an error."""
    pixels, lines = shot(tmp_path, pages["run"], 1280, "light")
    boxes = found(lines)["rows"]
    broken = pages["run"].replace("Bokeh.embed.embed_item(item,", "Bokeh.embed.nothing(item,", 1)
    pixels, lines = shot(tmp_path, broken, 1280, "light")
    assert any("not a function" in line for line in lines)
    # where they would be, there are tables
    assert len(empty_charts(pixels, boxes)) >= len(boxes) - 1
    elsewhere = pages["run"].replace("<main>", '<main><img src="https://spmd.invalid/a.png">', 1)
    assert any(
        "Content Security Policy" in line for line in shot(tmp_path, elsewhere, 1280, "light")[1]
    )


def cpu_seconds(folder: Path, page: str) -> float:
    """What a page has computed when it says that it is drawn: its wall-clock time where the machine is not busy."""
    (folder / "page.html").write_text(page.replace("</body>", f"{BOXES}</body>"))
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--remote-debugging-port=0",
    )
    command = [
        "chromium",
        *flags,
        f"--user-data-dir={folder}/profile",
        (folder / "page.html").as_uri(),
    ]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert any('"FOUND' in line for line in process.stderr)
            return max(renderer_ticks(process.pid)) / os.sysconf("SC_CLK_TCK")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def renderer_ticks(session: int) -> Iterator[float]:
    """User and system time of the main thread of each renderer of a session, which parses, runs scripts and paints."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (
                (process / "task" / process.name / "stat").read_text().rpartition(")")[2].split()
            )
            if (
                int(fields[3]) == session
                and b"--type=renderer" in (process / "cmdline").read_bytes()
            ):
                yield float(fields[11]) + float(fields[12])


def test_a_page_is_drawn_in_time(pages, tmp_path):
    """From the file to all charts drawn, a page takes less time than the bar; a script that computes is counted."""
    empty = '<!DOCTYPE html><html data-drawn="0"><head></head><body></body></html>'
    busy = empty.replace(
        "<body>", "<body><script>for(const t=Date.now();Date.now()<t+9000;);</script>"
    )
    started = cpu_seconds(tmp_path, empty)
    assert cpu_seconds(tmp_path, busy) > started + 0.2
    for name in ("plan", "runs"):
        took = min(cpu_seconds(tmp_path, pages[name]) for _ in range(3))
        print(f"{name}: {took:.2f} s")
        assert started < took < SECONDS


def test_the_table_is_searched_and_sorted(pages, tmp_path):
    """A word leaves the rows with it, and a click on a heading sorts by the bytes, not by their text."""
    act = """<script>addEventListener("load",()=>{
      const box=[...document.querySelectorAll(".table")].find(e=>e.querySelector("input"));
      const input=box.querySelector("input");input.value="GRADIENTS q_proj";input.dispatchEvent(new Event("input"));
      const shown=[...box.querySelectorAll("tbody tr")].filter(row=>!row.hidden).map(row=>row.cells[0].textContent);
      input.value="";input.dispatchEvent(new Event("input"));
      const button=box.querySelectorAll("th button")[5];button.click();button.click();
      const keys=[...box.querySelectorAll("tbody tr")].map(row=>Number(row.cells[5].dataset.key));
      console.log("FOUND"+JSON.stringify({shown,keys}))});</script>"""
    rows = found(
        console(
            chromium(
                tmp_path, pages["plan"].replace("</body>", f"{act}</body>"), "light", "--dump-dom"
            )
        )
    )
    assert rows["shown"] == ["layers/attention/q_proj/kernel"]
    assert rows["keys"] == sorted(rows["keys"], reverse=True)
    assert len(set(rows["keys"])) > 4


def test_large_reports_stay_small(tmp_path):
    """Two long runs of many metrics, and a plan of 4,096 chips, are below 5 MiB each."""
    values = [{f"metric {i}": math.sin(n + i) for i in range(60)} for n in range(20_000)]
    metrics = "".join(json.dumps({"step": n, **row}) + "\n" for n, row in enumerate(values))
    runs = read_runs([str(write_run(tmp_path, name, metrics)) for name in ("one", "two")])
    assert len(run_page(runs).encode()) < 5 * MIB
    config = load_config("llama3-405b")
    config = dataclasses.replace(config, mesh=MeshShape(data=8, fsdp=64, tensor=8))
    setup = make_setup(config, planned_mesh(config))
    topology = parse_topology("v5p:16x16x16")
    plan = collect_plan("llama3-405b", ConfigSource(config), setup, topology, compiles=False)
    assert len(plan.devices.x) == 4096
    assert len(plan_page(plan).encode()) < 5 * MIB
