"""The published figures of model states and activations, each from one formula with other settings.

Sources: Rajbhandari et al., ZeRO (arXiv:1910.02054v3), in test_zero.py from whole plans, here from
the formula; Hugging Face's Ultra-Scale Playbook; Megatron-LM's
docs/user-guide/features/dist_optimizer.md and its theoretical_memory_usage.py as run; DeepSpeed's
docs/code-docs/source/memory.rst and estimators; Amazon SageMaker's model parallel concepts;
jax-ml/scaling-book; Korthikanti et al. (arXiv:2205.05198).
"""

import math

import pytest

from spmd.step_time.closed_memory import activation_bytes, model_state_bytes
from tests.unit.test_zero_stages import LARGEST, PUBLISHED

GB, GIB, MIB = 1e9, 2**30, 2**20
F32_ACCUMULATION = {"accumulation": "float32"}
MEGATRON = {"gradients": "float32"}
DEEPSPEED_Z3 = {
    "dp": 8,
    "stage": 3,
    "gradients": None,
    "accumulation": "float32",
    "largest_layer": 32e6,
}
T5_3B, T5_LARGE = 2851e6, 737.67e6


@pytest.mark.parametrize(("params", "devices", "stage", "expected", "rounding"), PUBLISHED)
def test_zero_tables(params, devices, stage, expected, rounding):
    """Figure 1 and Table 1 of ZeRO: 16 bytes for each parameter, divided by stage."""
    assert model_state_bytes(params, dp=devices, stage=stage).total / GB == pytest.approx(
        expected, abs=rounding
    )


@pytest.mark.parametrize(("model_parallel", "gpus", "stage", "billions"), LARGEST)
def test_zero_largest_models(model_parallel, gpus, stage, billions):
    """Table 2 of ZeRO: what fills 32 GB."""
    each = model_state_bytes(1 / model_parallel, dp=gpus // model_parallel, stage=stage).total
    assert 32 / each == pytest.approx(billions, rel=0.01)


def test_zero_limit():
    """With ever more devices stage 1 approaches a reduction by 4 (SageMaker, model parallel concepts)."""
    assert model_state_bytes(1, stage=0).total / model_state_bytes(
        1, dp=2**40, stage=1
    ).total == pytest.approx(4)


@pytest.mark.parametrize(
    ("params", "settings", "expected", "unit", "tolerance"),
    [
        (1e9, {}, 16, GB, 0),  # ultrascale.1b_16
        (1e9, F32_ACCUMULATION, 20, GB, 0),  # ultrascale.1b_20
        (7e9, {}, 112, GB, 0),
        (7e9, F32_ACCUMULATION, 140, GB, 0),
        (70e9, {}, 1120, GB, 0),
        (1, MEGATRON, 18, 1, 0),  # megatron.bytes.bf16p_fp32g.replicated
        (1, MEGATRON | {"dp": 64, "stage": 1}, 6.1875, 1, 1e-9),
        (1, MEGATRON | {"dtype": "float32", "master": None, "dp": 8, "stage": 1}, 9.0, 1, 1e-9),
        # as documented: 4 P + 16 P / n
        (T5_3B, F32_ACCUMULATION | {"dp": 8, "stage": 1}, 15.93, GIB, 0.01),
        # as in the code: 2 P + 18 P / n
        (T5_3B, F32_ACCUMULATION | {"dp": 8, "stage": 2}, 11.28, GIB, 0.01),
        (T5_3B, DEEPSPEED_Z3, 6.09, GIB, 0.006),
        (T5_3B, DEEPSPEED_Z3 | {"offload": ("optimizer_state",)}, 0.78, GIB, 0.006),
        (T5_3B, DEEPSPEED_Z3 | {"offload": ("optimizer_state", "params")}, 0.12, GIB, 0.006),
        (T5_LARGE, DEEPSPEED_Z3 | {"dp": 4, "largest_layer": 32.9e6}, 3291, MIB, 2),
        (
            T5_LARGE,
            DEEPSPEED_Z3 | {"dp": 4, "largest_layer": 32.9e6, "offload": ("optimizer_state",)},
            477,
            MIB,
            1,
        ),
        (13e9, {"gradients": None, "master": None}, 130, GB, 0.01),  # sb.llama2_13b_mem
    ],
)
def test_model_states(params, settings, expected, unit, tolerance):
    """16, 18 and 20 bytes for each parameter, and what ZeRO, Megatron and DeepSpeed divide and offload."""
    assert model_state_bytes(params, **settings).total / unit == pytest.approx(
        expected, abs=tolerance
    )


def test_the_host_of_an_offloaded_optimizer():
    """deepspeed.z3.cpu.opt: float32 gradients, master weights and moments, times a buffer factor of 1.5."""
    states = model_state_bytes(T5_3B, accumulation="float32")
    host = (states.accumulation + states.master + states.moments) * 1.5
    assert host / GIB == pytest.approx(63.72, abs=0.01)


SHAPES = {
    "22B": {"batch": 4, "width": 6144, "heads": 64},
    "175B": {"batch": 1, "width": 12288, "heads": 96},
    "530B": {"batch": 1, "width": 20480, "heads": 128},
    "1T": {"batch": 1, "width": 25600, "heads": 160},
}
VARIANTS = {
    "none": {},
    "tp": {"tensor": 8},
    "tp_sp": {"tensor": 8, "sequence_parallel": True},
    "tp_selective": {"tensor": 8, "recompute": "selective"},
    "tp_sp_selective": {"tensor": 8, "sequence_parallel": True, "recompute": "selective"},
    "full": {"tensor": 8, "recompute": "full"},
}


@pytest.mark.parametrize(
    ("shape", "variant", "expected"),
    [
        ("22B", "none", 7079985152),
        ("22B", "tp_selective", 654311424),
        ("22B", "tp_sp_selective", 213909504),
        ("22B", "full", 100663296),
        ("175B", "tp", 578813952),
        ("175B", "tp_sp", 358612992),
        ("175B", "tp_selective", 327155712),
        ("175B", "tp_sp_selective", 106954752),
        ("530B", "tp_sp", 513802240),
        ("530B", "tp_sp_selective", 178257920),
        ("1T", "tp", 1101004800),
        ("1T", "tp_sp", 642252800),
        ("1T", "tp_selective", 681574400),
        ("1T", "full", 104857600),
    ],
)
def test_activations_of_a_layer(shape, variant, expected):
    """Korthikanti et al., Table 2 on the shapes of Table 3."""
    assert activation_bytes(2048, **SHAPES[shape], **VARIANTS[variant]) == pytest.approx(
        expected, rel=1e-9
    )


def test_what_selective_recomputation_saves():
    """Korthikanti et al.: scores are 64 of 98 units for MT-NLG, and 70 % of what GPT-3 saves."""
    all_of = activation_bytes(2048, **SHAPES["530B"])
    rest = activation_bytes(2048, **SHAPES["530B"], recompute="selective")
    assert (all_of - rest) / (2048 * 20480) == pytest.approx(64)
    all_of = activation_bytes(2048, **SHAPES["175B"])
    assert 1 - activation_bytes(
        2048, **SHAPES["175B"], recompute="selective"
    ) / all_of == pytest.approx(0.7, abs=0.005)


def test_outputs_that_pipeline_stages_send():
    """kort.output_dealloc.530b: what is freed on the first of 35 stages, one output for each microbatch in flight."""
    assert 35 * activation_bytes(2048, 1, 20480, 128, recompute="full") / GIB == pytest.approx(
        2.73, abs=0.01
    )


def test_scaling_book():
    """sb.llama2_13b_act and sb.no_remat: three, and twenty, tensors of each layer in bfloat16."""
    layer = activation_bytes(16_000_000, 1, 5120, 40, recompute="full")
    assert 40 * layer * (1 + 2 * 2.7) / 1e12 == pytest.approx(42, rel=0.02)
    assert 64 * 20 * activation_bytes(
        4_000_000, 1, 8192, 64, recompute="full"
    ) / 1e12 == pytest.approx(84, rel=0.01)


def test_how_many_checkpoints():
    """ptdp.ckpt_opt (arXiv:2104.04473): saving √(l · A_between / A_input) inputs of 8 layers needs the least."""
    inputs, between, layers = 1.0, 2.0, 8
    assert min(range(1, 9), key=lambda c: c * inputs + layers / c * between) == math.isqrt(
        int(layers * between)
    )


# Megatron's theoretical_memory_usage.py, as run: (layers, width, heads, key/value heads, d_ff,
# sequence, vocabulary, experts, swiglu), (tensor, pipe, chunks of each stage, data for a
# distributed optimizer, microbatch, microbatches), bytes of weights and optimizer, activations.
GPT_22B = (48, 6144, 64, 64, 24576, 2048, 51200, 1, False)
GPT_175B = (96, 12288, 96, 96, 49152, 2048, 51200, 1, False)
GPT_530B = (105, 20480, 128, 128, 81920, 2048, 51200, 1, False)
LLAMA_8B = (32, 4096, 32, 8, 14336, 8192, 128256, 1, True)
LLAMA_405B = (126, 16384, 128, 8, 53248, 8192, 128256, 1, True)
MIXTRAL = (32, 4096, 32, 8, 14336, 4096, 32000, 8, True)
MEGATRON_RUNS = [
    (GPT_22B, (8, 1, 0, 0, 4, 1), 49651605504.0, 10508836864.0),
    (GPT_175B, (8, 8, 3, 0, 1, 64), None, 13294916266.666668),
    (GPT_530B, (8, 35, 3, 0, 1, 280), 36337603145.14286, 25020865877.333332),
    (GPT_175B, (8, 8, 0, 8, 1, 16), None, 10292838400.0),
    (LLAMA_8B, (1, 1, 0, 8, 1, 1), None, 38730268672.0),
    (LLAMA_405B, (8, 16, 0, 64, 1, 32), 21042394560.0, None),
    (MIXTRAL, (1, 4, 0, 16, 1, 16), 20063312640.0, 17247109120.0),
]


@pytest.mark.parametrize(("model", "layout", "weights", "activations"), MEGATRON_RUNS)
def test_megatrons_tool(model, layout, weights, activations):
    """The most loaded rank: 18, or 6 + 12 / d bytes for each parameter; selective recomputation on the first stage."""
    layers, width, heads, kv_heads, d_ff, sequence, vocab, experts, swiglu = model
    tensor, pipe, chunks, data, microbatch, microbatches = layout
    if weights is not None:
        attention = 2 * layers * width**2 * (1 + kv_heads / heads)
        # of one expert, as many as there are on a rank
        mlp = 2 * layers * width * d_ff * (1.5 if swiglu else 1)
        norms = (2 * layers + 1) * width * (1 if swiglu else 2) + (
            layers * width * experts if experts > 1 else 0
        )
        shared = (attention / pipe + width * vocab) / tensor + norms / pipe

        def states(params, replicas):
            options = {"dp": replicas, "stage": 1} if data else {}
            return model_state_bytes(params, gradients="float32", **options).total

        total = states(shared, data) + states(mlp / pipe / tensor, data / experts)
        assert total == pytest.approx(weights, rel=1e-9)
    if activations is not None:
        options = {
            "tensor": tensor,
            "sequence_parallel": True,
            "recompute": "selective",
            "mlp": d_ff / width,
        }
        total = layers * activation_bytes(sequence, microbatch, width, heads, **options)
        total += (
            8 * sequence * microbatch * pipe / tensor
            + sequence * microbatch * width * pipe / tensor
        )
        if chunks:
            total *= 1 + (pipe - 1) / (pipe * chunks)
        elif pipe > 1:
            total *= min(1, microbatches / pipe)
        else:
            total += 4 * sequence * microbatch * width * (1 + vocab / width) / tensor
        assert total == pytest.approx(activations, rel=1e-9)
