"""The documentation holds: links lead somewhere, and what looks like Python is Python."""

import ast
import dataclasses
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^ *(?P<ticks>`{3,})(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *(?P=ticks) *$", re.M | re.S)
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
        yield Block(match["language"], before.count("\n") + 2, textwrap.dedent(match["code"]), marked)


def anchors(text: str) -> set[str]:
    """What the headings of a document can be linked by, as code hosts and as the site spell it."""
    titles = [re.sub(r"[^\w\s-]", "", match["title"].lower()) for match in HEADING.finditer(FENCE.sub("", text))]
    return {title.replace(" ", "-") for title in titles} | {re.sub(r"[\s-]+", "-", title) for title in titles}


def broken_links(path: Path, text: str) -> list[str]:
    """The relative links of a document that lead nowhere."""
    broken = []
    for match in LINK.finditer(FENCE.sub("", text)):
        target, _, fragment = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = path.parent / target if target else path
        home = DOCS if DOCS in path.parents else ROOT  # the site has the files of docs/, and no others
        if target and (not file.exists() or home not in (file.resolve(), *file.resolve().parents)):
            broken.append(match["target"])
        elif fragment and file.suffix == ".md":
            linked = text if file == path else file.read_text(encoding="utf-8")
            if fragment not in anchors(linked):
                broken.append(match["target"])
    return broken


def broken_python(text: str) -> list[str]:
    """The Python blocks that are neither Python nor marked."""
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
    """A document exists, its relative links lead to files and headings, and its Python blocks are Python."""
    path = ROOT / document
    assert path.is_file(), f"{document} is missing"
    text = path.read_text(encoding="utf-8")
    assert not broken_links(path, text)
    assert not broken_python(text)


def test_links_control() -> None:
    """A file, a heading or a folder outside the repository that a link names wrongly is found."""
    text = "# Two words\n[a](LICENSE) [b](#two-words) [c](https://x.invalid) [d](NO.md) [e](#three)\n"
    assert broken_links(ROOT / "README.md", text) == ["NO.md", "#three"]
    assert broken_links(ROOT / "README.md", "[out](../)") == ["../"]
    assert broken_links(DOCS / "index.md", "[out](../README.md) [in](glossary.md)") == ["../README.md"]
    assert broken_links(ROOT / "README.md", '```\n[a](NO.md)\n```\n[b](NO.md "title")') == ["NO.md"]


def test_python_control() -> None:
    """A block that is not Python is found by its line, unless it is marked directly before."""
    bad = "text\n\n```python\nx = 1\ny = = 2\n```\n"
    assert [problem.split(":")[0] for problem in broken_python(bad)] == ["line 5"]
    assert not broken_python(bad.replace("```python", f"{NOT_RUN}\n```python"))
    assert broken_python(f"{NOT_RUN}\nmore text\n{bad}")
    assert not broken_python(bad.replace("= =", "="))
    assert not broken_python(bad.replace("python", "sh"))
