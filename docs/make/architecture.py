"""Draw the folders of spmd and their floors: `python docs/make/architecture.py` writes the SVG of the page.

All text is inside filled boxes, so the drawing is readable on a light and on a dark page.
"""

import xml.etree.ElementTree as ET
from pathlib import Path

TARGET = Path(__file__).parents[1] / "pictures" / "architecture.svg"

INK, ARROW = "#1b1f24", "#8a8f98"
CORE, SETTING, TECHNIQUE, SERVICE, FAMILY = "#bcd7f5", "#b4e2e6", "#dccbf3", "#c3e6cb", "#dfe3e8"
RUN, COMMAND = "#fbe5a3", "#f5cdd3"

# Rows from the top: one folder over the whole width, or up to three, of which the left one is the
# lowest.
ROWS = [
    [("cli", "dispatch", COMMAND)],
    [("commands", "one module per command", COMMAND)],
    [("report", "charts of plans and runs, as one HTML file", RUN)],
    [
        ("run", "build, start, check and drive a run", RUN),
        ("job_files", "Slurm, Kubernetes, TPU VMs", RUN),
    ],
    [
        ("parity", "each step against one device", SERVICE),
        ("testing", "for tests of users", SERVICE),
        ("doctor", "drivers, network, speeds", SERVICE),
        ("hf", "Hugging Face checkpoints", SERVICE),
    ],
    [
        ("resilience", "watchdog, preemption, SDC", SERVICE),
        ("analysis", "memory, collectives", SERVICE),
        ("step_time", "predicted time of a step", SERVICE),
    ],
    [
        ("data", "corpus, tokenizer, batches", SERVICE),
        ("generate", "decode with a KV cache", SERVICE),
        ("observe", "metrics, goodput, traces", SERVICE),
    ],
    [
        ("diloco", "replicas with steps of their own", TECHNIQUE),
        ("lora", "adapters of frozen parameters", TECHNIQUE),
        ("checkpoint", "save, verify, restore", SERVICE),
    ],
    [("training", "state, compiled step, loop", CORE)],
    [
        ("powersgd", "gradients of low rank", TECHNIQUE),
        ("pipeline", "schedules, and their executor", SERVICE),
        ("pipedream", "a pipeline without a flush", TECHNIQUE),
    ],
    [("gradients", "losses as sums; GradFn and its wrappers", CORE)],
    [("layers", "attention, experts, LM head: layers that communicate", SERVICE)],
    [("plan", "every decision, resolved; how model code reads it", CORE)],
    [("settings", "recipes, compression, offload: what each name stands for", SETTING)],
    [
        ("delayed_scaling", "fp8 scales from earlier steps", TECHNIQUE),
        ("coded_comm", "parameters sent as codes", TECHNIQUE),
        ("host_memory", "state that is fetched in parts", TECHNIQUE),
    ],
    [("optim", "optimizers that see layers; where the state is between steps", CORE)],
    [
        ("loss_scaling", "the scale of a float16 loss", TECHNIQUE),
        ("precision", "the dtypes of a run", SETTING),
    ],
    [("model_interface", "what a model declares; transforms of the gradient", CORE)],
    [
        ("distributed", "processes, XLA flags", SERVICE),
        ("jaxpr", "walking traced programs", CORE),
        ("codecs", "arrays in fewer bits", SERVICE),
    ],
    [("sharding", "meshes, rule tables, ZeRO; how a parameter travels", CORE)],
    [
        ("tree", "paths of a pytree", CORE),
        ("storage", "buckets, mirrored folders", SERVICE),
    ],
    [("chips", "what is known of each kind of chip, one entry each", SERVICE)],
    [("errors", "SpmdError, Problem", CORE)],
]
FAMILIES = [
    ("models", "Flax NNX modules"),
    ("partition_rules", "one rule table per family"),
    ("name_maps", "Hugging Face tensor names"),
    ("examples", "configs and scripts"),
]
NOTES = [
    ("Imports run downwards only.", FAMILY),
    ("The core names no technique.", CORE),
    ("Settings: what a user names.", SETTING),
    ("Techniques, behind contracts.", TECHNIQUE),
    ("Services do not know the run.", SERVICE),
    ("Model families import from spmd;", FAMILY),
    ("spmd never imports them.", FAMILY),
]

WIDTH, LEFT, GAP, LINE, ROW = 980, 700, 8, 30, 46  # pixels


def box(
    root: ET.Element, x: float, y: float, width: float, height: float, fill: str, radius: int = 5
) -> None:
    """Draw one filled box."""
    size = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
    ET.SubElement(
        root, "rect", {name: f"{value:g}" for name, value in size.items()} | {"fill": fill}
    )


def write(
    root: ET.Element, x: float, y: float, text: str, *, size: int = 13, weight: str = "normal"
) -> None:
    """Write one line of text."""
    place = {
        "x": f"{x:g}",
        "y": f"{y:g}",
        "font-size": str(size),
        "font-weight": weight,
        "fill": INK,
    }
    ET.SubElement(root, "text", place).text = text


def folder(
    root: ET.Element, x: float, y: float, width: float, name: str, text: str, fill: str
) -> float:
    """Draw a folder, its name and what is in it: on one line in a box over the whole width, else on two."""
    one_line = width == LEFT
    height = LINE if one_line else ROW
    box(root, x, y, width, height, fill)
    write(root, x + 10, y + 20, name, weight="bold")
    write(root, *((x + 120, y + 20) if one_line else (x + 10, y + 37)), text, size=12)
    return height


def draw() -> ET.Element:
    """Draw all floors, the lowest last."""
    root = ET.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": "sans-serif"}
    )
    ET.SubElement(root, "title").text = "Folders of spmd: a folder imports from those below it"
    third, y, tops = (LEFT - 2 * GAP) / 3, 0.0, {}
    for row in ROWS:
        width = LEFT if len(row) == 1 else third
        for column, (name, text, fill) in enumerate(reversed(row)):
            tops[name] = y
            height = folder(root, LEFT - width - column * (width + GAP), y, width, name, text, fill)
        y += height + GAP
    x, width = LEFT + 50, WIDTH - LEFT - 50
    top = tops["layers"] + (ROW + GAP) / 2 - 2 * (ROW + GAP)
    for name, text in FAMILIES:
        folder(root, x, top, width, name, text, FAMILY)
        top += ROW + GAP
    middle = tops["layers"] + LINE / 2
    points = f"{x - 4:g},{middle:g} {LEFT + 14:g},{middle:g}"
    ET.SubElement(
        root, "polyline", {"points": points, "stroke": ARROW, "stroke-width": "3", "fill": "none"}
    )
    tip = f"{LEFT + 6:g},{middle:g} {LEFT + 18:g},{middle - 7:g} {LEFT + 18:g},{middle + 7:g}"
    ET.SubElement(root, "polygon", {"points": tip, "fill": ARROW})
    line = 21
    for number, (text, fill) in enumerate(NOTES):
        box(root, x, line * number, width, line, fill, radius=0)
        write(root, x + 10, line * number + 15, text, size=12)
    root.set("viewBox", f"0 0 {WIDTH} {y - GAP:g}")
    root.set("width", str(WIDTH))
    root.set("height", f"{y - GAP:g}")
    ET.indent(root)
    return root


if __name__ == "__main__":
    TARGET.write_text(ET.tostring(draw(), encoding="unicode") + "\n", encoding="utf-8")
