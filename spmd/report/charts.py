"""Kinds of charts, drawn by Bokeh in the reader's browser.

Colours of text, axes and grids are CSS variables of the page (`spmd.report.page`), so that one chart serves light and
dark. Bokeh is imported when the first chart is made.
"""

import dataclasses
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.analysis.schedule_chart import ink_on
from spmd.errors import ConfigError, Problem

PALETTE = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#b8a500", "#a0522d", "#7f7f7f"),
    "#5f9ea0",
)
"""Colours that are told apart under the common kinds of colour blindness, on light and on dark paper."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
FONT = "Helvetica, Arial, sans-serif"
_IN_CELLS = {"text_align": "center", "text_baseline": "middle", "text_font_size": "11px", "text_font": {"value": FONT}}


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart, as the page embeds it.

    Attributes:
        item: JSON of `Bokeh.embed.embed_item`.
        label: Caption; `note` is a line under it.
        legend: (Colour, dash, name) of what is drawn.
        height: Pixels.
        most: Widest in pixels; 0 for the width of the page.
    """

    item: Mapping[str, Any]
    label: str
    legend: tuple[tuple[str, str, str], ...] = ()
    height: int = 260
    most: int = 0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve of points."""

    name: str
    x: Sequence[int]
    y: Sequence[float]
    colour: str
    dash: str = "solid"


def bokeh(module: str) -> Any:
    """Import a module of Bokeh, or raise `ConfigError` where it is not installed."""
    try:
        return importlib.import_module(f"bokeh.{module}")
    except ModuleNotFoundError as error:
        problem = Problem("spmd report", "needs Bokeh, which is not installed", fix="pip install 'spmd[report]'")
        raise ConfigError("There is no report:", [problem]) from error


def library() -> str:
    """Return the script that draws charts, as a text."""
    return "\n".join(bokeh("resources").Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)


def lines(
    label: str,
    curves: Sequence[Line],
    *,
    x: str,
    logarithmic: bool = False,
    marks: Sequence[float] = (),
    form: str = "",
    most: int = 0,
) -> Chart:
    """Return a chart of curves, with dashed vertical lines at `marks`; few points are dots as well.

    `form` is numbro's format of the values, `most` the widest in pixels.
    """
    figure = _figure(x, "", form=form, on_y=True, y_axis_type="log" if logarithmic else "linear")
    for curve in curves:
        data = _source(x=np.array(curve.x, np.int32), y=np.array(curve.y, np.float32))
        style = {"source": data, "line_color": curve.colour}
        if len(curve.x) < 30:
            figure.scatter("x", "y", size=5, fill_color=curve.colour, **style)
        drawn = figure.line("x", "y", line_width=1.8, line_dash=curve.dash, name=curve.name, **style)
        shown = f"@y{{{form}}}" if form else "@y{0,0.[000000]}"
        _hover(figure, [drawn], [("", "$name"), (x, "@x{0,0}"), ("", shown)])
    for at in marks:
        figure.add_layout(bokeh("models").Span(location=at, dimension="height", line_dash="dashed", line_width=1))
    legend = tuple((curve.colour, curve.dash, curve.name) for curve in curves) if len(curves) > 1 else ()
    return _chart(figure, label, legend, most=most)


def stacked_bars(
    label: str, bars: Sequence[tuple[str, Mapping[str, float]]], *, x: str, form: str = "0.[00] ib", limit: float = 0
) -> Chart:
    """Return horizontal bars of parts; a dashed line marks the limit, if there is one.

    The same part has one colour in all bars. `form` is numbro's format of the values: bytes by default.
    """
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    labels = [name for name, _ in bars][::-1]
    height = 70 + 34 * len(bars)
    figure = _figure(x, "", height=height, y_range=labels, form=form, zooms=False)
    for name, colour in colours(names).items():
        rows = [(bar, _before(parts, name), parts[name]) for bar, parts in bars if name in parts]
        data = _source(
            bar=[bar for bar, _, _ in rows],
            left=[left for _, left, _ in rows],
            right=[left + size for _, left, size in rows],
            size=[size for _, _, size in rows],
            name=[name] * len(rows),
        )
        drawn = figure.hbar("bar", left="left", right="right", height=0.68, source=data, color=colour, line_width=0)
        _hover(figure, [drawn], [("", "@bar: @name"), (x, f"@size{{{form}}}")])
    figure.ygrid.visible = False
    figure.x_range.start = 0
    if limit:
        _limit(figure, limit, "height")
        figure.x_range.end = 1.05 * max(limit, *(sum(parts.values()) for _, parts in bars))
    return _chart(figure, label, _legend(names), height)


def stacked_areas(label: str, x: np.ndarray, parts: Mapping[str, np.ndarray], *, title: str, limit: float = 0) -> Chart:
    """Return bytes over time: steps that are stacked, with a dashed line at the limit, if there is one."""
    figure = _figure(title, "", form="0.[00] ib", on_y=True)
    ends = np.append(x[1:], x[-1] + 1)
    at = np.stack([x, ends], axis=1).ravel().astype(float)
    base = np.zeros(len(at))
    for name, colour in colours(list(parts)).items():
        top = base + np.repeat(parts[name], 2)
        figure.varea(x=at, y1=base, y2=top, fill_color=colour)
        base = top
    data = _source(x=x, top=base[::2], **{f"part{i}": values for i, values in enumerate(parts.values())})
    drawn = figure.scatter("x", "top", source=data, size=6, alpha=0)
    shown = [(name, f"@part{i}{{0.[00] ib}}") for i, name in enumerate(parts)]
    _hover(figure, [drawn], [("all", "@top{0.[00] ib}"), *shown], mode="vline")
    figure.y_range.start = 0
    if limit:
        _limit(figure, limit, "width")
        figure.y_range.end = 1.05 * max(limit, float(base.max()))
    return _chart(figure, label, _legend(list(parts)))


def spans(
    label: str,
    rows: Sequence[str],
    boxes: Sequence[tuple[str, float, float, str, str]],
    *,
    x: str,
    colours: Mapping[str, str],
    texts: Sequence[str] = (),
    form: str = "0,0.[000]",
) -> Chart:
    """Return boxes `(row, start, end, kind, name)` over time, each row a lane; `texts` are written on the boxes."""
    height = 80 + max(24, min(56, 480 // len(rows))) * len(rows)
    figure = _figure(x, "", height=height, y_range=list(rows)[::-1])
    starts, ends = (np.array([box[i] for box in boxes], float) for i in (1, 2))
    data = _source(
        row=[row for row, *_ in boxes],
        left=starts,
        right=ends,
        middle=(starts + ends) / 2,
        kind=[kind for *_, kind, _ in boxes],
        name=[name for *_, name in boxes],
        colour=[colours[kind] for *_, kind, _ in boxes],
        **({"text": list(texts), "ink": [ink_on(colours[kind]) for *_, kind, _ in boxes]} if texts else {}),
    )
    edge = {"line_color": "white", "line_width": 1} if texts else {"line_color": "colour", "line_width": 0.3}
    drawn = figure.hbar("row", left="left", right="right", height=0.78, source=data, fill_color="colour", **edge)
    _hover(figure, [drawn], [("", "@name"), ("", "@kind"), (x, f"@left{{{form}}} to @right{{{form}}}")])
    if texts:
        figure.text("middle", "row", text="text", source=data, text_color="ink", **_IN_CELLS)
    figure.ygrid.visible = False
    figure.x_range.start, figure.x_range.end = 0, max(end for _, _, end, *_ in boxes)
    found = {kind for *_, kind, _ in boxes}
    legend = tuple((colour, "", kind) for kind, colour in colours.items() if kind in found)
    return _chart(figure, label, legend, height)


def cells(
    label: str,
    columns: Mapping[str, Any],
    tips: Sequence[tuple[str, str]],
    *,
    size: tuple[float, float],
    links: Sequence[tuple[float, float, float, float]] = (),
    labels: Mapping[str, tuple[float, float]],
) -> Chart:
    """Return square cells at columns `x` and `y` (downwards) in `colour`, a few of them with `text` in `ink`.

    Args:
        size: Columns and rows of the whole.
        links: Segments under the cells.
        labels: Text → column and row of the cell over which it is written.
    """
    width, high = size
    most = round(min(620.0, max(300.0, 45 * width)))
    height = round(min(520.0, max(90.0, most * (high + 0.9) / (width + 0.8))))
    figure = _figure(
        "", "", height=height, match_aspect=True, x_range=(-0.9, width - 0.1), y_range=(high - 0.1, -0.95), zooms=False
    )
    figure.axis.visible = figure.grid.visible = False
    figure.outline_line_alpha = 0
    if links:
        x0, y0, x1, y1 = (list(column) for column in zip(*links, strict=True))
        figure.segment(x0, y0, x1, y1, line_color="#8a8f98", line_width=2)
    has_text = len(columns["x"]) <= 512
    kept = {name: column for name, column in columns.items() if has_text or name not in ("text", "ink")}
    data = _source(**{name: x.astype(np.int32) if isinstance(x, np.ndarray) else x for name, x in kept.items()})
    drawn = figure.rect(
        "x", "y", width=0.82, height=0.82, source=data, fill_color="colour", line_color="colour", line_width=0.5
    )
    if has_text:
        figure.text("x", "y", text="text", source=data, text_color="ink", **_IN_CELLS)
    _hover(figure, [drawn], tips)
    named = {text: at for text, at in labels.items() if text}
    if named and len(named) <= 64:
        for text, (column, row) in named.items():
            place = {"x": column - 0.45, "y": row - 0.5, "text": text, "text_font_size": "11px"}
            figure.add_layout(bokeh("models").Label(**place, text_font=FONT))
    return _chart(figure, label, height=height, most=most)


def shard(label: str, note: str, rows: tuple[int, int, str], columns: tuple[int, int, str]) -> Chart:
    """Return an array as a grid of shards, of which the first is filled.

    Args:
        rows: Length, parts and text; `columns` the same of the other dimension.
    """
    figure = _figure(columns[2], rows[2], height=190, x_range=(0, columns[0]), y_range=(rows[0], 0), zooms=False)
    figure.axis.ticker = []
    figure.axis.major_tick_line_color = None
    figure.grid.visible = False
    figure.axis.axis_label_text_font_size = "12px"
    tall, wide = rows[0] / rows[1], columns[0] / columns[1]
    figure.rect([columns[0] / 2], [rows[0] / 2], columns[0], rows[0], fill_color=PALETTE[0], fill_alpha=0.16)
    figure.rect([wide / 2], [tall / 2], wide, tall, fill_color=PALETTE[0], line_width=0)
    shown = [(part * tall, 0, part * tall, columns[0]) for part in range(rows[1] + 1)] if rows[1] <= 64 else []
    across = [(part * wide, part * wide) for part in range(columns[1] + 1)] if columns[1] <= 64 else []
    ys, xs = [y for y, *_ in shown], [x for x, _ in across]
    style = {"line_color": PALETTE[0], "line_width": 1}
    figure.segment([0] * len(ys), ys, [columns[0]] * len(ys), ys, **style)
    figure.segment(xs, [0] * len(xs), xs, [rows[0]] * len(xs), **style)
    return dataclasses.replace(_chart(figure, label, height=190, most=300), note=note)


def scale(index: np.ndarray, count: int) -> list[str]:
    """Return the colour of each index along an axis: distinct ones for a few, a scale for many."""
    few = PALETTE[:8]
    palette = few if count <= len(few) else bokeh("palettes").Viridis256
    step = 1 if count <= len(few) else (len(palette) - 1) / (count - 1)
    return [palette[int(i * step)] for i in index]


def _figure(
    x: str, y: str, *, height: int = 260, form: str = "", on_y: bool = False, zooms: bool = True, **options: Any
) -> Any:
    tools = "xpan,xbox_zoom,xwheel_zoom,reset,save" if zooms else ""
    options |= {} if zooms else {"toolbar_location": None}
    figure = bokeh("plotting").figure(
        height=height, sizing_mode="stretch_width", tools=tools, active_drag=None, active_scroll=None,
        x_axis_label=x or None, y_axis_label=y or None, min_border_right=16, toolbar_inner=True, **options,
    )  # fmt: skip
    figure.toolbar.logo, figure.toolbar.autohide = None, True
    figure.background_fill_alpha = figure.border_fill_alpha = 0
    figure.axis.axis_label_text_font_style = "normal"
    for axis in figure.axis:
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_size, axis.major_label_text_font_size = "12px", "11px"
        axis.minor_tick_line_color = None
    if form:
        axis = figure.yaxis if on_y else figure.xaxis
        axis.formatter = bokeh("models").NumeralTickFormatter(format=form)
        if form.endswith("ib"):
            axis.ticker = bokeh("models").AdaptiveTicker(base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
            axis.ticker.desired_num_ticks = 5
    return figure


def _source(**columns: Any) -> Any:
    return bokeh("models").ColumnDataSource(columns)


def _hover(figure: Any, drawn: list[Any], tips: Sequence[tuple[str, str]], mode: str = "mouse") -> None:
    tool = bokeh("models").HoverTool(renderers=drawn, tooltips=list(tips), mode=mode, visible=False)
    figure.add_tools(tool)


def _limit(figure: Any, at: float, dimension: str) -> None:
    span = bokeh("models").Span(
        location=at, dimension=dimension, line_dash="dashed", line_width=2, line_color="#d62728", tags=["limit"]
    )
    figure.add_layout(span)


def _before(parts: Mapping[str, float], name: str) -> float:
    """Return where a part begins: after those before it."""
    return float(sum(itertools.islice(parts.values(), list(parts).index(name))))


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return name → colour."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def _legend(names: Sequence[str]) -> tuple[tuple[str, str, str], ...]:
    return tuple((colour, "", name) for name, colour in colours(names).items())


def _chart(
    figure: Any, label: str, legend: tuple[tuple[str, str, str], ...] = (), height: int = 260, most: int = 0
) -> Chart:
    item = bokeh("embed").json_item(figure, "")
    return Chart(_renumbered(item), label, legend, height, most)


def _renumbered(item: Any) -> Any:
    """Return the JSON of a chart with ids in the order in which they come: Bokeh counts on from chart to chart."""
    numbers: dict[str, str] = {}

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: numbers.setdefault(inner, f"p{len(numbers)}")
                if key in ("id", "root_id") and isinstance(inner, str)
                else rename(inner)
                for key, inner in value.items()
            }
        return [rename(inner) for inner in value] if isinstance(value, list) else value

    return rename(item)
