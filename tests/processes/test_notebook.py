"""The notebook runs from its first cell to its last in a kernel of its own, and is stored with what it printed."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.programs import ROOT

NOTEBOOK = ROOT / "examples" / "flow_matching.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> tuple[str, int]:
    """Everything that was printed, and the number of pictures."""
    cells = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(
        output.get("text", "") + json.dumps(output.get("data", {}).get("text/html", ""))
        for output in cells
    )
    return text, sum("image/png" in output.get("data", {}) for output in cells)


def execute(
    source: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> nbformat.NotebookNode:
    """The notebook with one line replaced, executed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert sum(source in cell.source for cell in notebook.cells) == 1
    for cell in notebook.cells:
        cell.source = cell.source.replace(source, new)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


@pytest.mark.soak
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains, evaluates and draws two pictures, as the stored one did over all of its steps."""
    for notebook, steps in (
        (nbformat.read(NOTEBOOK, as_version=4), "1,000"),
        (execute("STEPS = 1000", "STEPS = 20", tmp_path, monkeypatch), "20"),
    ):
        text, pictures = outputs(notebook)
        assert f"done: {steps} steps" in text
        assert "mix/kernel" in text
        assert f"step {steps}/{steps}".replace(",", "") in text
        assert "validation loss" in text
        assert pictures == 2


@pytest.mark.soak
def test_a_cell_that_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: an activation without a rule ends the execution."""
    with pytest.raises(CellExecutionError, match="activation 'mixed'"):
        execute('[("mixed", P(BATCH))]', "[]", tmp_path, monkeypatch)
