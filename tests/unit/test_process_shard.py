"""Parts of a batch that processes give: by the rows on their devices, and refused where they overlap."""

import pytest

from spmd.data.process_batches import _rows_of_processes, group_processes
from spmd.errors import MeshError
from spmd.sharding.mesh import make_mesh


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([(0, 1)], [(0,)]),
        ([(0, 1), (2, 3)], [(0,), (1,)]),
        ([(2, 3), (0, 1)], [(1,), (0,)]),
        ([(0,), (1,), (0,), (1,)], [(0, 2), (1, 3)]),
        ([(0, 1), (0, 1)], [(0, 1)]),
        ([(0, 2), (1, 3)], [(0,), (1,)]),
    ],
)
def test_processes_with_the_same_rows_are_one_part(rows, parts) -> None:
    """In the order of the rows, whatever that of the processes."""
    assert group_processes(dict(enumerate(rows))) == parts


@pytest.mark.parametrize("rows", [[(0,), (1, 2, 3)], [(0, 1), (1, 2)]], ids=["sizes", "overlap"])
def test_parts_that_overlap_or_differ_in_size_are_refused(rows) -> None:
    """With the rows of each process."""
    with pytest.raises(MeshError, match="overlap, or are of several sizes") as caught:
        group_processes(dict(enumerate(rows)))
    assert "process 1: [1, 2" in str(caught.value)


def test_rows_are_those_of_the_batch_axes() -> None:
    """Of eight devices that split a batch four times, one process holds all four parts."""
    assert _rows_of_processes(make_mesh(data=2, fsdp=2, tensor=2)) == {0: (0, 1, 2, 3)}
