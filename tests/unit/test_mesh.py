"""Meshes have six axes, infer one, and say what does not multiply."""

import jax
import pytest
from jax.sharding import AxisType

from spmd.errors import MeshError
from spmd.sharding.mesh import AXES, MeshShape, abstract_mesh, make_mesh, simulate_devices


def test_every_mesh_has_all_axes_in_order():
    """Axes that are not asked for have size 1 and are there."""
    mesh = make_mesh(data=2, fsdp=-1, tensor=2)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {
        "pipe": 1,
        "data": 2,
        "fsdp": 2,
        "expert": 1,
        "sequence": 1,
        "tensor": 2,
    }
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_an_abstract_mesh_has_the_same_shape():
    """A plan for 16,384 devices needs none of them."""
    shape = MeshShape(data=2, fsdp=2, tensor=2)
    assert abstract_mesh(shape).shape == make_mesh(data=2, fsdp=2, tensor=2).shape
    assert abstract_mesh(MeshShape(fsdp=2048, tensor=8)).size == 16_384


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"data": 3}, "too many devices|too few devices|data=3 = 3, and there are 8 devices"),
        ({"data": 16}, "too few devices"),
        ({"data": 3, "fsdp": -1}, r"8 devices / \(data=3 = 3\) = 2.667"),
        ({"data": -1, "fsdp": -1}, "data and fsdp are both -1"),
        ({"data": 0}, "data: is 0"),
        ({"fsd": 2}, 'did you mean "fsdp"'),
    ],
)
def test_what_does_not_multiply_is_an_error_with_the_arithmetic(sizes, complaint):
    """The sizes, the product and the number of devices are in the message."""
    with pytest.raises(MeshError, match=complaint):
        make_mesh(**sizes)


def test_slices_put_an_axis_on_the_slow_network():
    """Simulated devices of one process form as many slices as are asked for; an axis must divide."""
    with pytest.raises(MeshError, match=r"slices.data: is 3, and mesh.data is 2\n.*2 / 3 = 0.6667"):
        make_mesh(data=2, fsdp=4, slices={"data": 3})
    with pytest.raises(MeshError, match=r"slices.data: is 0"):
        make_mesh(data=8, slices={"data": 0})
    assert make_mesh(data=2, fsdp=4, slices={"data": 1}) == make_mesh(data=2, fsdp=4)
    mesh = make_mesh(data=2, fsdp=4, slices={"fsdp": 2})
    assert [device.id for device in mesh.devices.flat] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_devices_cannot_be_simulated_after_jax_has_started():
    """The call says so instead of being ignored."""
    assert jax.device_count() == 8
    simulate_devices(8)  # as many as there are: fine
    with pytest.raises(MeshError, match="call it before"):
        simulate_devices(3)
