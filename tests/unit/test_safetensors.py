"""Safetensors files are read as the format's own library reads them, and invalid files are refused."""

import json
import time
import weakref

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings

from spmd.errors import CheckpointError
from spmd.hf.safetensors import DTYPES, SafetensorsFile, write_safetensors

NUMPY = [dtype for code, dtype in DTYPES.items() if code != "BF16" and not code.startswith("F8")]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


@st.composite
def arrays(draw):
    """Any shape of up to three dimensions, empty ones too, of any dtype, with any bits."""
    dtype, shape = (
        draw(st.sampled_from(NUMPY)),
        tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)


TABLES = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"), arrays(), min_size=1, max_size=5
)


def write(path, table, metadata=None):
    """`write_safetensors` of arrays that are there."""
    kinds = {name: Kind(a.shape, a.dtype) for name, a in table.items()}
    write_safetensors(path, kinds, iter(table.values()), metadata or {})


def read(file, name):
    """A whole tensor."""
    tensor = file.tensors[name]
    data = b"".join(chunk.tobytes() for chunk in file.chunks(name, np.empty(7, np.uint8)))
    return np.frombuffer(data, tensor.dtype).reshape(tensor.shape)


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
            found = read(file, name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()
            if array.ndim and len(array) > 2:
                size = array[0].size
                rows = file.elements(name, size, 3 * size, np.empty(array.nbytes, np.uint8))
                np.testing.assert_array_equal(rows, array[1:3].reshape(-1))


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
        assert read(file, "w").dtype == jnp.bfloat16
        np.testing.assert_array_equal(read(file, "w").view(np.uint16), array.view(np.uint16))
    header = (tmp_path / "a.safetensors").read_bytes()[8:]
    assert b'"dtype":"BF16"' in header


def test_a_sample_tells_versions_of_a_model_apart(tmp_path):
    """Copies have one digest; other values, another name and another size have others."""
    weights = np.arange(300_000, dtype=np.float32)
    tables = [{"w": weights}, {"w": weights + 1}, {"v": weights}, {"w": weights[:-1]}]
    digests = []
    for number, table in enumerate([tables[0], *tables]):
        write(tmp_path / f"{number}.safetensors", table)
        with SafetensorsFile(tmp_path / f"{number}.safetensors") as file:
            digests.append(file.stored.digest())
    assert digests[0] == digests[1]
    assert len(set(digests)) == len(tables)


def test_tensors_are_made_one_at_a_time(tmp_path):
    """A tensor is written, and no longer held, before the next one is made."""
    path, sizes = tmp_path / "a.safetensors", []

    def made():
        last = None
        for value in range(3):
            sizes.append(path.stat().st_size)
            assert last is None or last() is None
            tensor = np.full((1 << 16,), value, np.float32)
            last = weakref.ref(tensor)
            yield tensor
            del tensor

    write_safetensors(path, {n: Kind((1 << 16,), np.dtype("float32")) for n in "abc"}, made(), {})
    assert sizes == sorted(set(sizes))
    with SafetensorsFile(path) as file:
        assert [int(read(file, name)[0]) for name in "abc"] == [0, 1, 2]


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
    return packed(
        {**HEADER, "v": {"dtype": "F32", "shape": [6], "data_offsets": [begin, end]}}, bytes(size)
    )


REFUSED = {
    "no header": (b"1234", "header too small"),
    "a header above the format's limit": (
        packed(b"{}", b"", length=100_000_001),
        "header too large",
    ),
    "an incomplete header": (packed(HEADER, b"", length=500), "invalid header length"),
    "no JSON": (packed(b"{not json", b""), "invalid JSON"),
    "deeply nested lists": (packed(b"[" * 100_000, b""), "invalid JSON"),
    "deeply nested objects": (packed(b'{"w": ' * 100_000, b""), "invalid JSON"),
    "no UTF-8": (packed(b"\xff\xfe{}", b""), "invalid UTF-8"),
    "a list": (packed(b"[1, 2]", b""), "invalid JSON"),
    "numbers for tensors": (packed(b'{"w": 1, "w": 2}', b""), "expected struct TensorInfo"),
    "a list for a tensor": (packed({"w": [1]}), "invalid JSON"),
    "no offsets": (packed({"w": {"dtype": "F32", "shape": [6]}}), "missing field `data_offsets`"),
    "an unsupported dtype": (
        changed(dtype="F8_E5M2", shape=[24]),
        "has the unsupported dtype F8_E5M2",
    ),
    "an unknown dtype": (changed(dtype="F31"), "unknown variant `F31`"),
    "a list for a dtype": (changed(dtype=["F32"]), "invalid JSON"),
    "a negative shape": (changed(shape=[-2, -3]), "invalid value: integer `-2`"),
    "a float in a shape": (changed(shape=[2.0, 3]), "floating point `2.0`"),
    "a boolean in a shape": (changed(shape=[True, 6]), "boolean `true`"),
    "a number for a shape": (changed(shape=6), "expected a sequence"),
    "one offset": (changed(data_offsets=[0]), "invalid length 1"),
    "a string for an offset": (changed(data_offsets=[0, "24"]), 'string "24"'),
    "offsets in reverse": (changed(data_offsets=[24, 0]), "invalid offset"),
    "another size than its shape": (changed(shape=[2, 4]), "invalid shape, data type, or offset"),
    "a size that overflows": (changed(shape=[2**62, 2**62]), "overflow"),
    "a size that overflows often": (changed(shape=[2**62] * 32), "overflow"),
    "a huge number in a shape": (changed(shape=[10**4000, 10**4000]), "number out of range"),
    "too many dimensions": (changed(shape=[1] * 100_000 + [6]), "has 100001 dimensions"),
    "a huge offset": (changed(data_offsets=[0, 10**4000]), "number out of range"),
    "a truncated file": (packed(HEADER, bytes(20)), "file not fully covered"),
    "bytes after the last tensor": (packed(HEADER, bytes(30)), "file not fully covered"),
    "overlapping tensors": (two(20, 44), "invalid offset for tensor `v`"),
    "tensors at the same offset": (two(0, 24), "invalid offset"),
    "a gap between tensors": (two(28, 52, 52), "invalid offset for tensor `v`"),
    "metadata that is no strings": (packed({**HEADER, "__metadata__": {"a": [1]}}), "invalid JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_header_is_refused(name, tmp_path):
    """A header that does not describe the file exactly is refused before any data are read."""
    content, complaint = REFUSED[name]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_long_invalid_header_is_refused_in_time(tmp_path):
    """Names that occur twice, among many others, take no quadratic time."""
    names = [f'"{number}": 0' for number in (*range(300_000), 299_999)]
    path = tmp_path / "a.safetensors"
    path.write_bytes(packed(f"{{{', '.join(names)}}}".encode()))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="invalid JSON"):
        SafetensorsFile(path)
    assert time.process_time() - start < 20


def test_the_controls_of_refused_files_are_read(tmp_path):
    """The files that the refused ones are derived from are valid."""
    for content in (packed(HEADER), two(24, 48)):
        (tmp_path / "a.safetensors").write_bytes(content)
        with SafetensorsFile(tmp_path / "a.safetensors") as file:
            assert file.tensors["w"].shape == (2, 3)


def test_tensors_out_of_order_are_located(tmp_path):
    """The order of names in the header need not be that of the data; empty tensors take no bytes."""
    entries = {
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [4, 4]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(packed(entries, np.float32(3).tobytes() + b"\x07\x08"))
    with SafetensorsFile(path) as file:
        assert read(file, "a") == np.float32(3)
        assert read(file, "b").tolist() == [7, 8]
        assert read(file, "empty").shape == (0, 3)


def test_every_unsupported_tensor_is_named(tmp_path):
    """One error for all tensors of a file."""
    entry = {"dtype": "F8_E5M2", "shape": [0], "data_offsets": [0, 0]}
    (tmp_path / "a.safetensors").write_bytes(
        packed({"a": entry, "b": entry, "c": {**entry, "dtype": "F32"}}, b"")
    )
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(tmp_path / "a.safetensors")
    assert [problem.where for problem in caught.value.problems] == [
        f"a.safetensors: {name}" for name in "ab"
    ]


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    """A tensor that is no longer there whole is not read as less."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(packed(HEADER))
    with SafetensorsFile(path) as file:
        path.write_bytes(packed(HEADER, bytes(10)))
        with pytest.raises(CheckpointError, match="before the end of its tensors"):
            read(file, "w")


def test_no_link_and_no_pipe_is_opened(tmp_path):
    """What is no regular file is refused, not waited for."""
    (tmp_path / "real").write_bytes(packed(HEADER))
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="link"):
        SafetensorsFile(tmp_path / "link")
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(tmp_path)


def test_a_dtype_that_the_format_lacks_is_not_written(tmp_path):
    """Nothing is written, and the dtype is named."""
    with pytest.raises(CheckpointError, match="complex64"):
        write(tmp_path / "a", {"w": np.zeros(3, np.complex64)})
    assert not (tmp_path / "a").exists()
