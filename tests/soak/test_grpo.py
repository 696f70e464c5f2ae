"""The loss of answers with rewards, and its gradients, are those of TRL on the same completions."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import spmd
from spmd.gradients.policy_loss import PolicyConfig, policy_loss
from spmd.hf.load import load_params
from spmd.partition_rules.llama import LLAMA
from tests import tiny
from tests.hf_llama import VOCAB, write_llama

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore"),  # of transformers and TRL
]

CONFIG = dataclasses.replace(tiny.CONFIG, vocab=VOCAB, layers=2)
STEPS, RATE, PROMPT, NEW = 10, 1e-2, 6, 10
FORMS = {
    "grpo": (
        PolicyConfig(0.2, 0.3, kl=0.05, temperature=0.7),
        {"loss_type": "grpo", "beta": 0.05, "temperature": 0.7},
    ),
    "bnpo": (PolicyConfig(0.2, 0.3, mean="tokens"), {"loss_type": "bnpo", "beta": 0.0}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of `transformers` with the sizes of `CONFIG`."""
    return write_llama(
        tmp_path_factory.mktemp("grpo"),
        hidden_size=CONFIG.d_model,
        intermediate_size=CONFIG.d_ff,
        num_attention_heads=CONFIG.heads,
        num_key_value_heads=CONFIG.kv_heads,
        rms_norm_eps=CONFIG.norm_eps,
        rope_theta=CONFIG.rope_theta,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )


def completions(seed: int) -> dict[str, np.ndarray]:
    """Prompts, answers of different lengths, advantages, and earlier log-probabilities."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, NEW + 1, 8)
    return {
        "prompts": rng.integers(2, CONFIG.vocab, (8, PROMPT)),
        "answers": rng.integers(2, CONFIG.vocab, (8, NEW)),
        "mask": (np.arange(NEW) < lengths[:, None]).astype(np.int64),
        "advantages": rng.normal(size=8).astype(np.float32),
        "old": -(5 + rng.random((8, NEW))).astype(np.float32),
        "reference": -(5 + rng.random((8, NEW))).astype(np.float32),
    }


def as_rows(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same as rows of our batch."""
    ids = np.concatenate([found["prompts"], found["answers"]], axis=1).astype(np.int32)

    def behind_prompt(values: np.ndarray) -> np.ndarray:
        return np.pad(values.astype(np.float32), ((0, 0), (PROMPT - 1, 1)))

    return {
        "tokens": ids,
        "targets": np.pad(ids[:, 1:], ((0, 0), (0, 1))),
        "weights": behind_prompt(found["mask"]),
        "advantages": found["advantages"],
        "old_log_probs": behind_prompt(found["old"]),
        "reference": behind_prompt(found["reference"]),
    }


def ours(folder: Path, config: PolicyConfig, **sizes: int) -> list[float]:
    plan = spmd.make_plan(tiny.mesh(**sizes), LLAMA, tiny.model(CONFIG), optax.adam(RATE))
    params = load_params(folder, plan.abstract_params)
    state = spmd.init_state(plan, 0, params=params)
    step = spmd.make_train_step(plan, policy_loss(tiny.model(CONFIG), config))
    losses = []
    for number in range(STEPS):
        batch = jax.tree.map(np.asarray, as_rows(completions(number)))
        if not config.kl:
            del batch["reference"]
        state, metrics = step(state, step.place_batch(batch))
        losses.append(float(metrics["loss"]))
    return losses


def theirs(folder: Path, settings: dict[str, Any]) -> list[float]:
    """The loss of TRL's trainer, and Adam of PyTorch."""
    import datasets
    import torch
    import transformers
    import trl

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    args = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        epsilon=0.2,
        epsilon_high=0.3,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        **settings,
    )
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=1e-8)
    losses = []
    for number in range(STEPS):
        found = {name: torch.tensor(x) for name, x in completions(number).items()}
        inputs = {
            "prompt_ids": found["prompts"],
            "prompt_mask": torch.ones_like(found["prompts"]),
            "completion_ids": found["answers"],
            "completion_mask": found["mask"],
            "advantages": found["advantages"],
            "old_per_token_logps": found["old"],
            "ref_per_token_logps": found["reference"],
        }
        optimizer.zero_grad()
        loss = trainer.compute_loss(model.train(), inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_trl(folder: Path, form: str) -> None:
    """Ten steps on one device and on a mesh; the control clips elsewhere."""
    config, settings = FORMS[form]
    expected = theirs(folder, settings)
    assert max(expected) - min(expected) > 0.05
    for sizes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        np.testing.assert_allclose(ours(folder, config, **sizes), expected, atol=1e-4, rtol=0)
    other = ours(folder, dataclasses.replace(config, clip=0.5))
    assert np.abs(np.subtract(other, expected)).max() > 1e-3
