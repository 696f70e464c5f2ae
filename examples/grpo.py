"""Train a small model by rewards: answers are written and trained on in turns, on one mesh (GRPO).

    python examples/grpo.py --steps 40

The model continues a prompt eight times. The reward of an answer, a function in Python, is its share of
lower-case letters. Each step raises the probability of answers better than the others of their prompt.
Answers are written with whole parameters, which a token reads faster than shards over `fsdp`: a second plan, of
the same mesh with `zero=0`, says so, and parameters are gathered into it once a step, on the devices.
"""

import argparse

import numpy as np
import optax

import spmd
from spmd.data.tokenizer import ByteTokenizer
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.gradients.policy_loss import PolicyConfig, group_advantages, policy_loss
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

PROMPTS = ("Write: ", "Letters, please: ", "A word? ", "Go on: ")
GROUP = 8
NEW_TOKENS = 16
SEQUENCE = 64


def reward(text: str) -> float:
    """Return the share of lower-case letters of an answer."""
    letters = sum("a" <= character <= "z" for character in text)
    return letters / max(len(text), 1)


def make_batch(
    prompts: list[np.ndarray], answers: list[np.ndarray], advantages: np.ndarray
) -> dict[str, np.ndarray]:
    """Return answers behind their prompts as rows, with the weight 1 for tokens of answers."""
    shape = (len(prompts), SEQUENCE)
    tokens = np.zeros(shape, np.int32)
    targets = np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = np.concatenate([prompt, answer])
        last = len(ids) - 1
        tokens[row, :last] = ids[:-1]
        targets[row, :last] = ids[1:]
        weights[row, len(prompt) - 1 : last] = 1
    return {"tokens": tokens, "targets": targets, "weights": weights, "advantages": advantages}


def main() -> None:
    """Train, and print the mean reward."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args()
    spmd.simulate_devices(arguments.devices)

    config = DecoderConfig(vocab=256, d_model=64, layers=2, heads=4, kv_heads=2, d_ff=128)
    model = spmd.from_nnx(config.build)
    mesh = spmd.make_mesh(data=-1, fsdp=2, tensor=2)
    plan = spmd.make_plan(mesh, LLAMA, model, optax.adam(3e-3))
    step = spmd.make_train_step(plan, policy_loss(model, PolicyConfig(clip=0.2)))
    whole = spmd.make_plan(mesh, LLAMA, model, optax.identity(), zero=0)
    generator = Generator(whole, SEQUENCE, Sampling(1.0, 0, 1.0))
    state = step.init_state(seed=0)
    print(plan)

    tokenizer = ByteTokenizer()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(GROUP)]
    for number in range(1, arguments.steps + 1):
        answers = generator.write(
            state.params, state.variables, prompts, tokens=NEW_TOKENS, seed=number
        )
        texts = [tokenizer.decode(answer) for answer in answers]
        rewards = np.array([reward(text) for text in texts]).reshape(len(PROMPTS), GROUP)
        batch = make_batch(prompts, answers, group_advantages(rewards).ravel())
        state, metrics = step(state, step.place_batch(batch))
        if number in (1, arguments.steps) or number % 10 == 0:
            loss = float(metrics["loss"])
            reached = f"loss {loss:+.4f}   reward {rewards.mean():.3f}"
            print(f"step {number}   {reached}   {texts[0]!r}")


if __name__ == "__main__":
    main()
