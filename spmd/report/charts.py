"""Kinds of charts, drawn by Bokeh in the reader's browser.

Colours of text, axes and grids are CSS variables of the page (`spmd.report.page`), so that one
chart serves light and dark. Bokeh is imported when the first chart is made.
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
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#8c6bb1",
    "#b8a500",
    "#a0522d",
    "#7f7f7f",
    "#5f9ea0",
)
"""Colours to tell apart with the common kinds of colour blindness, on light and on dark paper."""
DASHES = ("solid", "dashed", "dotted", "dotdash")
FONT = "Helvetica, Arial, sans-serif"
_IN_CELLS = {
    "text_align": "center",
    "text_baseline": "middle",
    "text_font_size": "11px",
    "text_font": {"value": FONT},
}
_FEW_POINTS = 30
"""A curve of fewer points has a dot at each."""
_MOST_TEXTS = 512
"""Most cells with a text inside; more have no room for it."""
_MOST_LABELS = 64
"""Most panels of cells with a label."""
_MOST_BORDERS = 64
"""Most parts of an array with lines between them."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart, as the page embeds it.

    Attributes:
        item: JSON of `Bokeh.embed.embed_item`.
        label: Caption; `note` is a line under it.
        legend: (Colour, dash, name) of each thing drawn.
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
    """Import a module of Bokeh, or raise `ConfigError` if Bokeh is not installed."""
    try:
        return importlib.import_module(f"bokeh.{module}")
    except ModuleNotFoundError as error:
        problem = Problem(
            "spmd report",
            "needs Bokeh, which is not installed",
            fix="pip install 'spmd[report]'",
        )
        raise ConfigError("Report not written:", [problem]) from error


def library() -> str:
    """Return Bokeh's script as a text."""
    resources = bokeh("resources").Resources(
        mode="inline",
        components=["bokeh"],
        log_level="warn",
    )
    return "\n".join(resources.js_raw)


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
    axis_type = "linear"
    if logarithmic:
        axis_type = "log"
    figure = _figure(x, "", form=form, on_y=True, y_axis_type=axis_type)
    for curve in curves:
        _draw_curve(figure, curve, x, form)
    for at in marks:
        mark = bokeh("models").Span(
            location=at,
            dimension="height",
            line_dash="dashed",
            line_width=1,
        )
        figure.add_layout(mark)
    legend = []
    if len(curves) > 1:
        for curve in curves:
            legend.append((curve.colour, curve.dash, curve.name))
    return _chart(figure, label, tuple(legend), most=most)


def _draw_curve(figure: Any, curve: Line, x: str, form: str) -> None:
    # Narrow types: the values are written into the page.
    data = _source(x=np.array(curve.x, np.int32), y=np.array(curve.y, np.float32))
    style = {"source": data, "line_color": curve.colour}
    if len(curve.x) < _FEW_POINTS:
        figure.scatter("x", "y", size=5, fill_color=curve.colour, **style)
    drawn = figure.line(
        "x",
        "y",
        line_width=1.8,
        line_dash=curve.dash,
        name=curve.name,
        **style,
    )
    value_form = form or "0,0.[000000]"
    tips = [("", "$name"), (x, "@x{0,0}"), ("", f"@y{{{value_form}}}")]
    _hover(figure, [drawn], tips)


def stacked_bars(
    label: str,
    bars: Sequence[tuple[str, Mapping[str, float]]],
    *,
    x: str,
    form: str = "0.[00] ib",
    limit: float = 0,
) -> Chart:
    """Return horizontal bars of parts; a dashed line marks a limit above 0.

    The same part has one colour in all bars. `form` is numbro's format of the values: bytes by
    default.
    """
    names: dict[str, None] = {}
    labels = []
    totals = []
    for label_of_bar, parts in bars:
        names |= dict.fromkeys(parts)
        labels.append(label_of_bar)
        totals.append(sum(parts.values()))
    labels.reverse()  # Bokeh counts them from the bottom
    height = 70 + 34 * len(bars)
    figure = _figure(x, "", height=height, y_range=labels, form=form, zooms=False)
    for name, colour in colours(list(names)).items():
        drawn = figure.hbar(
            "bar",
            left="left",
            right="right",
            height=0.68,
            source=_part_in_bars(bars, name),
            color=colour,
            line_width=0,
        )
        _hover(figure, [drawn], [("", "@bar: @name"), (x, f"@size{{{form}}}")])
    figure.ygrid.visible = False
    figure.x_range.start = 0
    if limit:
        _limit(figure, limit, "height")
        figure.x_range.end = 1.05 * max(limit, *totals)
    return _chart(figure, label, _legend(list(names)), height)


def _part_in_bars(bars: Sequence[tuple[str, Mapping[str, float]]], name: str) -> Any:
    """Return the columns of one part, without rows for bars without it."""
    with_part, starts, ends, sizes = [], [], [], []
    for bar, parts in bars:
        if name not in parts:
            continue
        start = _before(parts, name)
        size = parts[name]
        with_part.append(bar)
        starts.append(start)
        ends.append(start + size)
        sizes.append(size)
    return _source(
        bar=with_part,
        left=starts,
        right=ends,
        size=sizes,
        name=[name] * len(with_part),
    )


def stacked_areas(
    label: str,
    x: np.ndarray,
    parts: Mapping[str, np.ndarray],
    *,
    title: str,
    limit: float = 0,
) -> Chart:
    """Return bytes over time as stacked steps, with a dashed line at a limit above 0."""
    figure = _figure(title, "", form="0.[00] ib", on_y=True)
    ends = np.append(x[1:], x[-1] + 1)
    at = np.stack([x, ends], axis=1).ravel().astype(float)  # both ends of each step
    base = np.zeros(len(at))
    for name, colour in colours(list(parts)).items():
        top = base + np.repeat(parts[name], 2)
        figure.varea(x=at, y1=base, y2=top, fill_color=colour)
        base = top
    columns = {"x": x, "top": base[::2]}
    tips = [("all", "@top{0.[00] ib}")]
    for number, (name, values) in enumerate(parts.items()):
        columns[f"part{number}"] = values
        tips.append((name, f"@part{number}{{0.[00] ib}}"))
    # Invisible dots carry the tips: an area has none.
    drawn = figure.scatter("x", "top", source=_source(**columns), size=6, alpha=0)
    _hover(figure, [drawn], tips, mode="vline")
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
    """Return boxes `(row, start, end, kind, name)` over time, each row a lane.

    `texts` are written on the boxes.
    """
    lane_height = max(24, min(56, 480 // len(rows)))
    height = 80 + lane_height * len(rows)
    figure = _figure(x, "", height=height, y_range=list(rows)[::-1])
    columns = _box_columns(boxes, colours)
    edge: dict[str, Any] = {"line_color": "colour", "line_width": 0.3}
    if texts:
        columns["text"] = list(texts)
        columns["ink"] = list(map(ink_on, columns["colour"]))
        edge = {"line_color": "white", "line_width": 1}
    data = _source(**columns)
    drawn = figure.hbar(
        "row",
        left="left",
        right="right",
        height=0.78,
        source=data,
        fill_color="colour",
        **edge,
    )
    time = f"@left{{{form}}} to @right{{{form}}}"
    _hover(figure, [drawn], [("", "@name"), ("", "@kind"), (x, time)])
    if texts:
        figure.text("middle", "row", text="text", source=data, text_color="ink", **_IN_CELLS)
    figure.ygrid.visible = False
    figure.x_range.start = 0
    figure.x_range.end = max(end for _, _, end, _, _ in boxes)
    legend = []
    for kind, colour in colours.items():
        if kind in columns["kind"]:
            legend.append((colour, "", kind))
    return _chart(figure, label, tuple(legend), height)


def _box_columns(
    boxes: Sequence[tuple[str, float, float, str, str]], colours: Mapping[str, str]
) -> dict[str, Any]:
    rows, box_starts, box_ends, kinds, names = zip(*boxes, strict=True)
    starts = np.array(box_starts, float)
    ends = np.array(box_ends, float)
    return {
        "row": list(rows),
        "left": starts,
        "right": ends,
        "middle": (starts + ends) / 2,
        "kind": list(kinds),
        "name": list(names),
        "colour": [colours[kind] for kind in kinds],
    }


def cells(
    label: str,
    columns: Mapping[str, Any],
    tips: Sequence[tuple[str, str]],
    *,
    size: tuple[float, float],
    links: Sequence[tuple[float, float, float, float]] = (),
    labels: Mapping[str, tuple[float, float]],
) -> Chart:
    """Return square cells at columns `x` and `y` (downwards) in `colour`.

    A few of them have their `text` in `ink`.

    Args:
        size: Columns and rows of the whole.
        links: Segments under the cells.
        labels: Text → column and row of the cell under it.
    """
    width, high = size
    most = round(min(620.0, max(300.0, 45 * width)))
    height = round(min(520.0, max(90.0, most * (high + 0.9) / (width + 0.8))))
    figure = _figure(
        "",
        "",
        height=height,
        match_aspect=True,
        x_range=(-0.9, width - 0.1),
        y_range=(high - 0.1, -0.95),
        zooms=False,
    )
    figure.axis.visible = False
    figure.grid.visible = False
    figure.outline_line_alpha = 0
    if links:
        x0, y0, x1, y1 = map(list, zip(*links, strict=True))
        figure.segment(x0, y0, x1, y1, line_color="#8a8f98", line_width=2)
    has_text = len(columns["x"]) <= _MOST_TEXTS
    data = _cell_source(columns, has_text)
    drawn = figure.rect(
        "x",
        "y",
        width=0.82,
        height=0.82,
        source=data,
        fill_color="colour",
        line_color="colour",
        line_width=0.5,
    )
    if has_text:
        figure.text("x", "y", text="text", source=data, text_color="ink", **_IN_CELLS)
    _hover(figure, [drawn], tips)
    _label_cells(figure, labels)
    return _chart(figure, label, height=height, most=most)


def _cell_source(columns: Mapping[str, Any], has_text: bool) -> Any:
    """Return the columns of cells with narrow numbers, and with texts if they are shown."""
    kept = {}
    for name, column in columns.items():
        if name in ("text", "ink") and not has_text:
            continue
        if isinstance(column, np.ndarray):
            kept[name] = column.astype(np.int32)
        else:
            kept[name] = column
    return _source(**kept)


def _label_cells(figure: Any, labels: Mapping[str, tuple[float, float]]) -> None:
    """Write each text over the corner of its cell; nothing if there are too many of them."""
    named = {text: at for text, at in labels.items() if text}
    if len(named) > _MOST_LABELS:
        return
    for text, (column, row) in named.items():
        over = bokeh("models").Label(
            x=column - 0.45,
            y=row - 0.5,
            text=text,
            text_font_size="11px",
            text_font=FONT,
        )
        figure.add_layout(over)


def shard(
    label: str, note: str, rows: tuple[int, int, str], columns: tuple[int, int, str]
) -> Chart:
    """Return an array as a grid of shards with the first one filled.

    Args:
        rows: Length, parts and text; `columns` the same of the other dimension.
    """
    row_count, row_parts, row_text = rows
    column_count, column_parts, column_text = columns
    figure = _figure(
        column_text,
        row_text,
        height=190,
        x_range=(0, column_count),
        y_range=(row_count, 0),
        zooms=False,
    )
    figure.axis.ticker = []
    figure.axis.major_tick_line_color = None
    figure.grid.visible = False
    figure.axis.axis_label_text_font_size = "12px"
    figure.rect(
        [column_count / 2],
        [row_count / 2],
        column_count,
        row_count,
        fill_color=PALETTE[0],
        fill_alpha=0.16,
    )
    tall = row_count / row_parts
    wide = column_count / column_parts
    figure.rect([wide / 2], [tall / 2], wide, tall, fill_color=PALETTE[0], line_width=0)
    ys = _borders(tall, row_parts)
    xs = _borders(wide, column_parts)
    style = {"line_color": PALETTE[0], "line_width": 1}
    figure.segment([0] * len(ys), ys, [column_count] * len(ys), ys, **style)
    figure.segment(xs, [0] * len(xs), xs, [row_count] * len(xs), **style)
    chart = _chart(figure, label, height=190, most=300)
    return dataclasses.replace(chart, note=note)


def _borders(size: float, parts: int) -> list[float]:
    """Return the borders of parts of one size; none if so many lines would run together."""
    if parts > _MOST_BORDERS:
        return []
    return [part * size for part in range(parts + 1)]


def scale(index: np.ndarray, count: int) -> list[str]:
    """Return the colour of each index along an axis: distinct ones for a few, a scale for many."""
    palette: Sequence[str] = PALETTE[:8]
    step = 1.0
    if count > len(palette):
        palette = bokeh("palettes").Viridis256
        step = (len(palette) - 1) / (count - 1)
    return [palette[int(i * step)] for i in index]


def _figure(
    x: str,
    y: str,
    *,
    height: int = 260,
    form: str = "",
    on_y: bool = False,
    zooms: bool = True,
    **options: Any,
) -> Any:
    """Return an empty figure in the style of the page.

    Args:
        x: Label of the horizontal axis; `y` that of the vertical one.
        form: numbro's format of the values, on the vertical axis if `on_y`.
        zooms: Whether the reader can move and enlarge it.
        options: Further options of `bokeh.plotting.figure`.
    """
    tools = ""
    if zooms:
        tools = "xpan,xbox_zoom,xwheel_zoom,reset,save"
    else:
        options["toolbar_location"] = None
    figure = bokeh("plotting").figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        active_drag=None,
        active_scroll=None,
        x_axis_label=x or None,
        y_axis_label=y or None,
        min_border_right=16,
        toolbar_inner=True,
        **options,
    )
    _style(figure)
    if form and on_y:
        _format_ticks(figure.yaxis, form)
    elif form:
        _format_ticks(figure.xaxis, form)
    return figure


def _style(figure: Any) -> None:
    """Leave the colours to the page, and make texts as small as its captions."""
    figure.toolbar.logo = None
    figure.toolbar.autohide = True
    figure.background_fill_alpha = 0
    figure.border_fill_alpha = 0
    figure.axis.axis_label_text_font_style = "normal"
    for axis in figure.axis:
        axis.axis_label_text_font = FONT
        axis.major_label_text_font = FONT
        axis.axis_label_text_font_size = "12px"
        axis.major_label_text_font_size = "11px"
        axis.minor_tick_line_color = None


def _format_ticks(axis: Any, form: str) -> None:
    axis.formatter = bokeh("models").NumeralTickFormatter(format=form)
    if form.endswith("ib"):
        powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        axis.ticker = bokeh("models").AdaptiveTicker(base=1024, mantissas=powers)
        axis.ticker.desired_num_ticks = 5


def _source(**columns: Any) -> Any:
    return bokeh("models").ColumnDataSource(columns)


def _hover(
    figure: Any, drawn: list[Any], tips: Sequence[tuple[str, str]], mode: str = "mouse"
) -> None:
    tool = bokeh("models").HoverTool(
        renderers=drawn,
        tooltips=list(tips),
        mode=mode,
        visible=False,
    )
    figure.add_tools(tool)


def _limit(figure: Any, at: float, dimension: str) -> None:
    span = bokeh("models").Span(
        location=at,
        dimension=dimension,
        line_dash="dashed",
        line_width=2,
        line_color="#d62728",
        tags=["limit"],
    )
    figure.add_layout(span)


def _before(parts: Mapping[str, float], name: str) -> float:
    """Return the start of a part in its bar: the sum of the parts before it."""
    place = list(parts).index(name)
    sizes = list(parts.values())
    return float(sum(sizes[:place]))


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return name → colour."""
    return dict(zip(names, itertools.cycle(PALETTE), strict=False))


def _legend(names: Sequence[str]) -> tuple[tuple[str, str, str], ...]:
    legend = []
    for name, colour in colours(names).items():
        legend.append((colour, "", name))
    return tuple(legend)


def _chart(
    figure: Any,
    label: str,
    legend: tuple[tuple[str, str, str], ...] = (),
    height: int = 260,
    most: int = 0,
) -> Chart:
    item = bokeh("embed").json_item(figure, "")
    numbers: dict[str, str] = {}
    return Chart(_renumber(item, numbers), label, legend, height, most)


def _renumber(value: Any, numbers: dict[str, str]) -> Any:
    """Return JSON with ids in their order of appearance: Bokeh counts on from chart to chart.

    Args:
        numbers: Bokeh's id → the new one; new ids are added.
    """
    if isinstance(value, list):
        return [_renumber(inner, numbers) for inner in value]
    if not isinstance(value, dict):
        return value
    renumbered = {}
    for key, inner in value.items():
        if key in ("id", "root_id") and isinstance(inner, str):
            renumbered[key] = numbers.setdefault(inner, f"p{len(numbers)}")
        else:
            renumbered[key] = _renumber(inner, numbers)
    return renumbered
