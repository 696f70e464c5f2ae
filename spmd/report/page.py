"""HTML page of a report: one file with its style, its script and the library of its charts."""

import dataclasses
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NewType

from spmd.errors import Problem
from spmd.report.charts import Chart, library
from spmd.storage.address import locate, location_problems
from spmd.storage.output_file import output_problems

Html = NewType("Html", str)
"""Text in which everything that is not markup is escaped."""


@dataclasses.dataclass(frozen=True)
class Section:
    """Section of a page; consecutive charts stand side by side if there is room."""

    title: str
    blocks: Sequence[Html | Chart]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Table cell with a key for the order of rows: a number, or another text than it shows."""

    text: str
    key: float | str


def paragraph(text: str) -> Html:
    """Return a paragraph of plain text."""
    return Html(f"<p>{html.escape(text)}</p>")


def preformatted(text: str) -> Html:
    """Return lines with all their spaces."""
    return Html(f"<pre>{html.escape(text)}</pre>")


def folded(summary: str, inner: Html) -> Html:
    """Return a block to open by a click."""
    return Html(f"<details><summary>{html.escape(summary)}</summary>{inner}</details>")


def notes(texts: Iterable[str]) -> Html:
    """Return remarks about missing parts; empty if there are none."""
    remarks = [f'<p class="note">{html.escape(text)}</p>' for text in texts]
    return Html("".join(remarks))


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return labels with their values, as tiles."""
    tiles = []
    for name, value in pairs:
        tiles.append(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>")
    return Html(f'<dl class="facts">{"".join(tiles)}</dl>')


def table(
    head: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, search: bool = False
) -> Html:
    """Return a table; a click on a heading sorts it, `search` adds a field to search its rows."""
    field = ""
    if search:
        field = '<p><input type="search" placeholder="search" aria-label="search the table"><output></output></p>'
    heading = "".join(map(_heading, head))
    body = "".join(map(_row, rows))
    return Html(
        f'<div class="table">{field}<div class="scroll"><table>'
        f"<thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _heading(name: str) -> str:
    return f'<th scope="col"><button type="button">{html.escape(name)}</button></th>'


def _row(cells: Sequence[str | Cell]) -> str:
    return f"<tr>{''.join(map(_cell, cells))}</tr>"


def _cell(value: str | Cell) -> str:
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    number = ""
    if isinstance(value.key, int | float):
        number = ' class="number"'
    key = html.escape(str(value.key))
    return f'<td{number} data-key="{key}">{html.escape(value.text)}</td>'


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the page, without empty sections."""
    charts: list[Chart] = []
    links = []
    parts = []
    filled = [section for section in sections if section.blocks]
    for number, section in enumerate(filled):
        name = html.escape(section.title)
        links.append(f'<a href="#s{number}">{name}</a>')
        parts.append(f'<section id="s{number}"><h2>{name}</h2>')
        parts += _blocks(section.blocks, charts)
        parts.append("</section>")
    # A "<" in a name must not end the element that holds the JSON.
    items = json.dumps([chart.item for chart in charts], separators=(",", ":"))
    data = items.replace("<", "\\u003c")
    script = ""
    if charts:
        script = f"<script>{library()}</script>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        f"<header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>"
        f"<nav>{' '.join(links)}</nav></header>\n"
        f"<main>{''.join(parts)}</main>\n"
        f'<script type="application/json" id="charts">{data}</script>\n{script}\n'
        f"<script>{_SCRIPT}</script>\n"
        "</body></html>\n"
    )


def _blocks(blocks: Sequence[Html | Chart], charts: list[Chart]) -> Iterator[str]:
    """Yield the blocks of a section, with charts in a row inside of one element.

    Args:
        charts: The charts of the page so far; those of the section are added.
    """
    is_open = False
    for block in blocks:
        if isinstance(block, Chart):
            if not is_open:
                yield '<div class="charts">'
            is_open = True
            yield _figure(block, len(charts))
            charts.append(block)
        else:
            if is_open:
                yield "</div>"
            is_open = False
            yield block
    if is_open:
        yield "</div>"


def _figure(chart: Chart, number: int) -> str:
    note = ""
    if chart.note:
        note = f"<small>{html.escape(chart.note)}</small>"
    width = ""
    if chart.most:
        basis = min(330, 9 * chart.most // 10)
        width = f' style="max-width:{chart.most}px;flex-basis:{basis}px"'
    return (
        f"<figure{width}><figcaption>{html.escape(chart.label)}{note}</figcaption>"
        f'<div class="chart" id="chart-{number}" style="min-height:{chart.height}px"></div>'
        f"{_legend(chart)}</figure>"
    )


def _legend(chart: Chart) -> str:
    """Return the legend of a chart; empty if it has none."""
    if not chart.legend:
        return ""
    entries = []
    for colour, dash, name in chart.legend:
        entries.append(
            '<li><svg viewBox="0 0 18 10" width="18" height="10" aria-hidden="true">'
            f"{_swatch(colour, dash)}</svg>{html.escape(name)}</li>"
        )
    return f"<ul>{''.join(entries)}</ul>"


_DASHES = {"dashed": "6 3", "dotted": "2 2", "dotdash": "2 2 6 2"}


def _swatch(colour: str, dash: str) -> str:
    """Return a piece of a line in the legend, or a filled box for no dash."""
    if not dash:
        return f'<rect width="14" height="10" rx="2" fill="{colour}"/>'
    pattern = ""
    if dash in _DASHES:
        pattern = f' stroke-dasharray="{_DASHES[dash]}"'
    return f'<path d="M0 5H18" stroke="{colour}" stroke-width="2.4"{pattern}/>'


def check_file(where: str, file: str) -> list[Problem]:
    """Return a problem if a report cannot be written to a file of this name.

    Args:
        where: The flag or argument by which the file was given.
    """
    fix = "a file such as report.html"
    if not file:
        return [Problem(where, "is not given", fix=fix)]
    problems = location_problems(where, file)
    if problems:
        return problems
    if not locate(file).name.endswith(".html"):
        return [Problem(where, f"is {file}, and a report is an HTML file", fix=fix)]
    return output_problems(where, file)


_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""A page loads nothing, whatever is in it."""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#5b6470;\
--line:#d9dde3;--accent:#0b62a8;
--warn:#8a4b00;--warn-paper:#fff4e0}
@media (prefers-color-scheme:dark){:root:not(.print){--paper:#14171b;--card:#1d2126;--ink:#e7eaee;\
--soft:#a3acb8;
--line:#363c45;--accent:#6db6f2;--warn:#ffc46b;--warn-paper:#33270f}}
:root{--bk-major-label-text-color:var(--soft);--bk-axis-label-text-color:var(--soft);\
--bk-text-color:var(--soft);
--bk-axis-line-color:var(--line);--bk-major-tick-line-color:var(--line);\
--bk-grid-line-color:var(--line);
--bk-outline-line-color:var(--line)}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,\
"Segoe UI",Helvetica,Arial,
sans-serif}
header,main{max-width:1240px;margin:0 auto;padding:0 16px}
h1{font-size:26px;margin:24px 0 0;overflow-wrap:anywhere}
header p{margin:2px 0 10px;color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;border-bottom:1px solid var(--line);\
padding-bottom:10px}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
h2{font-size:20px;margin:34px 0 8px}
section>p{max-width:76ch;color:var(--soft);margin:6px 0 12px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:10px;\
margin:14px 0}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px}
.facts dt{font-size:12px;color:var(--soft)}.facts dd{margin:0;font-weight:600;\
font-variant-numeric:tabular-nums}
section>p.note{background:var(--warn-paper);color:var(--warn);border-radius:6px;padding:8px 12px;\
white-space:pre-wrap;
max-width:none;overflow-wrap:anywhere}
.charts{display:flex;flex-wrap:wrap;gap:14px}
figure{margin:0;flex:1 1 100%;min-width:0;background:var(--card);border:1px solid var(--line);\
border-radius:8px;
padding:10px 8px 8px;break-inside:avoid}
figure[style]{flex:1 1 auto}
figcaption{font-weight:600;font-size:13.5px;padding:0 6px 4px;overflow-wrap:anywhere}
figcaption small{display:block;font-weight:400;font-size:12.5px;color:var(--soft)}
figure ul{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 6px 0;padding:0;\
font-size:12.5px;
color:var(--soft)}
figure li svg{margin-right:6px;vertical-align:-1px}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;\
overflow-x:auto;
margin:10px 0;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
summary{cursor:pointer;color:var(--accent);margin:10px 0}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px;max-height:640px;\
overflow-y:auto;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:13px}
th{position:sticky;top:0;background:var(--card);text-align:left;padding:0}
th button{all:unset;cursor:pointer;padding:6px 10px;font-weight:600;white-space:nowrap}
th button:focus-visible{outline:2px solid var(--accent)}
th[aria-sort=ascending] button::after{content:" ▲"}\
th[aria-sort=descending] button::after{content:" ▼"}
td{padding:4px 10px;border-top:1px solid var(--line);white-space:nowrap;\
font-variant-numeric:tabular-nums}
td:last-child{white-space:normal;min-width:180px}
td.number{text-align:right}
.table{margin-top:14px}.table p{margin:0}
input{font:inherit;padding:5px 10px;border:1px solid var(--line);border-radius:6px;\
background:var(--paper);
color:inherit;width:min(100%,340px)}
output{margin-left:10px;color:var(--soft);font-size:13px}
@media (max-width:700px){figure[style]{max-width:none!important}}
@media print{.scroll{max-height:none;overflow:visible}nav,input{display:none}\
figure,pre{break-inside:avoid}}
"""

_SCRIPT = """
"use strict";
const items=JSON.parse(document.getElementById("charts").textContent);
const embedded=items.map((item,i)=>Bokeh.embed.embed_item(item,"chart-"+i));
Promise.all(embedded).then(managers=>{
  const views=managers.flatMap(manager=>manager.roots);
  const repaint=()=>views.forEach(view=>view.repaint());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change",repaint);
  const root=document.documentElement;
  addEventListener("beforeprint",()=>{root.classList.add("print");repaint()});
  addEventListener("afterprint",()=>{root.classList.remove("print");repaint()});
  requestAnimationFrame(()=>requestAnimationFrame(()=>{\
root.dataset.drawn=Math.round(performance.now())}));
});
for(const box of document.querySelectorAll(".table")){
  const body=box.querySelector("tbody"),heads=[...box.querySelectorAll("th")],\
search=box.querySelector("input");
  const key=(row,i)=>row.cells[i].dataset.key??row.cells[i].textContent;
  heads.forEach((head,i)=>head.querySelector("button").addEventListener("click",()=>{
    const up=head.getAttribute("aria-sort")!=="ascending";
    heads.forEach(other=>other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort",up?"ascending":"descending");
    const rows=[...body.rows],numeric=rows.every(row=>key(row,i)!==""&&!isNaN(key(row,i)));
    const order=(a,b)=>numeric?key(a,i)-key(b,i):key(a,i).localeCompare(key(b,i),"en",\
{numeric:true});
    rows.sort((a,b)=>up?order(a,b):order(b,a)).forEach(row=>body.append(row));
  }));
  if(search)search.addEventListener("input",()=>{
    const words=search.value.toLowerCase().split(/\\s+/);let shown=0;
    for(const row of body.rows){
      const text=row.textContent.toLowerCase();row.hidden=!words.every(word=>text.includes(word));\
shown+=!row.hidden;
    }
    box.querySelector("output").textContent=search.value?`${shown} of ${body.rows.length}`:"";
  });
}
"""
