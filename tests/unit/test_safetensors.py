"""Files of the safetensors format are read as the format's own library reads them, and what is wrong is named."""

import json
import time

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings

from spmd.errors import CheckpointError
from spmd.hf.safetensors import DTYPES, HEADER_AT_MOST, SafetensorsFile, write_safetensors

NUMPY = [dtype for code, dtype in DTYPES.items() if code != "BF16"]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


@st.composite
def arrays(draw):
    """Any shape of up to three dimensions, empty ones too, of any dtype, with any bits."""
    dtype, shape = draw(st.sampled_from(NUMPY)), tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)


TABLES = st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), arrays(), min_size=1, max_size=5)


def write(path, table, metadata=None):
    """`write_safetensors` of arrays that are there."""
    kinds = {name: Kind(a.shape, a.dtype) for name, a in table.items()}
    write_safetensors(path, kinds, iter(table.values()), metadata or {})


class Kind:
    """A shape and a dtype, 64-bit ones too."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


@settings(max_examples=60, deadline=None)
@given(table=TABLES)
def test_reads_what_the_library_writes(table, tmp_path_factory):
    """Every tensor of the library's files is read, bit for bit, whole and by rows."""
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    safetensors.numpy.save_file(table, path, {"format": "np"})
    with SafetensorsFile(path) as file:
        assert file.tensors.keys() == table.keys()
        for name, array in table.items():
            read = file.read(name)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert read.tobytes() == array.tobytes()
            if array.ndim and len(array) > 2:
                rows = file.rows(name, 1, 3, np.empty(array.nbytes, np.uint8))
                np.testing.assert_array_equal(rows, array[1:3])


@settings(max_examples=60, deadline=None)
@given(table=TABLES)
def test_the_library_reads_what_is_written(table, tmp_path_factory):
    """Every tensor of our files is read by the library, with the metadata."""
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    write(path, table, {"format": "pt"})
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(table)
        for name, array in table.items():
            assert file.get_tensor(name).tobytes() == array.tobytes()


def test_bfloat16_keeps_its_bits(tmp_path):
    """What NumPy has no dtype for is read and written as JAX's bfloat16."""
    array = np.linspace(-3, 3, 24, dtype=np.float32).astype(jnp.bfloat16).reshape(4, 6)
    write(tmp_path / "a.safetensors", {"w": array})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.read("w").dtype == jnp.bfloat16
        np.testing.assert_array_equal(file.read("w").view(np.uint16), array.view(np.uint16))
    header = (tmp_path / "a.safetensors").read_bytes()[8:]
    assert b'"dtype":"BF16"' in header


def test_tensors_are_made_one_at_a_time(tmp_path):
    """A tensor is written before the next one is made."""
    path, sizes = tmp_path / "a.safetensors", []

    def made():
        for value in range(3):
            sizes.append(path.stat().st_size)
            yield np.full((1 << 16,), value, np.float32)

    write_safetensors(path, {n: Kind((1 << 16,), np.dtype("float32")) for n in "abc"}, made(), {})
    assert sizes == sorted(set(sizes))
    with SafetensorsFile(path) as file:
        assert [int(file.read(name)[0]) for name in "abc"] == [0, 1, 2]


HEADER = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def packed(header, data=bytes(24), length=None):
    """A file of this header, which may be no JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def changed(**fields):
    """A file whose tensor is described in another way."""
    return packed({"w": {**HEADER["w"], **fields}})


def two(begin, end, size=48):
    """A file of two tensors, the second one at a place of its own."""
    return packed({**HEADER, "v": {"dtype": "F32", "shape": [6], "data_offsets": [begin, end]}}, bytes(size))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"1234", "has no header"),
        (packed(b"{}", b"", length=HEADER_AT_MOST + 1), "is too long"),
        (packed(HEADER, b"", length=500), "ends within its header"),
        (packed(b"{not json", b""), "is no JSON"),
        (packed(b"[" * 100_000, b""), "is no JSON"),
        (packed(b"\xff\xfe{}", b""), "is no JSON"),
        (packed(b"[1, 2]", b""), "is no JSON object"),
        (packed(b'{"w": 1, "w": 2}', b""), "'w' is there twice"),
        (packed({"w": [1]}), "is described by [1]"),
        (packed({"w": {"dtype": "F32", "shape": [6]}}), "not by dtype, shape and data_offsets"),
        (changed(dtype="F8_E4M3"), "is of dtype 'F8_E4M3'"),
        (changed(dtype=["F32"]), "is of dtype ['F32']"),
        (changed(shape=[-2, -3]), "has the shape [-2, -3]"),
        (changed(shape=[2.0, 3]), "has the shape [2.0, 3]"),
        (changed(shape=[True, 6]), "has the shape [True, 6]"),
        (changed(shape=6), "has the shape 6"),
        (changed(data_offsets=[0]), "is at [0]"),
        (changed(data_offsets=[0, "24"]), "is at [0, '24']"),
        (changed(data_offsets=[24, 0]), "has another size than its shape"),
        (changed(shape=[2, 4]), "F32[2, 4] is 32 bytes, [0, 24] are 24"),
        (changed(shape=[2**62, 2**62]), "has another size than its shape"),
        (changed(shape=[2**62] * 32), "is 2**63 or more bytes"),
        (changed(shape=[10**4000, 10**4000]), "each below 2**63"),
        (changed(shape=[1] * 100_000), "no list of 32 sizes at most"),
        (changed(data_offsets=[0, 10**4000]), "and not from one byte to another"),
        (packed(HEADER, bytes(20)), "tensors of 24 bytes, 20 in the file: 4 are missing"),
        (packed(HEADER, bytes(30)), "goes on behind its last tensor"),
        (two(20, 44), "overlaps w"),
        (two(0, 24), "overlaps"),
        (two(28, 52, 52), "leaves a gap behind w"),
    ],
)
def test_a_file_that_lies_is_refused(content, complaint, tmp_path):
    """What is wrong with a header is said before anything behind it is read."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_long_header_is_searched_once(tmp_path):
    """A name that is there twice, the last of many, is found as fast as the others are read."""
    names = [f'"{number}": 0' for number in (*range(300_000), 299_999)]
    path = tmp_path / "a.safetensors"
    path.write_bytes(packed(f"{{{', '.join(names)}}}".encode()))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="'299999' is there twice"):
        SafetensorsFile(path)
    assert time.process_time() - start < 20  # hours, where each name is looked for among all


def test_the_controls_of_lies_are_whole(tmp_path):
    """The files that the lies are made from are read."""
    for content in (packed(HEADER), two(24, 48)):
        (tmp_path / "a.safetensors").write_bytes(content)
        with SafetensorsFile(tmp_path / "a.safetensors") as file:
            assert file.read("w").shape == (2, 3)


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    """One error for all tensors of a file."""
    (tmp_path / "a.safetensors").write_bytes(
        packed({"a": {**HEADER["w"], "dtype": "F31"}, "b": 7, "c": {**HEADER["w"], "shape": [5]}})
    )
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(tmp_path / "a.safetensors")
    assert [problem.where for problem in caught.value.problems] == [f"a.safetensors: {name}" for name in "abc"]
    assert "did you mean" in str(caught.value)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    """A tensor that is no longer there whole is not read as less."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(packed(HEADER))
    with SafetensorsFile(path) as file:
        path.write_bytes(packed(HEADER, bytes(10)))
        with pytest.raises(CheckpointError, match="before its tensors do"):
            file.read("w")


def test_no_link_and_no_pipe_is_opened(tmp_path):
    """What is no regular file is refused, not waited for."""
    (tmp_path / "real").write_bytes(packed(HEADER))
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="link"):
        SafetensorsFile(tmp_path / "link")
    with pytest.raises(CheckpointError, match="no regular file"):
        SafetensorsFile(tmp_path)


def test_a_dtype_that_the_format_lacks_is_not_written(tmp_path):
    """Nothing is written, and the dtype is named."""
    with pytest.raises(CheckpointError, match="complex64"):
        write(tmp_path / "a", {"w": np.zeros(3, np.complex64)})
    assert not (tmp_path / "a").exists()
