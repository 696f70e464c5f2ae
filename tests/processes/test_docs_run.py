"""What the documentation shows really runs, and prints what the pages say.

The blocks of a page run from top to bottom in one interpreter with eight simulated devices, in an
empty folder:

- `python` blocks, in one namespace; a block that begins with `# name.py` is also saved under that name;
- the lines of `sh` blocks that begin with `spmd`, as the command line would run them;
- a `text` block directly after one of them is what it prints, with `…` for whatever differs from run to run.

A block below `<!-- not run -->` is left alone.
"""

import contextlib
import io
import itertools
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import pytest

from spmd.cli import main
from spmd.sharding.mesh import simulate_devices
from tests import forked
from tests.architecture.test_docs import NOT_RUN, Block, blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def sequences(text: str) -> Iterator[tuple[Block, str | None]]:
    """The blocks of a page that run, each with what it is said to print, None where nothing is said."""
    found = list(blocks(text))
    lines = text.splitlines()
    for block, after in itertools.zip_longest(found, found[1:]):
        runs = block.language == "python" or (block.language == "sh" and commands(block.code))
        if not runs or block.is_marked:
            continue
        printed = None
        if after is not None and after.language == "text":
            # the line after the closing fence, counted from 0
            first = block.line + len(block.code.splitlines())
            if not "".join(lines[first : after.line - 2]).strip():
                printed = after.code
        yield block, printed


def commands(code: str) -> list[list[str]]:
    """The arguments of each `spmd` command in a block of shell; a backslash joins lines."""
    lines = code.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("spmd ")]


def is_as_said(printed: str, said: str) -> bool:
    """Whether a page says what was printed; `…` stands for anything, trailing blanks for nothing."""
    printed, said = (re.sub(r" +$", "", text, flags=re.M).strip() for text in (printed, said))
    return re.fullmatch(".*?".join(map(re.escape, said.split("…"))), printed, re.S) is not None


def run_block(block: Block, namespace: dict[str, object]) -> str:
    """Runs one block; what it prints, a refused command's error included."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if block.language == "python":
            if name := re.match(r"# (\w+\.py)\n", block.code):
                Path(name[1]).write_text(block.code, encoding="utf-8")
            exec(compile(block.code, f"block at line {block.line}", "exec"), namespace)
        for arguments in commands(block.code) if block.language == "sh" else ():
            try:
                main(arguments)
            except SystemExit as exit_:
                if exit_.code not in (0, None):
                    print(f"[exit code {exit_.code}]")
    # On a terminal, progress leaves nothing behind.
    return re.sub(r"^\[\d+:\d\d\] .*\n", "", printed.getvalue(), flags=re.M)


def run_page(text: str) -> list[str]:
    """Runs a page; what is wrong with it, each with its line. Nothing runs after a block that fails."""
    wrong: list[str] = []
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block, said in sequences(text):
        try:
            printed = run_block(block, namespace)
        except Exception:  # noqa: BLE001 (a page may fail in any way)
            return [*wrong, f"line {block.line} fails:\n{traceback.format_exc()}"]
        if said is not None and not is_as_said(printed, said):
            wrong.append(f"line {block.line} is said to print\n{said}\nand prints\n{printed}")
        if said is None and "[exit code" in printed:
            wrong.append(f"line {block.line} is refused:\n{printed}")
    return wrong


PAGES = [
    path.relative_to(DOCS).as_posix()
    for path in sorted(DOCS.rglob("*.md"))
    if any(True for _ in sequences(path.read_text(encoding="utf-8")))
]


def serve() -> None:
    """Runs each page that comes in a process of its own, in a folder of its own; nothing has started a device yet."""
    warnings.simplefilter("error")
    forked.answer(run_in_folder)


def run_in_folder(arguments: list[str]) -> None:
    """Runs a page in an empty folder, on eight devices; exits with 1 where something is wrong, and prints it."""
    page, folder = arguments
    os.chdir(folder)
    simulate_devices(8)
    # Commands of one page compile the same programs: the second finds them in the page's own
    # folder.
    jax.config.update("jax_compilation_cache_dir", str(Path("compiled").absolute()))
    problems = run_page((DOCS / page).read_text(encoding="utf-8"))
    print("\n".join(problems))
    sys.exit(bool(problems))


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[Path, Sequence[object]], forked.Run]]:
    """A process that has imported everything, and forks one for each page."""
    program = "from tests.processes import test_docs_run; test_docs_run.serve()"
    with forked.server(program, PYTHONPATH=str(ROOT), COLUMNS="80") as start:
        yield start


@pytest.mark.parametrize(
    "page",
    [
        page if page == "all-of-spmd.md" else pytest.param(page, marks=pytest.mark.soak)
        for page in PAGES
    ],
)
def test_page_runs(
    page: str, server: Callable[[Path, Sequence[object]], forked.Run], tmp_path: Path
) -> None:
    """The blocks of a page run from top to bottom and print what the page says."""
    log, folder = tmp_path / "log", tmp_path / "folder"
    folder.mkdir()
    assert server(log, [page, folder]).wait() == 0, log.read_text()


def test_all_of_spmd_runs() -> None:
    """The page that explains everything is among those that run, and so are the how-tos."""
    assert "all-of-spmd.md" in PAGES
    assert sum(page.startswith("how-to/") for page in PAGES) >= 5


GOOD = """
```python
x = 1
```

```python
print(x, "second")
```

```text
1 sec…
```
"""


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        (GOOD, None),
        (GOOD.replace("1 sec…", "2 sec…"), "is said to print"),
        (GOOD.replace("x = 1", "y = 1"), "NameError"),
        (GOOD.replace("```python\nx = 1", f"{NOT_RUN}\n```python\nx = 1"), "NameError"),
        (GOOD.replace("1 sec…", "2 sec…").replace("```text", "Prose.\n\n```text"), None),
        ("```sh\nspmd dance\n```\n", "is refused"),
        (
            "```sh\nspmd dance\n```\n\n```text\nspmd: Unknown command…\n[exit code 2]\n```\n",
            None,
        ),
    ],
    ids=["good", "other-output", "fails", "not-run", "prose-between", "refused", "refused-as-said"],
)
def test_page_control(page: str, wrong: str | None) -> None:
    """A block that fails, a wrong output and a refused command are found; what is right passes."""
    found = run_page(page)
    assert (not found) if wrong is None else (len(found) == 1 and wrong in found[0])
