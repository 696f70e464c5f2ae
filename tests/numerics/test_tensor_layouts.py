"""Parameters of each layout are read from a tensor as NumPy slices it, and written back bit for bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from spmd.errors import CheckpointError, ConfigError
from spmd.hf import tensor_region
from spmd.hf.family import Family, TensorMapping, tensor_sources
from spmd.hf.folder import HFFolder
from spmd.hf.layout import (
    AS_IS,
    CONVOLUTION,
    EXPERTS,
    EXPERTS_TRANSPOSED,
    TRANSPOSED,
    TensorLayout,
    part,
)
from spmd.hf.load import load_published
from spmd.hf.safetensors import SafetensorsFile, StoredTensor
from spmd.hf.save import save_params
from spmd.hf.stored_bytes import LocalBytes
from tests import tiny

LAYERS, D, HEADS, KV, HEAD, EXPERT_COUNT, D_FF, WIDTH = 2, 12, 4, 2, 6, 4, 10, 3
QKV = (HEADS, KV, KV)
SIZES = tuple(HEAD * size for size in QKV)
MATRIX, VECTOR = P(None, "fsdp", "tensor"), P(None, "tensor")
OF_EXPERTS = P(None, "fsdp", None, "tensor")
ROWS_OF_EXPERTS = P(None, None, "tensor", "fsdp")


@dataclasses.dataclass(frozen=True)
class Case:
    """Tensor of one layer, layouts of its parameters, and NumPy's slices of it."""

    shape: tuple[int, ...]
    layouts: tuple[TensorLayout, ...]
    slices: tuple
    spec: P


def heads(groups, parts, index):
    """Part of each of several groups of rows, transposed."""

    def of(tensor):
        grouped = tensor.reshape(groups, -1, tensor.shape[-1])
        start, stop = sum(parts[:index]), sum(parts[: index + 1])
        return grouped[:, start:stop].reshape(-1, tensor.shape[-1]).T

    return of


def parts_of(sizes, groups=1, layout=TRANSPOSED):
    return tuple(part(i, sizes, groups=groups, layout=layout) for i in range(len(sizes)))


CASES = {
    "thirds of columns (GPT-2)": Case(
        (D, 3 * D),
        tuple(part(i, 3) for i in range(3)),
        tuple(lambda t, i=i: t[:, i * D : (i + 1) * D] for i in range(3)),
        MATRIX,
    ),
    "unequal parts (Phi 3)": Case(
        (sum(SIZES), D),
        parts_of(QKV),
        (
            lambda t: t[:24].T,
            lambda t: t[24:36].T,
            lambda t: t[36:].T,
        ),
        MATRIX,
    ),
    "halves (GLM 4)": Case(
        (2 * D_FF, D),
        (part(0, 2, layout=TRANSPOSED), part(1, 2, layout=TRANSPOSED)),
        (lambda t: t[:D_FF].T, lambda t: t[D_FF:].T),
        MATRIX,
    ),
    "unequal parts of a bias": Case(
        (sum(SIZES),),
        parts_of(QKV, layout=AS_IS),
        (lambda t: t[:24], lambda t: t[24:36], lambda t: t[36:]),
        VECTOR,
    ),
    "per head (GPT-NeoX)": Case(
        (HEADS * 3 * HEAD, D),
        parts_of((1, 1, 1), HEADS),
        tuple(heads(HEADS, (HEAD, HEAD, HEAD), i) for i in range(3)),
        MATRIX,
    ),
    "per head of a bias": Case(
        (HEADS * 3 * HEAD,),
        parts_of((1, 1, 1), HEADS, AS_IS),
        tuple(lambda t, i=i: t.reshape(HEADS, 3, HEAD)[:, i].reshape(-1) for i in range(3)),
        VECTOR,
    ),
    "per head of columns": Case(
        (D, HEADS * 3 * HEAD),
        parts_of((1, 1, 1), HEADS, AS_IS),
        tuple(
            lambda t, i=i: t.reshape(D, HEADS, 3, HEAD)[:, :, i].reshape(D, -1) for i in range(3)
        ),
        MATRIX,
    ),
    "per group of queries (Falcon)": Case(
        (KV * 4 * HEAD, D),
        parts_of((2, 1, 1), KV),
        tuple(heads(KV, (2 * HEAD, HEAD, HEAD), i) for i in range(3)),
        MATRIX,
    ),
    "gated queries (Qwen 3 Next)": Case(
        (HEADS * 2 * HEAD, D),
        parts_of((HEAD, HEAD), HEADS),
        (heads(HEADS, (HEAD, HEAD), 0), heads(HEADS, (HEAD, HEAD), 1)),
        MATRIX,
    ),
    "delta net (Qwen 3 Next)": Case(
        (KV * 24, D),
        parts_of((3, 3, 9, 9), KV),
        tuple(heads(KV, (3, 3, 9, 9), i) for i in range(4)),
        P(None, "fsdp"),
    ),
    "alternating columns of experts (gpt-oss)": Case(
        (EXPERT_COUNT, D, 2 * D_FF),
        parts_of((1, 1), D_FF, EXPERTS),
        (lambda t: t[..., ::2], lambda t: t[..., 1::2]),
        OF_EXPERTS,
    ),
    "alternating biases of experts (gpt-oss)": Case(
        (EXPERT_COUNT, 2 * D_FF),
        parts_of((1, 1), D_FF, AS_IS),
        (lambda t: t[:, ::2], lambda t: t[:, 1::2]),
        MATRIX,
    ),
    "alternating rows of experts": Case(
        (EXPERT_COUNT, 2 * D_FF, D),
        parts_of((1, 1), D_FF, EXPERTS_TRANSPOSED),
        (lambda t: t[:, ::2].swapaxes(1, 2), lambda t: t[:, 1::2].swapaxes(1, 2)),
        ROWS_OF_EXPERTS,
    ),
    "experts, halves of columns (Llama 4)": Case(
        (EXPERT_COUNT, D, 2 * D_FF),
        parts_of((1, 1), layout=EXPERTS),
        (lambda t: t[..., :D_FF], lambda t: t[..., D_FF:]),
        ROWS_OF_EXPERTS,
    ),
    "experts, halves of rows (Granite MoE)": Case(
        (EXPERT_COUNT, 2 * D_FF, D),
        parts_of((1, 1), layout=EXPERTS_TRANSPOSED),
        (lambda t: t[:, :D_FF].swapaxes(1, 2), lambda t: t[:, D_FF:].swapaxes(1, 2)),
        OF_EXPERTS,
    ),
    "experts in one matrix (DBRX)": Case(
        (EXPERT_COUNT * D_FF, D),
        (TensorLayout(((0, 2), 1)),),
        (lambda t: t.reshape(EXPERT_COUNT, D_FF, D).swapaxes(1, 2),),
        OF_EXPERTS,
    ),
    "a convolution (LFM 2)": Case(
        (D, 1, WIDTH),
        (CONVOLUTION,),
        (lambda t: t[:, 0].T,),
        P(None, None, "tensor"),
    ),
    "parts of a convolution (Qwen 3 Next)": Case(
        (2 * D + 8, 1, WIDTH),
        parts_of((3, 3, 2), layout=CONVOLUTION),
        (lambda t: t[:12, 0].T, lambda t: t[12:24, 0].T, lambda t: t[24:, 0].T),
        P(None, None, "tensor"),
    ),
    "a dimension of size 1": Case(
        (1,),
        (TensorLayout((None,)),),
        (lambda t: t[0],),
        P(),
    ),
    "an image's patches (ViT)": Case(
        (D, 3, 4, 2),
        (TensorLayout((3, 2, 1, 0)),),
        (lambda t: t.T,),
        P(None, "fsdp", None, None, "tensor"),
    ),
}


def family_of(layouts):
    """Family of one tensor a layer."""
    mappings = tuple(
        TensorMapping(f"p{i}", "h.{layer}.w", layout, first=1, step=2)
        for i, layout in enumerate(layouts)
    )
    nothing = {"architectures": ("Made",), "read_config": dict, "write_config": lambda config: {}}
    return Family(
        **nothing,
        fits=lambda config: True,
        rules=lambda config: None,
        names=lambda config: mappings,
    )


def write(folder, case, dtype=np.float32):
    """Write the tensors of two layers of which no two elements are alike; return them."""
    size = int(np.prod(case.shape))
    table = {
        f"h.{1 + 2 * i}.w": (np.arange(size).reshape(case.shape) + i * size + 1).astype(dtype)
        for i in range(LAYERS)
    }
    folder.mkdir()
    save_file(table, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return table


def expected(case, table):
    """NumPy's slices, stacked."""
    return {
        f"p{i}": np.stack([take(tensor) for tensor in table.values()])
        for i, take in enumerate(case.slices)
    }


def read(folder, layouts, abstract):
    with SafetensorsFile(folder / "model.safetensors") as file:
        files = dict.fromkeys(file.tensors, file)
        stored = {name: StoredTensor(file, name) for name in files}
        found = HFFolder(folder, {}, family_of(layouts), {}, stored, files)
        return load_published(found, abstract)


def abstract_of(arrays, spec, **sizes):
    sharding = NamedSharding(tiny.mesh(**sizes), spec)
    return {
        path: jax.ShapeDtypeStruct(array.shape, jnp.float32, sharding=sharding)
        for path, array in arrays.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_each_device_reads_its_rows_of_a_layout(name, tmp_path, monkeypatch):
    """In separate reads and in one, many rows at once and one; the export has the tensor's bits."""
    case = CASES[name]
    arrays = expected(case, table := write(tmp_path / "a", case))
    abstract = abstract_of(arrays, case.spec, fsdp=2, tensor=2)
    for skipped, at_once in (
        (tensor_region.SKIPPED_BYTES, LocalBytes.at_once),
        (0, 200),
        (1 << 20, 1),
    ):
        monkeypatch.setattr(tensor_region, "SKIPPED_BYTES", skipped)
        monkeypatch.setattr(LocalBytes, "at_once", at_once)
        params = read(tmp_path / "a", case.layouts, abstract)
        for path, array in arrays.items():
            assert params[path].sharding == abstract[path].sharding
            np.testing.assert_array_equal(params[path], array)
    save_params(tmp_path / "b", params, family_of(case.layouts), {})
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == table.keys()
    for tensor, array in table.items():
        assert written[tensor].tobytes() == array.tobytes()
        assert written[tensor].shape == array.shape


CONTROLS = {
    "per head (GPT-NeoX)": parts_of((1, 1, 1)),
    "per group of queries (Falcon)": parts_of((1, 2, 1), KV),
    "gated queries (Qwen 3 Next)": parts_of((1, 1), 2 * HEADS),
    "alternating columns of experts (gpt-oss)": parts_of((1, 1), layout=EXPERTS),
    "experts, halves of rows (Granite MoE)": parts_of((1, 1), D_FF, EXPERTS_TRANSPOSED),
    "experts in one matrix (DBRX)": (TensorLayout(((2, 0), 1)),),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_another_layout_gives_other_parameters(name, tmp_path):
    """A control: shapes and the round trip are the same, and the values are not."""
    case, layouts = CASES[name], CONTROLS[name]
    arrays = expected(case, table := write(tmp_path / "a", case))
    if name.startswith("per group"):
        arrays = {"p0": arrays["p1"], "p1": arrays["p0"], "p2": arrays["p2"]}
    params = read(tmp_path / "a", layouts, abstract_of(arrays, case.spec, fsdp=2, tensor=2))
    assert not all(np.array_equal(params[path], array) for path, array in arrays.items())
    save_params(tmp_path / "b", params, family_of(layouts), {})
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert all(np.array_equal(written[tensor], array) for tensor, array in table.items())


@pytest.mark.parametrize(
    ("name", "spec", "share"),
    [
        ("per head (GPT-NeoX)", P(None, None, "tensor"), 1),
        ("halves (GLM 4)", P(None, None, "tensor"), 1),
        ("experts, halves of rows (Granite MoE)", P(None, "fsdp", None, "tensor"), 1),
        # all columns of a row are read: one extent of the file has both parts
        ("experts, halves of columns (Llama 4)", P(None, "fsdp"), 2),
    ],
)
def test_no_row_of_another_parameter_is_read(name, spec, share, tmp_path, monkeypatch):
    """Each byte once for all parameters, if runs of rows are not short."""
    monkeypatch.setattr(tensor_region, "SKIPPED_BYTES", 0)
    case, count = CASES[name], 0
    original = SafetensorsFile.elements

    def elements(self, name, start, stop, buffer):
        nonlocal count
        count += stop - start
        return original(self, name, start, stop, buffer)

    monkeypatch.setattr(SafetensorsFile, "elements", elements)
    arrays = expected(case, write(tmp_path / "a", case))
    read(tmp_path / "a", case.layouts, abstract_of(arrays, spec, fsdp=2, tensor=2))
    assert count == share * LAYERS * np.prod(case.shape)


def test_a_value_that_is_not_finite_belongs_to_its_part(tmp_path):
    """A NaN between columns of two parameters is reported for its own alone."""
    case = CASES["alternating columns of experts (gpt-oss)"]
    arrays = expected(case, table := write(tmp_path / "a", case))
    table["h.1.w"][2, 3, 5] = np.nan
    save_file(table, tmp_path / "a" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "a", case.layouts, abstract_of(arrays, case.spec, fsdp=2, tensor=2))
    assert [problem.where for problem in caught.value.problems] == ["p1"]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"parts": ()}, "parts"),
        ({"parts": (2, 0)}, "parts"),
        ({"parts": (1, 1), "index": 2}, "index"),
        ({"parts": (1, 1), "groups": 0}, "groups"),
        ({"groups": 4}, "groups"),
        ({"axes": (0, 2)}, "axes"),
        ({"axes": (0, (0, 1))}, "axes"),
    ],
)
def test_a_layout_that_means_nothing_is_refused(fields, where):
    """Named by its field."""
    with pytest.raises(ConfigError) as caught:
        TensorLayout(**fields)
    assert where in {problem.where for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("layout", "shape", "what"),
    [
        (TRANSPOSED, (4,), "has 1 dimensions, and its layout (1, 0)"),
        (part(0, (3, 1), layout=TRANSPOSED), (4, 8), "does not divide by 1 groups of 3"),
        (part(0, 2, groups=3), (4, 8), "does not divide by 3 groups of 1"),
    ],
)
def test_a_layout_that_does_not_fit_a_parameter_is_an_error(layout, shape, what):
    """Before anything is read, with the path."""
    with pytest.raises(ConfigError, match="name map does not fit") as caught:
        tensor_sources([TensorMapping("w", "w", layout)], {"w": shape})
    assert what in str(caught.value)


def test_parts_that_do_not_agree_are_refused(tmp_path):
    """A tensor has one layout; all its parts have a parameter."""
    params = {"p0": jnp.ones((2, 4, 6)), "p1": jnp.ones((2, 4, 6))}
    for others in ((part(0, 2), part(1, 2, groups=2)), (part(0, 3), part(1, 3))):
        with pytest.raises(ConfigError, match="Invalid name map"):
            save_params(tmp_path / "a", params, family_of(others), {})
