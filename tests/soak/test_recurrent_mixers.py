"""Recurrent token mixers equal the PyTorch implementations of `transformers`."""

import jax.numpy as jnp
import numpy as np

from spmd.layers.gated_delta_rule import gated_delta_rule, gated_delta_step, l2_normalized
from spmd.layers.short_convolution import short_convolution
from spmd.layers.state_space import state_space_scan, state_space_step
from tests.numerics.test_recurrence import (
    BATCH,
    SEQ,
    assert_equal,
    delta_arrays,
    largest_difference,
    narrow,
    state_space_arrays,
    tokens_of,
)


def as_torch(x):
    """A float32 tensor."""
    import torch

    return torch.tensor(np.asarray(x, np.float32))


def numpy_of(tensors):
    return [tensor.detach().numpy() for tensor in tensors]


def test_the_gated_delta_rule_is_qwen_3_nexts():
    """Chunked and recurrent, with queries and keys that they normalize; the control leaves that out."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    arrays = delta_arrays(np.random.default_rng(0))
    arrays["key"] *= 3.0
    options = {
        "g": as_torch(arrays["log_decay"]),
        "beta": as_torch(arrays["beta"]),
        "initial_state": as_torch(arrays["state"]),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    tensors = [as_torch(arrays[name]) for name in ("query", "key", "value")]
    chunked = modeling_qwen3_next.torch_chunk_gated_delta_rule(*tensors, **options)
    recurrent = modeling_qwen3_next.torch_recurrent_gated_delta_rule(*tensors, **options)
    ours = narrow(arrays)
    control = gated_delta_rule(**ours)
    ours |= {name: l2_normalized(ours[name]) for name in ("query", "key")}
    found = gated_delta_rule(**ours)
    assert_equal(found, numpy_of(chunked))
    assert_equal(found, numpy_of(recurrent))
    assert not largest_difference(control, numpy_of(chunked)) < 0.01

    latest = {"state": ours.pop("state")}
    for t in range(SEQ):
        out, latest["state"] = gated_delta_step(**tokens_of(ours, t), **latest)
    assert_equal((out, latest["state"]), (numpy_of(chunked)[0][:, -1], numpy_of(chunked)[1]))


def test_the_state_space_scan_is_mamba_2s():
    """Chunked and one token, with the softplus and limits that its mixer applies to step sizes."""
    from transformers.models.mamba2 import modeling_mamba2

    arrays = state_space_arrays(np.random.default_rng(1))
    arrays["dt"] = np.random.default_rng(2).normal(size=arrays["dt"].shape)
    bias = np.linspace(-1, 1, arrays["dt"].shape[-1])
    names = ("x", "dt", "a", "b", "c")
    wanted = modeling_mamba2.mamba2_chunk_scan(
        *[as_torch(arrays[name]) for name in names],
        chunk_size=16,
        D=as_torch(arrays["d"]),
        dt_bias=as_torch(bias),
        dt_softplus=True,
        initial_states=as_torch(arrays["state"]),
        return_final_states=True,
        dt_limit=(0.3, 1.0),
    )
    steps = np.log1p(np.exp(arrays["dt"] + bias))
    ours = narrow({**arrays, "dt": np.clip(steps, 0.3, 1.0)})
    assert_equal(state_space_scan(**ours), numpy_of(wanted))
    control = narrow({**arrays, "dt": steps})
    assert largest_difference(state_space_scan(**control), numpy_of(wanted)) > 0.01

    heads, head_dim, state_dim = arrays["state"].shape[1:]
    state = as_torch(arrays["state"])
    first = tokens_of(arrays, 0)
    a, d = as_torch(arrays["a"]), as_torch(arrays["d"])
    out = modeling_mamba2.mamba2_selective_state_update(
        state,
        as_torch(first["x"]),
        as_torch(first["dt"])[..., None].expand(-1, -1, head_dim),
        a[:, None, None].expand(heads, head_dim, state_dim),
        as_torch(first["b"]),
        as_torch(first["c"]),
        d[:, None].expand(-1, head_dim),
        dt_bias=as_torch(bias)[:, None].expand(-1, head_dim),
        dt_softplus=True,
    )
    step = state_space_step(**tokens_of(narrow({**arrays, "dt": steps}), 0))
    assert_equal(step, numpy_of((out, state)))


def test_the_short_convolution_is_lfm_2s():
    """Its layer with random weights and padding before a prompt; the control is without the mask."""
    import torch
    from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    torch.manual_seed(0)
    config = Lfm2Config(hidden_size=16, conv_L_cache=3, conv_bias=True, num_hidden_layers=1)
    config.layer_types = ["conv"]
    layer = Lfm2ShortConv(config, 0)
    x = np.random.default_rng(3).normal(size=(BATCH, 9, 16))
    valid = np.ones((BATCH, 9), bool)
    valid[1, :4] = False
    wanted = layer(as_torch(x), attention_mask=torch.tensor(valid))
    weights = {name: jnp.asarray(p.detach().numpy()) for name, p in layer.named_parameters()}

    def ours(x, **options):
        projected = jnp.asarray(x, jnp.float32) @ weights["in_proj.weight"].T
        before, after, inputs = jnp.split(projected + weights["in_proj.bias"][None, None], 3, -1)
        kernel = weights["conv.weight"][:, 0].T
        mixed, _ = short_convolution(before * inputs, kernel, weights["conv.bias"], **options)
        return (after * mixed) @ weights["out_proj.weight"].T + weights["out_proj.bias"][None, None]

    # Padding has projected biases there, which reach the first tokens of a prompt; ours passes over it.
    expected = layer(as_torch(x[1:, 4:])).detach().numpy()
    found = ours(x, valid=jnp.asarray(valid))
    assert_equal((found[0],), (wanted[0].detach().numpy(),))
    assert_equal((found[1:, 4:],), (expected,))
    assert np.abs(ours(x)[1:, 4:] - expected).max() > 1e-3
