"""The comparison with an earlier commit finds what differs, and nothing else."""

import json
from pathlib import Path

from tests import earlier


def write(folder: Path, *records: dict[str, float]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return folder


def test_a_run_is_the_same_whatever_the_load(tmp_path: Path) -> None:
    """Seconds and bytes of the host are not compared; losses are, and steps that one of them lacks."""
    first, second = (
        {"step": 1, "loss": 2.5, "step_s": 0.1},
        {"step": 2, "loss": 2.25, "step_s": 0.1},
    )
    run = earlier.metrics(write(tmp_path / "run", first, second))
    slower = earlier.metrics(write(tmp_path / "slower", first | {"step_s": 0.3}, second))
    other = earlier.metrics(write(tmp_path / "other", first, second | {"loss": 2.2500001}))
    shorter = earlier.metrics(write(tmp_path / "shorter", first))
    assert earlier.first_difference(run, slower) == ""
    assert earlier.first_difference(run, other) == "step 2, loss: 2.25 before, 2.2500001 now"
    assert earlier.first_difference(run, shorter).startswith("step 2, loss: 2.25 before, None now")


def test_a_program_is_its_lines_without_names() -> None:
    """Numbers of operations, metadata and tables of source lines are not compared; shapes and operations are."""
    program = '%add.1 = f32[8]{0} add(%a.2, %b.3), metadata={op_name="jit(step)/add" source_line=7}'
    renamed = '%add.9 = f32[8]{0} add(%c.1, %d.5), metadata={op_name="jit(f)/add" source_line=8}\nFileNames'
    assert earlier.lines_of(program) == earlier.lines_of(renamed)
    assert earlier.lines_of(program) != earlier.lines_of(program.replace("f32[8]", "f32[9]"))
    assert earlier.lines_of(program) != earlier.lines_of(f"{program}\n{program}")
