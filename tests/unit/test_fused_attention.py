"""The fused kernel follows JAX's backend and a probe; GPUs are stubs on CPU devices."""

import dataclasses

import pytest

from spmd.chips import CHIPS
from spmd.errors import ConfigError
from spmd.model_interface import attention_config, fused_attention
from spmd.model_interface.attention_config import (
    CHUNKED_FROM,
    AttentionCall,
    make_attention_config,
)
from spmd.model_interface.fused_attention import FusedKernel, find_fused_kernel
from spmd.sharding.mesh import MeshShape, abstract_mesh, platform_of
from tests import tiny
from tests.unit.test_accelerators import fake_device


def pretend(monkeypatch, platform):
    """Let all devices be of a platform."""
    for module in (attention_config, fused_attention):
        monkeypatch.setattr(module, "platform_of", lambda device: platform)


@pytest.mark.parametrize(
    ("version", "platform"), [("cuda 12090", "cuda"), ("rocm 70000", "rocm"), ("", "cuda")]
)
def test_the_backend_tells_gpus_apart(version, platform):
    """JAX calls both `gpu`; control: TPUs and CPUs keep their names."""
    assert platform_of(fake_device("gpu", "any", version=version)) == platform
    assert platform_of(fake_device("tpu", "TPU v4", version=version)) == "tpu"


def test_gpus_of_amd_have_no_cudnn(monkeypatch):
    """`auto` falls back and the plan says so; cuDNN by name is refused. Control: TPUs have splash."""
    mesh = tiny.mesh(fsdp=2)
    pretend(monkeypatch, "rocm")
    config = make_attention_config(mesh, "auto", "ring")
    assert config.choose(AttentionCall(8192, 64, "bfloat16")) == "chunked"
    fallback = f"xla, chunked from {CHUNKED_FROM} (without cudnn: these GPUs are of AMD)"
    assert str(config) == fallback
    with pytest.raises(ConfigError, match="cudnn needs an NVIDIA GPU, and the mesh is of rocm"):
        make_attention_config(mesh, "cudnn", "ring")
    pretend(monkeypatch, "tpu")
    assert find_fused_kernel(mesh) == FusedKernel("splash")


def test_a_gpu_without_cudnn_falls_back_by_name(monkeypatch):
    """JAX's own error for a missing cuDNN is in the plan, or refuses cuDNN by name."""
    mesh = tiny.mesh(fsdp=2)
    pretend(monkeypatch, "cuda")
    config = make_attention_config(mesh, "auto", "ring")
    assert config.choose(AttentionCall(8192, 64, "bfloat16")) == "chunked"
    assert "(without cudnn: cuDNN is not detected.)" in str(config)
    with pytest.raises(ConfigError, match="does not compile for these devices"):
        make_attention_config(mesh, "cudnn", "ring")


def test_control_cudnn_that_compiles_is_chosen(monkeypatch):
    """With a probe that passes, and on an absent GPU, which no probe can compile for."""
    mesh = tiny.mesh(fsdp=2)
    pretend(monkeypatch, "cuda")
    monkeypatch.setattr(fused_attention, "_probe_failure", lambda device: "")
    config = make_attention_config(mesh, "auto", "ring")
    assert config.choose(AttentionCall(8192, 64, "bfloat16")) == "cudnn"
    assert str(config) == f"cudnn or xla, chunked from {CHUNKED_FROM}"
    monkeypatch.undo()
    pretend(monkeypatch, "cuda")
    monkeypatch.setattr(fused_attention.jax, "local_devices", lambda: [])
    assert find_fused_kernel(mesh) == FusedKernel("cudnn")


@pytest.mark.parametrize(("platform", "name"), [("cuda", "cudnn"), ("tpu", "splash")])
def test_older_chips_have_no_fused_attention(monkeypatch, platform, name):
    """By the chip's entry; control: the same chip with it."""
    mesh = tiny.mesh(fsdp=2)
    pretend(monkeypatch, platform)
    monkeypatch.setattr(fused_attention.jax, "local_devices", lambda: [])
    for supported in (False, True):
        chip = dataclasses.replace(CHIPS["v3"], fused_attention=supported)
        monkeypatch.setattr(fused_attention, "chip_of", lambda kind, chip=chip: chip)
        found = find_fused_kernel(mesh)
        assert (found.name == name) == supported
        assert (found.failure == f"{name}: v3 does not support it") == (not supported)


def test_abstract_meshes_have_no_fused_kernel():
    """A plan for another machine names the kernels of any device."""
    assert find_fused_kernel(abstract_mesh(MeshShape(fsdp=2))) == FusedKernel()
