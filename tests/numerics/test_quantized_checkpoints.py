"""Codes of 4 and 8 bits become the numbers that their formats define, in every layout and on every mesh."""

import collections
import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from spmd.errors import CheckpointError, ConfigError
from spmd.hf import folder as hf_folder
from spmd.hf import tensor_region
from spmd.hf.family import Family, TensorMapping, family_for
from spmd.hf.folder import open_folder
from spmd.hf.layout import EXPERTS, part
from spmd.hf.load import load_params
from spmd.hf.quantization import Fp8Tensor, read_quantization
from spmd.hf.safetensors import SafetensorsFile, write_safetensors
from spmd.hf.save import save_params
from spmd.hf.stored_bytes import LocalBytes
from tests import tiny

EXPERTS_COUNT, D, D_FF = 4, 64, 6


def e2m1(code):
    """OCP MX 1.0, table 5: a sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def e8m0(code):
    """OCP MX 1.0, table 7: a power of two with bias 127; all bits set are NaN."""
    return np.nan if code == 0xFF else 2.0 ** (code - 127)


def e4m3(code):
    """OCP FP8: a sign, four bits of exponent with bias 7, three of mantissa; no infinity."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return np.nan
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return -size if sign else size


E2M1 = np.array([e2m1(code) for code in range(16)])
E8M0 = np.array([e8m0(code) for code in range(256)])
E4M3 = np.array([e4m3(code) for code in range(256)])


def dequantized_mxfp4(blocks, scales):
    """Values `[..., out, in]` in float64: the even one is the low half of a byte."""
    pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1)
    values = pairs.reshape(*blocks.shape[:-1], 32) * E8M0[scales][..., None]
    return values.reshape(*blocks.shape[:-2], -1)


def dequantized_fp8(codes, factors, block):
    """Values `[out, in]`: a float32 product for each element."""
    out = np.empty(codes.shape, np.float32)
    for row, column in np.ndindex(*codes.shape):
        factor = np.float32(factors[row // block[0], column // block[1]])
        out[row, column] = np.float32(E4M3[codes[row, column]]) * factor
    return out


def write(path, table):
    specs = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in table.items()}
    write_safetensors(path, specs, iter(table.values()), {"format": "pt"})


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


LAYER = "layers.{layer}.experts."
MAPPINGS = (
    *(
        TensorMapping(f"{name}/kernel", LAYER + "gate_up_proj", layout)
        for name, layout in (
            ("gate_proj", part(0, 2, groups=D_FF, layout=EXPERTS)),
            ("up_proj", part(1, 2, groups=D_FF, layout=EXPERTS)),
        )
    ),
    TensorMapping("down_proj/kernel", LAYER + "down_proj", EXPERTS),
)
MADE = Family(
    architectures=("Made",),
    read_config=dict,
    write_config=lambda config: {},
    fits=lambda config: True,
    rules=lambda config: None,
    names=lambda config: MAPPINGS,
)
SPEC = P(None, "fsdp", None, "tensor")


@pytest.fixture
def made(monkeypatch):
    """A family of gpt-oss' experts."""
    monkeypatch.setattr(hf_folder, "family_of", lambda names: MADE)
    return MADE


@pytest.fixture
def codes():
    """Blocks and scales of two layers, with every code and many exponents."""
    rng = np.random.default_rng(0)
    table = {}
    for layer in range(2):
        for name, out, width in (("gate_up_proj", 2 * D_FF, D), ("down_proj", D, 32)):
            base = f"layers.{layer}.experts.{name}"
            shape = (EXPERTS_COUNT, out, width // 32)
            table[f"{base}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
            table[f"{base}_scales"] = rng.integers(1, 252, shape, np.uint8)
    return table


def write_mxfp4(folder, table, **options):
    folder.mkdir()
    write(folder / "model.safetensors", table)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], **options}
    values = {"architectures": ["Made"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def expected(table):
    """Kernels `[layer, expert, in, out]`: rows of gate and up projection alternate."""
    kernels = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for layer in range(2):
        base = f"layers.{layer}.experts."
        both, down = (
            dequantized_mxfp4(table[f"{base}{name}_blocks"], table[f"{base}{name}_scales"])
            for name in ("gate_up_proj", "down_proj")
        )
        for name, values in (
            ("gate_proj", both[:, ::2]),
            ("up_proj", both[:, 1::2]),
            ("down_proj", down),
        ):
            kernels[name].append(values.swapaxes(1, 2))
    return {f"{name}/kernel": np.stack(values) for name, values in kernels.items()}


def abstract_of(arrays, dtype, spec=SPEC):
    sharding = NamedSharding(tiny.mesh(fsdp=2, tensor=2), spec)
    return {
        path: jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
        for path, array in arrays.items()
    }


def equal_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_mxfp4_is_read_as_its_specification_says(dtype, made, codes, tmp_path, monkeypatch):
    """Bit for bit, however rows are read."""
    folder = write_mxfp4(tmp_path / "a", codes)
    arrays = expected(codes)
    abstract = abstract_of(arrays, dtype)
    for skipped, at_once in ((tensor_region.SKIPPED_BYTES, LocalBytes.at_once), (0, 500), (0, 1)):
        monkeypatch.setattr(tensor_region, "SKIPPED_BYTES", skipped)
        monkeypatch.setattr(LocalBytes, "at_once", at_once)
        params = load_params(folder, abstract)
        for path, array in arrays.items():
            assert equal_bits(params[path], array.astype(dtype))


def test_the_other_half_of_a_byte_first_gives_other_values(made, codes, tmp_path):
    """A control: codes in the opposite order."""
    folder = write_mxfp4(tmp_path / "a", codes)
    swapped = {
        name: (a << 4 | a >> 4).astype(np.uint8) if name.endswith("_blocks") else a
        for name, a in codes.items()
    }
    arrays = expected(swapped)
    params = load_params(folder, abstract_of(arrays, jnp.bfloat16))
    assert not any(equal_bits(params[path], a.astype(jnp.bfloat16)) for path, a in arrays.items())


def test_all_codes_and_scales_of_mxfp4_are_defined(made, tmp_path):
    """All 256 bytes with each scale: exact, infinite above bfloat16, NaN for the scale of all bits set."""
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 1, 1))
    scales = np.arange(256, dtype=np.uint8).repeat(16).reshape(256, 16)
    write_mxfp4(tmp_path / "a", {"w_blocks": blocks, "w_scales": scales})
    with hf_folder.open_folder(tmp_path / "a") as found:
        tensor = found.tensors["w"]
        assert (tensor.shape, tensor.dtype) == ((256, 512), jnp.bfloat16)
        values = tensor.rows(0, 256, 512, np.empty(2 * 256 * 512, np.uint8))
    with np.errstate(over="ignore"):
        reference = dequantized_mxfp4(blocks, scales).astype(np.float32)
    np.testing.assert_array_equal(values.astype(np.float32), reference)
    assert np.isnan(reference[255]).all()
    assert np.isinf(reference[254]).any()


@pytest.mark.soak
def test_mxfp4_of_transformers_has_the_same_values(made, codes, tmp_path):
    """But for the order of dimensions, of which it gives `[expert, in, out]`."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder = write_mxfp4(tmp_path / "a", codes)
    base = "layers.1.experts.down_proj"
    blocks, scales = (torch.from_numpy(codes[f"{base}_{name}"]) for name in ("blocks", "scales"))
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales).float().numpy()
    arrays = expected(codes)
    params = load_params(folder, abstract_of(arrays, jnp.float32))
    np.testing.assert_array_equal(params["down_proj/kernel"][1], theirs)


def test_the_export_of_mxfp4_is_bfloat16(made, codes, tmp_path):
    """`[expert, in, out]` as transformers has it without a quantization; read again, the same."""
    folder = write_mxfp4(tmp_path / "a", codes)
    abstract = abstract_of(expected(codes), jnp.bfloat16)
    params = load_params(folder, abstract)
    save_params(tmp_path / "b", params, MADE, {})
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    with open(tmp_path / "b" / "model.safetensors", "rb") as file:
        assert b'"BF16","shape":[4,64,12]' in file.read(1000)
    again = load_params(tmp_path / "b", abstract)
    assert all(equal_bits(again[path], params[path]) for path in params)


def kept(folder, tmp_path, params, family, config):
    """Tensors and config.json of an export with the codes of a folder."""
    with open_folder(folder) as quantized:
        save_params(tmp_path / "kept", params, family, config, quantized=quantized)
    values = json.loads((tmp_path / "kept" / "config.json").read_text())
    return load_codes(tmp_path / "kept"), values


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_codes_of_mxfp4_are_written_again(dtype, made, codes, tmp_path):
    """Bit for bit, with their scales and quantization_config, from parameters on four devices."""
    folder = write_mxfp4(tmp_path / "a", codes)
    params = load_params(folder, abstract_of(expected(codes), dtype))
    written, values = kept(folder, tmp_path, params, MADE, {})
    assert written.keys() == codes.keys()
    assert all(equal_bits(written[name], codes[name]) for name in codes)
    assert values["quantization_config"]["quant_method"] == "mxfp4"


def test_codes_of_changed_values_are_not_written(made, codes, tmp_path):
    """A control: each tensor with another value is named, and nothing is written."""
    folder = write_mxfp4(tmp_path / "a", codes)
    params = load_params(folder, abstract_of(expected(codes), jnp.bfloat16))
    kernel = params["up_proj/kernel"]
    changed = {**params, "up_proj/kernel": kernel.at[1, 2, 3, 4].add(1)}
    with pytest.raises(CheckpointError) as caught:
        kept(folder, tmp_path, changed, MADE, {})
    wheres = [problem.where for problem in caught.value.problems]
    assert wheres == ["tensor layers.1.experts.gate_up_proj"]
    assert not (tmp_path / "kept").exists()


BLOCK = (4, 8)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A Llama whose linear layers are codes with factors, and their values."""
    folder = tmp_path_factory.mktemp("fp8") / "a"
    params = tiny.plan().model.init(jax.random.key(0))
    save_params(folder, params, family_for(tiny.CONFIG), tiny.CONFIG)
    rng = np.random.default_rng(0)
    codes, values = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values[name] = codes[name] = tensor
        if name.endswith("proj.weight"):
            code = rng.integers(0, 127, tensor.shape, np.uint8)
            code |= rng.integers(0, 2, tensor.shape, np.uint8) << 7
            grid = [-(-size // block) for size, block in zip(tensor.shape, BLOCK, strict=True)]
            factors = rng.uniform(1e-4, 1e-2, grid).astype(np.float32)
            codes[name] = code.view(jnp.float8_e4m3fn)
            codes[f"{name}_scale_inv"] = factors
            values[name] = dequantized_fp8(code, factors, BLOCK)
    (folder / "model.safetensors").unlink()
    write(folder / "model.safetensors", codes)
    edit(
        folder,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": BLOCK,
            "modules_to_not_convert": None,
        },
    )
    return folder, codes, values


def loaded_and_written(folder, tmp_path, dtype=None):
    """Tensors of the folder, read into parameters and written as float32 or another dtype."""
    abstract = tiny.plan(fsdp=2, tensor=2).abstract_params
    params = load_params(folder, abstract)
    save_params(tmp_path / "out", params, family_for(tiny.CONFIG), tiny.CONFIG, dtype=dtype)
    return load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("at_once", [LocalBytes.at_once, 1000])
def test_blocks_of_fp8_are_multiplied_by_their_factors(at_once, fp8, tmp_path, monkeypatch):
    """A float32 product, bit for bit; the last blocks are not full."""
    folder, _, values = fp8
    monkeypatch.setattr(LocalBytes, "at_once", at_once)
    written = loaded_and_written(folder, tmp_path)
    assert written.keys() == values.keys()
    for name, value in values.items():
        assert equal_bits(written[name], value), name


def test_codes_of_fp8_are_written_again(fp8, tmp_path):
    """Bit for bit, with their factors; tensors without codes are written as they are."""
    folder, codes, _ = fp8
    params = load_params(folder, tiny.plan(fsdp=2, tensor=2).abstract_params)
    written, _ = kept(folder, tmp_path, params, family_for(tiny.CONFIG), tiny.CONFIG)
    assert written.keys() == codes.keys()
    assert all(equal_bits(written[name], codes[name]) for name in codes)


def test_codes_of_another_checkpoint_are_refused(fp8, tmp_path):
    """One without codes has nothing to keep, and one of another model other values."""
    folder, _, _ = fp8
    params = load_params(folder, tiny.plan(fsdp=2, tensor=2).abstract_params)
    family = family_for(tiny.CONFIG)
    save_params(tmp_path / "plain", params, family, tiny.CONFIG)
    with pytest.raises(CheckpointError, match="no quantized tensor"):
        kept(tmp_path / "plain", tmp_path, params, family, tiny.CONFIG)
    other = dataclasses.replace(tiny.CONFIG, rope_theta=7.0)
    with pytest.raises(CheckpointError, match="another model"):
        kept(folder, tmp_path, params, family, other)


def test_other_blocks_give_other_values(fp8):
    """A control: wider blocks, rows and columns of blocks swapped, and no factors."""
    _, codes, values = fp8
    name = "model.layers.0.mlp.up_proj.weight"
    code, factors = codes[name].view(np.uint8), codes[f"{name}_scale_inv"]
    for wrong in (
        dequantized_fp8(code, factors, (4, 16)),
        dequantized_fp8(code, np.ones_like(factors), BLOCK),
        dequantized_fp8(code, factors[::-1], BLOCK),
    ):
        assert not equal_bits(wrong, values[name])


def copied(folder, tmp_path, change=None):
    """A copy of a folder with other tensors."""
    out = tmp_path / "copy"
    shutil.copytree(folder, out)
    table = load_codes(folder)
    if change is not None:
        change(table)
    (out / "model.safetensors").unlink()
    write(out / "model.safetensors", table)
    return out


def load_codes(folder):
    """All tensors of a folder, codes as they are."""
    with SafetensorsFile(folder / "model.safetensors") as file:
        table = {}
        for name, tensor in file.tensors.items():
            size = int(np.prod(tensor.shape))
            space = np.empty(size * tensor.dtype.itemsize, np.uint8)
            table[name] = file.elements(name, 0, size, space).reshape(tensor.shape)
    return table


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e8m0fnu])
def test_factors_may_be_of_other_dtypes(dtype, fp8, tmp_path):
    """Of Qwen's checkpoints, and of powers of two."""
    name = "model.layers.1.self_attn.k_proj.weight"

    def narrow(table):
        table[f"{name}_scale_inv"] = table[f"{name}_scale_inv"].astype(dtype)

    folder = copied(fp8[0], tmp_path, narrow)
    factors = load_codes(folder)[f"{name}_scale_inv"].astype(np.float32)
    value = dequantized_fp8(fp8[1][name].view(np.uint8), factors, BLOCK)
    assert equal_bits(loaded_and_written(folder, tmp_path)[name], value)


def test_experts_in_one_tensor_have_blocks_of_their_own():
    """Blocks do not cross the matrices of a tensor `[expert, out, in]`."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 127, (3, 6, 16), np.uint8)
    factors = rng.uniform(size=(3, 2, 2)).astype(np.float32)
    matrices = [dequantized_fp8(c, f, BLOCK) for c, f in zip(codes, factors, strict=True)]
    whole = np.concatenate(matrices)
    tensor = Fp8Tensor(Array(codes.view(jnp.float8_e4m3fn)), Array(factors), BLOCK)
    assert tensor.problem() == ""
    rows = tensor.rows(1, 17, 16, np.empty(10_000, np.uint8), slice(0, None, 3))
    np.testing.assert_array_equal(rows, whole[1:17:3])


@dataclasses.dataclass
class Array:
    """A tensor in memory."""

    value: np.ndarray
    name: str = ""

    @property
    def dtype(self):
        return self.value.dtype

    @property
    def shape(self):
        return self.value.shape

    def rows(self, start, stop, size, buffer, chosen=slice(None)):
        return self.value.reshape(-1, size)[start:stop][chosen]


def test_no_byte_of_another_expert_is_read(made, codes, tmp_path, monkeypatch):
    """Codes and scales once each, if runs are not short, although two parameters share them."""
    monkeypatch.setattr(tensor_region, "SKIPPED_BYTES", 0)
    read = collections.Counter()
    original = SafetensorsFile.elements

    def elements(self, name, start, stop, buffer):
        read[name] += stop - start
        return original(self, name, start, stop, buffer)

    monkeypatch.setattr(SafetensorsFile, "elements", elements)
    folder = write_mxfp4(tmp_path / "a", codes)
    spec = P(None, "fsdp", None, "tensor")
    load_params(folder, abstract_of(expected(codes), jnp.bfloat16, spec))
    assert read == {name: array.size for name, array in codes.items()}


def take(*names):
    return lambda table: [table.pop(name) for name in names]


def put(name, make):
    return lambda table: table.update({name: make(table[name])})


UP = "model.layers.0.mlp.up_proj.weight"
WRONG = {
    "codes without factors": (
        take(f"{UP}_scale_inv"),
        f"{UP}: is float8_e4m3fn, and has no scales",
    ),
    "factors without codes": (take(UP), f"{UP}_scale_inv: are scales of fp8 without codes"),
    "a grid of other blocks": (
        put(f"{UP}_scale_inv", lambda a: a[:, :1]),
        f"{UP}: is [64, 32] with scales [16, 1], expected [16, 4] in blocks (4, 8)",
    ),
    "factors of integers": (
        put(f"{UP}_scale_inv", lambda a: a.astype(np.int32)),
        "scales of int32",
    ),
    "factors of what is no code": (
        put(UP, lambda a: a.astype(np.float32)),
        f"{UP}: is float32, and has scales of float8_e4m3fn",
    ),
    "a code of no number": (
        put(UP, lambda a: np.full_like(a.view(np.uint8), 0x7F).view(a.dtype)),
        "has values that are NaN or infinite",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_belong_together_are_named(name, fp8, tmp_path):
    """In one error, before anything is read; a NaN when it is read."""
    change, complaint = WRONG[name]
    folder = copied(fp8[0], tmp_path, change)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        load_params(folder, tiny.plan().abstract_params)


def test_codes_of_mxfp4_need_their_scales(made, codes, tmp_path):
    """Missing ones, and blocks of other than 16 bytes."""
    del codes["layers.0.experts.down_proj_blocks"]
    del codes["layers.1.experts.down_proj_scales"]
    base = "layers.0.experts.gate_up_proj"
    codes[f"{base}_blocks"] = codes[f"{base}_blocks"][..., :8]
    folder = write_mxfp4(tmp_path / "a", codes)
    with pytest.raises(CheckpointError) as caught:
        load_params(folder, {})
    assert {problem.where for problem in caught.value.problems} == {
        "tensor layers.0.experts.down_proj_scales",
        "tensor layers.1.experts.down_proj_blocks",
        f"tensor {base}_blocks",
    }


REFUSED = [
    ({"load_in_4bit": True}, "quant_method: is 'bitsandbytes'", "model.dequantize()"),
    ({"quant_method": "gptq", "bits": 4}, "quant_method: is 'gptq'", "that it was made from"),
    ({"quant_method": "awq"}, "quant_method: is 'awq'", "that it was made from"),
    ({"quant_method": "compressed-tensors"}, "is 'compressed-tensors'", "decompress it"),
    ({"bits": 4}, "quant_method: is missing", "one of: mxfp4, fp8"),
    ([], "quantization_config: is [], not an object", ""),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "only dynamic is read", ""),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: is 'e5m2', and only e4m3 is read", ""),
    ({"quant_method": "fp8", "weight_block_size": None}, "not rows and columns of a block", ""),
    ({"quant_method": "fp8", "weight_block_size": [0, 4]}, "not rows and columns of a block", ""),
    ({"quant_method": "mxfp4", "group": 16}, "group: is 16, and is unknown", ""),
]


@pytest.mark.parametrize(("quantization", "what", "fix"), REFUSED)
def test_other_quantizations_are_refused_by_name(quantization, what, fix):
    """With what to do."""
    with pytest.raises(ConfigError) as caught:
        read_quantization({"quantization_config": quantization})
    assert what in str(caught.value)
    assert fix in str(caught.value)


def test_no_quantization_is_none():
    """An absent field, and null."""
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None
