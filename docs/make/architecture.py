"""Draw the folders of spmd and their floors: `python docs/make/architecture.py` writes the SVG of the page.

All text is inside filled boxes, so the drawing is readable on a light and on a dark page.
"""

import xml.etree.ElementTree as ET
from pathlib import Path

TARGET = Path(__file__).parents[1] / "pictures" / "architecture.svg"

COMMANDS = [("cli", "dispatch"), ("commands", "one module per command")]
RUN = [
    ("report", "charts of plans and runs, as one HTML file"),
    ("run", "build a run from a TrainConfig, start it, check it, drive it"),
]
SERVICES = [
    ("lora", "adapters of frozen parameters"),
    ("checkpoint", "save, verify, restore"),
    ("data", "corpus, tokenizer, batches"),
    ("generate", "decode with a KV cache"),
    ("observe", "metrics, goodput, traces"),
    ("resilience", "watchdog, preemption, SDC"),
    ("analysis", "memory, collectives"),
    ("step_time", "predicted time of a step"),
    ("parity", "each step against one device"),
    ("testing", "for tests of users"),
    ("hf", "Hugging Face checkpoints"),
]
PROCESSES = ("distributed", "processes, exchange of values, XLA flags")
CORE = [
    ("training", "state, compiled step, loop"),
    ("pipeline", "schedules, and the GradFn that executes them"),
    ("gradients", "losses as sums; GradFn and its wrappers"),
    ("layers", "attention, experts, LM head: layers that communicate"),
    ("plan", "every decision, resolved; how model code reads it"),
    ("optim", "optimizers that see layers; narrow and offloaded state"),
    ("model_api", "what a model declares: functions, precision, remat"),
    PROCESSES,
    ("sharding", "meshes, rule tables, ZeRO, specs of optimizer state"),
]
GROUND = [("jaxpr", "walking traced programs"), ("tree", "paths of a pytree"), ("errors", "SpmdError, Problem")]
FAMILIES = [
    ("models", "Flax NNX modules"),
    ("partition_rules", "one rule table per family"),
    ("name_maps", "Hugging Face tensor names"),
    ("examples", "configs and scripts"),
]

NOTES = [
    "Imports run downwards only.",
    "Blue and grey are the core.",
    "Services do not know the run.",
    "Model families import from spmd;",
    "spmd never imports them.",
]

INK, ARROW = "#1b1f24", "#8a8f98"
BLUE, GREEN, YELLOW, GREY, ROSE = "#bcd7f5", "#c3e6cb", "#fbe5a3", "#dfe3e8", "#f5cdd3"
WIDTH, LEFT, GAP, ROW = 980, 700, 8, 46  # pixels


def box(root: ET.Element, x: float, y: float, width: float, height: float, fill: str) -> None:
    """Draw one filled box."""
    size = {"x": x, "y": y, "width": width, "height": height, "rx": 5}
    ET.SubElement(root, "rect", {name: f"{value:g}" for name, value in size.items()} | {"fill": fill})


def write(root: ET.Element, x: float, y: float, text: str, *, size: int = 13, weight: str = "normal") -> None:
    """Write one line of text."""
    place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": str(size), "font-weight": weight, "fill": INK}
    ET.SubElement(root, "text", place).text = text


def folder(root: ET.Element, x: float, y: float, width: float, entry: tuple[str, str], fill: str) -> None:
    """Draw a folder: its name and what is in it, on one line if both fit, else on two."""
    name, text = entry
    one_line = 7 * (len(name) + len(text)) + 110 < width
    box(root, x, y, width, 30 if one_line else ROW, fill)
    write(root, x + 10, y + 20, name, weight="bold")
    write(root, *((x + 120, y + 20) if one_line else (x + 10, y + 37)), text, size=12)


def draw() -> ET.Element:
    """Draw all floors, the lowest last."""
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": "sans-serif"})
    ET.SubElement(root, "title").text = "Folders of spmd: a folder imports from those below it"
    y = 0.0
    for entry in COMMANDS + RUN:
        folder(root, 0, y, LEFT, entry, ROSE if entry in COMMANDS else YELLOW)
        y += 30 + GAP
    third = (LEFT - 2 * GAP) / 3
    for row in range(0, len(SERVICES), 3):
        for column, entry in enumerate(reversed(SERVICES[max(len(SERVICES) - row - 3, 0) : len(SERVICES) - row])):
            folder(root, (2 - column) * (third + GAP), y, third, entry, GREEN)
        y += ROW + GAP
    core = y
    for entry in CORE:
        folder(root, 0, y, LEFT, entry, GREEN if entry is PROCESSES else BLUE)
        y += 30 + GAP
    for entry in GROUND:
        folder(root, 0, y, LEFT, entry, GREY)
        y += 30 + GAP
    x, width = LEFT + 50, WIDTH - LEFT - 50
    top = core + 40
    for entry in FAMILIES:
        folder(root, x, top, width, entry, GREY)
        top += ROW + GAP
    points = f"{x - 4:g},{core + 120:g} {LEFT + 14:g},{core + 120:g}"
    ET.SubElement(root, "polyline", {"points": points, "stroke": ARROW, "stroke-width": "3", "fill": "none"})
    tip = f"{LEFT + 6:g},{core + 120:g} {LEFT + 18:g},{core + 113:g} {LEFT + 18:g},{core + 127:g}"
    ET.SubElement(root, "polygon", {"points": tip, "fill": ARROW})
    box(root, x, 0, width, 112, GREY)
    for line, text in enumerate(NOTES):
        write(root, x + 10, 22 + 19 * line, text, size=12)
    root.set("viewBox", f"0 0 {WIDTH} {y - GAP:g}")
    root.set("width", str(WIDTH))
    root.set("height", f"{y - GAP:g}")
    ET.indent(root)
    return root


if __name__ == "__main__":
    TARGET.write_text(ET.tostring(draw(), encoding="unicode") + "\n", encoding="utf-8")
