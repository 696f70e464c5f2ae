"""The ledger of communication: bytes by hand, and every reader has the same records."""

import dataclasses
import functools
from typing import ClassVar

import pytest

import spmd
from spmd.analysis.comm_dtypes import comm_dtype_checks
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA
from spmd.plan.communication import element_bytes, gathers, reductions
from spmd.run.build import make_setup, planned_mesh
from spmd.run.config import TrainConfig
from spmd.run.describe import compression_lines

SMALL = DecoderConfig(vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64)
DATA = spmd.DataConfig(source=("stdlib",), tokenizer="bytes", sequence=32, batch=64)
KERNEL = "layers/mlp/up_proj/kernel"
ELEMENTS = 2 * 32 * 64
"""Of the kernel, in both layers."""


@functools.cache
def plan(**compress):
    config = TrainConfig(
        model=SMALL,
        rules=LLAMA,
        mesh=spmd.MeshShape(data=2, fsdp=2, tensor=2),
        data=DATA,
        precision="bf16",
        compress=spmd.CompressConfig(**compress),
        remat="full",
    )
    return make_setup(config, planned_mesh(config)).plan


def of_kernel(transfers):
    return {transfer.axes: transfer for transfer in transfers if transfer.path == KERNEL}


@pytest.mark.parametrize(("codec", "bits"), [("", 16), ("int8", 8)])
def test_a_gather_is_of_the_part_of_a_tensor_shard(codec, bits):
    """A device of two along `tensor` gathers half of the kernel over `fsdp`, in each pass."""
    gathered = of_kernel(gathers(plan(gather=codec)))[("fsdp",)]
    assert gathered.elements == ELEMENTS // 2
    assert gathered.plain_bytes == 2 * gathered.elements
    scales = 0
    if codec:
        scales = 4 * gathered.elements / gathered.block
    assert gathered.bytes == gathered.elements * bits / 8 + scales


def test_a_gradient_is_scattered_over_fsdp_and_summed_over_data():
    """Over `fsdp` its terms are sent once; over `data` a shard of it, there and back."""
    sent = of_kernel(reductions(plan()))
    assert {axes: x.elements for axes, x in sent.items()} == {
        ("data",): 2 * ELEMENTS // 2 // 2,
        ("fsdp",): ELEMENTS // 2,
    }


def test_all_readers_have_the_ledgers_records():
    """The text's bytes and the audit's dtypes are those of the records."""
    made = plan(gather="int8", gradients="int8")
    checks = {(check.param, check.use): check for check in comm_dtype_checks(made)}
    for (axis,), transfer in of_kernel(reductions(made)).items():
        assert (transfer.dtype, checks[KERNEL, "gradient"].dtypes[axis]) == ("int8", "s8")
    total = sum(x.bytes for x in gathers(made) if x.dtype == "int8")
    (line,) = (line for line in compression_lines(made) if line.startswith("layers gather"))
    assert f"over fsdp 2: {spmd.tree.human_bytes(int(total))}, not " in line


@dataclasses.dataclass(frozen=True)
class Halved(spmd.GradTransform):
    """A technique of one's own, which sends an array of 100 bytes in place of one gradient."""

    name: ClassVar[str] = "halved"
    path: str = KERNEL

    def sent(self, plan):
        """Return the array."""
        del plan
        return {self.path: {"data": (100,)}}


def test_a_technique_states_what_it_sends():
    """Its arrays are in the ledger and in the audit's limits; control: of another gradient."""
    made = dataclasses.replace(plan(), transforms=(Halved(),))
    assert of_kernel(reductions(made))[("data",)].bytes == 2 * 100
    checks = {(check.param, check.use): check for check in comm_dtype_checks(made)}
    assert checks[KERNEL, "gradient"].largest == {"data": 100}
    other = dataclasses.replace(made, transforms=(Halved(path="norm/scale"),))
    assert of_kernel(reductions(other))[("data",)].bytes == 2 * ELEMENTS // 2


def test_bytes_of_an_element_include_its_scale():
    """A block of int8 has one float32 for its elements."""
    assert element_bytes("int8", 32) == 1 + 4 / 32
    assert element_bytes("float32") == 4
