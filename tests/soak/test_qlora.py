"""QLoRA beside the libraries that people use for it: `bitsandbytes`' weights, `peft`'s adapters, a loop of PyTorch."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import tree
from spmd.gradients.losses import next_token_loss
from spmd.hf.adapter import save_adapter
from spmd.hf.family import family_for
from spmd.hf.load import load_params
from spmd.lora.adapters import (
    BASE,
    LORA_A,
    LORA_B,
    LORA_M,
    lora_rules,
    whole_magnitudes,
    with_lora,
)
from spmd.lora.config import LoRAConfig
from spmd.lora.quantized_base import decode_base
from spmd.lora.weight_formats import FORMATS
from spmd.model_interface.wrapped_param import abstract_params
from spmd.partition_rules.llama import LLAMA
from spmd.plan.nnx_model import from_nnx
from tests import tiny

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, for peft
]

CONFIG = dataclasses.replace(tiny.CONFIG, d_model=128, d_ff=256)
LORA = LoRAConfig(
    targets=("attention/(q|v)_proj/kernel", "mlp/down_proj/kernel"), rank=4, quantize="nf4"
)
STEPS = 10
RATE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of `transformers` with the sizes of `CONFIG`."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab,
        hidden_size=CONFIG.d_model,
        intermediate_size=CONFIG.d_ff,
        num_hidden_layers=CONFIG.layers,
        num_attention_heads=CONFIG.heads,
        num_key_value_heads=CONFIG.kv_heads,
        rms_norm_eps=CONFIG.norm_eps,
        rope_theta=CONFIG.rope_theta,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    out = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(out)
    return out


def write_adapters(out: Path, lora: LoRAConfig, adapters: Any, base: Any) -> None:
    """Write adapters for `peft`."""
    shapes = {path: x.shape for path, x in tree.flatten(base).items()}
    whole = whole_magnitudes(adapters, base)
    family = family_for(CONFIG)
    save_adapter(out, whole, lora, family, CONFIG, shapes=shapes, base=str(out.parent))


def plain_base(folder: Path, lora: LoRAConfig) -> Any:
    """The frozen parameters that our model computes with."""
    stored = load_params(folder, plan_of(lora).abstract_variables[BASE])
    return decode_base(stored, abstract_params(plan_of(lora).abstract_variables[BASE]))


def adapted(lora: LoRAConfig = LORA) -> Any:
    return with_lora(from_nnx(CONFIG.build), lora, LLAMA)


def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, CONFIG.vocab, (4, 17)) for _ in range(STEPS)]


def plan_of(lora: LoRAConfig, **sizes: int) -> Any:
    rules = lora_rules(from_nnx(CONFIG.build), lora, LLAMA)
    return spmd.make_plan(tiny.mesh(**sizes), rules, adapted(lora), optax.adam(RATE))


def ours(folder: Path, lora: LoRAConfig = LORA, **sizes: int) -> tuple[list[float], dict[str, Any]]:
    """Losses of our steps from these adapters, and the adapters after them."""
    plan = plan_of(lora, **sizes)
    model = plan.model
    base = load_params(folder, plan.abstract_variables[BASE])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.abstract_params)
    params = jax.device_put(model.init(jax.random.key(1)), shardings)
    state = spmd.init_state(plan, 0, params=params, variables={BASE: base})
    step = spmd.make_train_step(plan, next_token_loss(model))
    losses = []
    for tokens in batches():
        batch = {
            "tokens": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "weights": np.ones((4, 16), np.float32),
        }
        state, metrics = step(state, spmd.place_batch(plan, batch))
        losses.append(float(metrics["loss"]))
    return losses, tree.flatten(jax.device_get(state.params))


def theirs(folder: Path, lora: LoRAConfig, adapters: Path) -> tuple[list[float], dict[str, Any]]:
    """Losses of a loop with `peft` and `bitsandbytes`, and its adapters by our paths."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    quantized = None
    if lora.quantize:
        quantized = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantized, dtype=torch.float32, device_map="cpu"
    )
    model = peft.PeftModel.from_pretrained(base, adapters, is_trainable=True)
    model.train()  # else bitsandbytes multiplies in bfloat16, on CPUs that have it
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=RATE)
    losses = []
    for tokens in batches():
        logits = model(torch.tensor(tokens[:, :-1])).logits
        targets = torch.tensor(tokens[:, 1:]).reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, CONFIG.vocab), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found: dict[str, list[Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        module = name.split(".layers.")[1].split(".", 1)[1].split(".lora_")[0]
        half = {"A": LORA_A, "B": LORA_B, "m": LORA_M}[name.split(".lora_")[1][0]]
        part = module.replace("self_attn", "attention").replace(".", "/")
        found.setdefault(f"layers/{part}/kernel{half}", []).append(param.detach().numpy().T)
    return losses, {path: np.stack(arrays) for path, arrays in found.items()}


OPTIONS = {
    "qlora": LORA,
    "options": dataclasses.replace(
        LORA, quantize="", ranks="mlp/.*=8", rank_stabilized=True, dora=True
    ),
    "qdora": dataclasses.replace(LORA, dora=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_peft_and_bitsandbytes(folder: Path, name: str, tmp_path: Path) -> None:
    """Losses of ten steps and the adapters after them, on one device and on a mesh."""
    lora = OPTIONS[name]
    start = adapted(lora).init(jax.random.key(1))
    base = plain_base(folder, lora)
    write_adapters(tmp_path / "adapters", lora, start, base)
    expected, adapters = theirs(folder, lora, tmp_path / "adapters")
    for sizes in ({}, {"fsdp": 2, "tensor": 2}):
        losses, params = ours(folder, lora, **sizes)
        np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=0)
        found = tree.flatten(whole_magnitudes(tree.nested(params), base))
        assert found.keys() == adapters.keys()
        for path, array in adapters.items():
            np.testing.assert_allclose(found[path], array, atol=2e-4, err_msg=path)
    other = dataclasses.replace(lora, alpha=4.0)
    assert np.abs(np.subtract(ours(folder, other)[0], expected)).max() > 1e-3  # the control


def test_codes_are_those_of_bitsandbytes() -> None:
    """All codes of weights are equal, and those of scales but for a few between two codes."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    functional = pytest.importorskip("bitsandbytes.functional")
    rng = np.random.default_rng(0)
    for inputs, outputs in ((256, 96), (4096, 64), (192, 50)):
        weight = rng.normal(size=(outputs, inputs)).astype(np.float32)
        packed, state = functional.quantize_4bit(
            torch.tensor(weight), quant_type="nf4", blocksize=64, compress_statistics=True
        )
        parts = FORMATS["nf4"].encode(jnp.asarray(weight.T))
        pairs = packed.numpy().reshape(outputs, inputs // 2)
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(outputs, inputs)
        blocks = np.asarray(parts.codes).reshape(inputs // 64, 32, outputs)
        own = np.concatenate([blocks & 15, blocks >> 4], axis=1).reshape(inputs, outputs).T
        np.testing.assert_array_equal(own, codes)
        scales = state.absmax.numpy().reshape(outputs, -1).T
        assert np.mean(np.asarray(parts.scale) != scales) < 0.01
        decoded = functional.dequantize_4bit(packed, state).numpy().T
        found = np.asarray(FORMATS["nf4"].decode(parts, jnp.float32))
        assert np.mean(np.abs(found - decoded) > 1e-5) < 0.01
        assert np.abs(found - decoded).max() < 0.02 * np.abs(weight).max()
