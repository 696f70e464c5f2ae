"""Tokens per second of a greedy text beside `transformers`, and beside the bare matmuls of a token, in one JSON line.

    python -m benchmarks.generate_beside
    python -m benchmarks.generate_beside --batch 8 --prompt 512
    python -m benchmarks.generate_beside --layers 4 --dtype bfloat16

The model has TinyLlama's shape and random weights, which `transformers` writes and both read. Ours,
theirs, and a jitted function of nothing but a token's products with each weight matrix take turns,
so that other work on the machine slows all alike; ratios are medians of each round's. Compilation,
reading weights and bringing them into generation's form are not in it. It needs the extra `parity`,
and for the whole model 14 GiB of memory.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers

from spmd.generate.generator import Generator, LoadedModel
from spmd.generate.sampling import Sampling
from spmd.hf.load import load_params
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import make_mesh, simulate_devices

VOCAB = 32_000
_PRECISIONS = {"float32": "float32", "bfloat16": "bf16"}


def write_theirs(folder: Path, layers: int, dtype: str) -> Any:
    """Write a random Llama of TinyLlama's shape, and return it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        initializer_range=0.05,  # logits far enough apart for one greedy text
    )
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    return model


def load_ours(folder: Path, args: argparse.Namespace) -> LoadedModel:
    """Load the model that `transformers` wrote for generation."""
    config = dataclasses.replace(PRESETS["tinyllama-1b"], layers=args.layers)
    model = from_nnx(config.build)
    precision = _PRECISIONS[args.dtype]
    plan = make_plan(make_mesh(data=1), LLAMA, model, optax.identity(), precision=precision)
    params = load_params(str(folder), plan.abstract_params)
    window = args.prompt + args.tokens
    greedy = Sampling(0.0, 0, 1.0)
    return Generator(plan, window, greedy, cache_in_int8=args.cache_in_int8).load(params, {})


def matmuls(model: LoadedModel, batch: int) -> Callable[[], float]:
    """Return a function of the seconds of one product with each weight matrix of the model."""
    matrices = []
    for array in jax.tree.leaves(model.arrays):
        if array.ndim == 2:
            matrices.append(array)
    matrices.pop(0)  # the embedding: a token reads one row
    inputs = [jnp.ones((batch, matrix.shape[0]), matrix.dtype) for matrix in matrices]

    @jax.jit
    def multiply(inputs: list[Any], matrices: list[Any]) -> list[Any]:
        return [x @ matrix for x, matrix in zip(inputs, matrices, strict=True)]

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready(multiply(inputs, matrices))
        return time.perf_counter() - began

    run()
    return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of each, and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_theirs(Path(folder), args.layers, args.dtype)
        ours = load_ours(Path(folder), args)
    prompts = np.random.default_rng(0).integers(3, VOCAB, (args.batch, args.prompt))
    ids = torch.tensor(prompts)

    def write_ours(tokens: int) -> np.ndarray:
        return np.stack(ours.write(list(prompts), tokens=tokens))

    def continue_theirs(tokens: int) -> np.ndarray:
        found = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return found[:, args.prompt :].numpy()

    multiply = matmuls(ours, args.batch)
    ways = {"ours": write_ours, "transformers": continue_theirs}
    texts = {}
    for name, write in ways.items():
        write(1)  # its cache has another size, and a program of its own
        texts[name] = write(args.tokens)
    rounds = []
    for _ in range(args.rounds):
        rates = {name: _decode_rate(write, args) for name, write in ways.items()}
        seconds = statistics.median(multiply() for _ in range(5))
        rates["matmuls"] = args.batch / seconds
        rounds.append(rates)
    names = list(rounds[0])
    rates = {name: statistics.median(each[name] for each in rounds) for name in names}
    ratios = {}
    for name in names[1:]:
        ratios[name] = statistics.median(each["ours"] / each[name] for each in rounds)
    return {
        "model": "tinyllama-1b",
        **vars(args),
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
        "tokens_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "ours_over": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "same_tokens": round(float(np.mean(texts["ours"] == texts["transformers"])), 3),
    }


def _decode_rate(write: Callable[[int], np.ndarray], args: argparse.Namespace) -> float:
    """Return tokens per second after the first, which takes the prompt."""
    began = time.perf_counter()
    write(1)
    first = time.perf_counter() - began
    began = time.perf_counter()
    write(args.tokens)
    seconds = time.perf_counter() - began - first
    return args.batch * (args.tokens - 1) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1, help="prompts")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=64, help="added to each")
    parser.add_argument("--layers", type=int, default=22, help="of TinyLlama's 22")
    parser.add_argument("--dtype", choices=_PRECISIONS, default="float32")
    parser.add_argument("--cache-in-int8", action="store_true", help="of ours")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    simulate_devices(1)
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
