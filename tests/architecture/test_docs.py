"""Documentation is complete and valid: links resolve, Python blocks parse, every page, name and folder is listed."""

import ast
import dataclasses
import importlib
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

import spmd
from tests.architecture.test_floors import FAMILIES, FLOORS, is_folder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(
    r"^ *(?P<ticks>`{3,})(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *(?P=ticks) *$", re.M | re.S
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *#*$", re.M)
NOT_RUN = "<!-- not run -->"


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: its language, its first line in the document, its code, and whether it is marked."""

    language: str
    line: int
    code: str
    is_marked: bool


def blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        marked = before.rstrip().endswith(NOT_RUN)
        yield Block(
            match["language"], before.count("\n") + 2, textwrap.dedent(match["code"]), marked
        )


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as code hosts and as the site spell them."""
    titles = [
        re.sub(r"[^\w\s-]", "", match["title"].lower())
        for match in HEADING.finditer(FENCE.sub("", text))
    ]
    return {title.replace(" ", "-") for title in titles} | {
        re.sub(r"[\s-]+", "-", title) for title in titles
    }


def broken_links(path: Path, text: str) -> list[str]:
    """Return the relative links of a document that do not resolve."""
    broken = []
    for match in LINK.finditer(FENCE.sub("", text)):
        target, _, fragment = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = path.parent / target if target else path
        # the site has the files of docs/, and no others
        home = DOCS if DOCS in path.parents else ROOT
        if target and (not file.exists() or home not in (file.resolve(), *file.resolve().parents)):
            broken.append(match["target"])
        elif fragment and file.suffix == ".md":
            linked = text if file == path else file.read_text(encoding="utf-8")
            if fragment not in anchors(linked):
                broken.append(match["target"])
    return broken


def broken_python(text: str) -> list[str]:
    """Return the Python blocks that neither parse nor are marked."""
    broken = []
    for block in blocks(text):
        if block.language in ("python", "py") and not block.is_marked:
            try:
                ast.parse(block.code)
            except SyntaxError as error:
                broken.append(f"line {block.line + (error.lineno or 1) - 1}: {error.msg}")
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document(document: str) -> None:
    """A document exists, its relative links resolve, and its Python blocks parse."""
    path = ROOT / document
    assert path.is_file(), f"{document} is missing"
    text = path.read_text(encoding="utf-8")
    assert not broken_links(path, text)
    assert not broken_python(text)


def test_links_control() -> None:
    """A link to a missing file or heading, or out of the repository, is found."""
    text = (
        "# Two words\n[a](LICENSE) [b](#two-words) [c](https://x.invalid) [d](NO.md) [e](#three)\n"
    )
    assert broken_links(ROOT / "README.md", text) == ["NO.md", "#three"]
    assert broken_links(ROOT / "README.md", "[out](../)") == ["../"]
    assert broken_links(DOCS / "index.md", "[out](../README.md) [in](glossary.md)") == [
        "../README.md"
    ]
    assert broken_links(ROOT / "README.md", '```\n[a](NO.md)\n```\n[b](NO.md "title")') == ["NO.md"]


def test_python_control() -> None:
    """A block that does not parse is found by its line, unless it is marked directly before."""
    bad = "text\n\n```python\nx = 1\ny = = 2\n```\n"
    assert [problem.split(":")[0] for problem in broken_python(bad)] == ["line 5"]
    assert not broken_python(bad.replace("```python", f"{NOT_RUN}\n```python"))
    assert broken_python(f"{NOT_RUN}\nmore text\n{bad}")
    assert not broken_python(bad.replace("= =", "="))
    assert not broken_python(bad.replace("python", "sh"))


FILE = re.compile(
    r"`((?:spmd|models|partition_rules|name_maps|tests|examples|benchmarks|docs)/[\w./-]*)`"
)
NAME = re.compile(r"`(?!spmd\.NAME)(spmd(?:\.\w+)+)(?:\([^`]*\))?`")


def exists(name: str) -> bool:
    """Return whether a dotted name is that of a module, or of something in one."""
    module, attributes = name, list[str]()
    while module:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            attributes.insert(0, attribute)
    else:
        return False
    for attribute in attributes:
        fields = getattr(found, "__dataclass_fields__", {})
        if not hasattr(found, attribute) and attribute not in fields:
            return False
        found = getattr(found, attribute, None)
    return True


def unknown_names(text: str) -> list[str]:
    """Return the files and the names of spmd in a document that do not exist."""
    prose = FENCE.sub("", text)
    files = [file for file in FILE.findall(prose) if not (ROOT / file).exists()]
    return files + [name for name in NAME.findall(prose) if not exists(name)]


OF_THE_PAST = re.compile(r"CHANGELOG\.md|docs/decisions/.*")


@pytest.mark.parametrize("document", [*itertools.filterfalse(OF_THE_PAST.fullmatch, DOCUMENTS)])
def test_what_a_document_names_exists(document: str) -> None:
    """Files and dotted names; `spmd.NAME` stands for any."""
    assert not unknown_names((ROOT / document).read_text(encoding="utf-8"))


def test_names_control() -> None:
    """A module, a class, a method and a field are found; other names are not."""
    text = (
        "`spmd/cli.py` `spmd/no.py` `spmd.RunConfig` `spmd.plan.plan.make_plan(model, …)` "
        "`spmd.plan.no` `spmd.RunConfig.steps`"
    )
    assert unknown_names(text) == ["spmd/no.py", "spmd.plan.no"]


def pages_of(nav: object) -> Iterator[str]:
    """Yield the pages of a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from (page for entry in nav.values() for page in pages_of(entry))
    elif isinstance(nav, list):
        yield from (page for entry in nav for page in pages_of(entry))


def test_navigation() -> None:
    """The site's navigation has every page exactly once."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_of(nav)) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )


def test_navigation_control() -> None:
    """Nested pages are found, with and without a title."""
    assert list(pages_of(["a.md", {"B": ["b.md", {"C": "c.md"}]}])) == ["a.md", "b.md", "c.md"]


def missing(words: Iterable[str], text: str) -> list[str]:
    """Return the words that a text does not contain as whole words."""
    return [word for word in words if not re.search(rf"\b{re.escape(word)}\b", text)]


@pytest.mark.parametrize("document", ["architecture.md", "pictures/architecture.svg"])
def test_architecture(document: str) -> None:
    """The architecture page and its drawing name every floor and every family folder."""
    assert not missing((*FLOORS, *FAMILIES), (DOCS / document).read_text(encoding="utf-8"))


def test_reference() -> None:
    """The reference has a page for each folder and each single module, and its index lists every public name."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    floors = [name for name in FLOORS if name != "cli"]
    assert not [name for name in floors if f"\n::: spmd.{name}\n" not in pages]
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    assert not missing(
        [*spmd.__all__, *(f"spmd.{name}" for name in floors if is_folder(f"spmd.{name}"))], index
    )


def test_missing_control() -> None:
    """A part of a word is not the word."""
    assert missing(["plan", "data"], "planned data") == ["plan"]
