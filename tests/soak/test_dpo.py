"""Preference training gives the losses of TRL: whole, with adapters, with a quantized base; and it resumes bitwise.

Both sides start from one folder that `transformers` wrote. TRL tokenizes each pair by itself and computes
the loss; only which pairs are in a batch is taken from here.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd import tree
from spmd.data.loader import batches
from spmd.hf.adapter import save_adapter
from spmd.hf.family import family_for
from spmd.lora.adapters import BASE, whole_magnitudes
from spmd.run.build import TrainSetup, config_mesh, make_setup
from spmd.run.init_from import initial_state
from spmd.run.load_config import load_config
from spmd.run.open_text import open_text_dataset
from spmd.run.reference import find_references, pairs_with_reference
from spmd.run.run_dir import RunDir
from tests.chats import CHATML
from tests.command_line import run
from tests.hf_llama import write_llama

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore"),  # of transformers, peft and TRL
]

STEPS, TOLERANCE = 10, 1e-4
LEARNING_RATE, DECAY, CLIP, BETAS, EPS = 3e-3, 0.1, 1.0, (0.9, 0.95), 1e-8
LORA = ("--lora.targets", "attention/(q|v)_proj/kernel", "mlp/down_proj/kernel", "--lora.rank", 4)
CONFIG = """
import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=DecoderConfig(vocab=320, d_model=128, layers=2, heads=4, kv_heads=2, d_ff=256),
    rules=LLAMA,
    mesh=spmd.MeshShape(data=2, fsdp=2, tensor=2),
    data=spmd.DataConfig(
        source=({folder!r} + "/pairs.jsonl",), tokenizer={folder!r} + "/hf/tokenizer.json", sequence=128, batch=8,
        validation=0.2, cache={folder!r} + "/cache",
    ),
    task="dpo",
    init={folder!r} + "/hf",
    optimizer=spmd.OptimizerConfig(learning_rate=3e-3, schedule="constant"),
    evaluate=spmd.EvaluationConfig(tokens=512),
    steps=10,
    devices=8,
    log_every=1,
    checkpoint_every=4,
)
"""


@pytest.fixture(scope="module")
def transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, pairs, and a random model with a tokenizer and a template, as `transformers` writes it."""
    folder = tmp_path_factory.mktemp("dpo")
    write_llama(
        folder / "hf",
        CHATML,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        initializer_range=0.08,
    )
    rng = np.random.default_rng(0)
    lines = []
    for n in range(160):
        a, b = rng.integers(10, size=2)
        prompt = [{"role": "user", "content": f"What is {a} + {b}?"}]
        if n % 3 == 0:
            prompt = [{"role": "system", "content": "Be brief."}, *prompt]
        answers = [f"{a + b}{'!' * int(rng.integers(6))}", f"I think {a * b}."]
        chosen, rejected = [[{"role": "assistant", "content": each}] for each in answers]
        line = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "id": n}
        lines.append(json.dumps(line))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "tiny.py").write_text(CONFIG.format(folder=str(folder)))
    return folder


def trained(folder: Path, name: str, *flags: object) -> list[float]:
    """The losses of our steps."""
    assert run("train", folder / "tiny.py", "--out", folder / name, *flags) == 0
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def setup_of(run_folder: Path) -> TrainSetup:
    config = RunDir(run_folder).config()
    return make_setup(config, config_mesh(config))


Pair = tuple[tuple[int, ...], tuple[int, ...], int]
"""Tokens of both answers with their prompt, and the length of the prompt."""


def pairs_of(run_folder: Path) -> list[list[Pair]]:
    """The pairs of each batch of training."""
    setup = setup_of(run_folder)
    data, found = setup.config.data, []
    text = open_text_dataset(setup.config)
    find_references(setup, pairs_with_reference(text.parts), RunDir(run_folder).fetch_reference())
    options = {
        "batch": data.batch,
        "sharding": setup.plan.batch_sharding("tokens"),
        "seed": setup.config.seed,
    }
    with batches(text.sets[0].train, start=0, steps=STEPS, **options) as stream:
        for batch in stream:
            arrays = {name: np.asarray(x) for name, x in batch.items()}
            found.append([])
            for row, numbers in enumerate(arrays["pairs"]):
                for number in range(1, int(numbers.max()) + 1):
                    sides, prompt = [], 0
                    for sign in (1, -1):
                        own = numbers == sign * number
                        last = arrays["targets"][row][own][-1]
                        sides.append((*map(int, arrays["tokens"][row][own]), int(last)))
                        prompt = int(np.argmax(arrays["weights"][row][own])) + 1
                    found[-1].append((*sides, prompt))
    return found


def inputs_of(pairs: list[Pair]) -> dict[str, Any]:
    """A batch as TRL collates it: preferred answers first, padded at the end."""
    import torch

    rows = [pair[side] for side in (0, 1) for pair in pairs]
    prompts = [pair[2] for _ in (0, 1) for pair in pairs]
    longest = max(map(len, rows))
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    attended, completion = torch.zeros_like(ids), torch.zeros_like(ids)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[number, : len(row)] = torch.tensor(row)
        attended[number, : len(row)] = 1
        completion[number, prompt : len(row)] = 1
    return {"input_ids": ids, "attention_mask": attended, "completion_mask": completion}


def train_there(model: Any, chosen: list[list[Pair]], loss_of: Callable[[Any], Any]) -> list[float]:
    """Losses of AdamW in PyTorch."""
    import torch

    named = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    groups = []
    for is_norm in (False, True):
        params = [x for name, x in named if ("norm" in name) == is_norm]
        if params:
            groups.append({"params": params, "weight_decay": 0.0 if is_norm else DECAY})
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS)
    found = []
    for pairs in chosen:
        optimizer.zero_grad()
        loss = loss_of(inputs_of(pairs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([x for _, x in named], CLIP)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def trainer_of(folder: Path, model: Any, **settings: Any) -> Any:
    """TRL's trainer, which tokenizes the pairs by itself."""
    import datasets
    import transformers
    import trl

    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    args = trl.DPOConfig(
        output_dir=str(folder / "trl"), report_to="none", use_cpu=True, bf16=False, **settings
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    dataset = datasets.Dataset.from_list(rows)
    return trl.DPOTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer)


def losses_of_trl(
    folder: Path, model: Any, chosen: list[list[Pair]], **settings: Any
) -> list[float]:
    """The losses of TRL's trainer on these batches; it rounds adapters of 4-bit models to bfloat16, which is undone."""
    whole = {name: x.data.clone() for name, x in model.named_parameters() if x.requires_grad}
    trainer = trainer_of(folder, model, **settings)
    for name, x in trainer.model.named_parameters():
        if name in whole:
            x.data = whole[name]
    trainer.model.train()  # in evaluation, bitsandbytes computes in bfloat16; there is no dropout
    return train_there(
        trainer.model, chosen, lambda inputs: trainer.compute_loss(trainer.model, inputs)
    )


def load(transformers: Any, folder: Path) -> Any:
    import torch

    return transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)


def worst(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) == STEPS
    assert theirs[-1] < theirs[0]
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("loss", "mesh"),
    [
        ("dpo", ("--mesh.data", 2, "--mesh.fsdp", 2, "--mesh.tensor", 2)),
        ("dpo", ("--mesh.data", 1, "--mesh.fsdp", 8, "--mesh.tensor", 1)),
        ("ipo", ("--mesh.data", 8, "--mesh.fsdp", 1, "--mesh.tensor", 1)),
    ],
)
def test_whole_training_has_the_losses_of_trl(
    folder: Path, transformers: Any, loss: str, mesh: tuple[object, ...]
) -> None:
    """Ten steps, packed, against padded ones; the control has another beta."""
    name = f"{loss}-{mesh[1]}"
    ours = trained(folder, name, *mesh, "--dpo.loss", loss)
    chosen = pairs_of(folder / name)
    kind = {"dpo": "sigmoid", "ipo": "ipo"}[loss]

    def theirs(beta: float) -> list[float]:
        model = load(transformers, folder)
        return losses_of_trl(folder, model, chosen, beta=beta, loss_type=kind)

    assert worst(ours, theirs(0.1)) < TOLERANCE
    assert worst(ours, theirs(0.2)) > 10 * TOLERANCE


def test_tokens_and_masks_are_those_of_trl(folder: Path, transformers: Any) -> None:
    """Every pair of training is one that TRL makes of the same file by itself."""
    trained(folder, "masks", "--steps", 1)
    trainer = trainer_of(folder, load(transformers, folder))
    made = set()
    for row in trainer.train_dataset:
        prompt = row["prompt_ids"]
        sides = [(*prompt, *row[f"{side}_ids"]) for side in ("chosen", "rejected")]
        made.add((*sides, len(prompt)))
    ours = set(itertools.chain(*pairs_of(folder / "masks")))
    assert len(ours) > 50
    assert ours <= made


def test_simpo_has_the_losses_of_trl(folder: Path, transformers: Any) -> None:
    """By the functions of its CPO trainer: no reference model, means over tokens, and a margin."""
    import torch
    from trl.experimental.cpo import CPOTrainer

    flags = ("--dpo.loss", "simpo", "--dpo.beta", 1.5, "--dpo.margin", 0.6)
    ours = trained(folder, "simpo", *flags, "--dpo.label-smoothing", 0.1)
    assert not (folder / "simpo" / "reference").exists()
    chosen = pairs_of(folder / "simpo")

    def theirs(gamma: float) -> list[float]:
        model = load(transformers, folder)
        of_trainer = types.SimpleNamespace(
            alpha=0.0,
            loss_type="simpo",
            beta=1.5,
            simpo_gamma=gamma,
            label_smoothing=0.1,
            accelerator=types.SimpleNamespace(device="cpu"),
        )

        def loss_of(inputs: dict[str, Any]) -> Any:
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            labels = torch.where(inputs["completion_mask"] == 1, inputs["input_ids"], -100)
            found = CPOTrainer.get_batch_logps(logits, labels, average_log_prob=True)
            losses, _, _ = CPOTrainer.cpo_loss(of_trainer, *found.chunk(2))
            return losses.mean()

        return train_there(model, chosen, loss_of)

    assert worst(ours, theirs(0.6)) < TOLERANCE
    assert worst(ours, theirs(0.3)) > 10 * TOLERANCE


@pytest.mark.parametrize("quantize", ["", "nf4"], ids=["LoRA", "QLoRA"])
def test_adapters_have_the_losses_of_trl_and_load_in_peft(
    folder: Path, transformers: Any, quantize: str
) -> None:
    """The reference model is the base without adapters; adapters at the end give the same logits in `peft`."""
    import peft
    import torch

    name = f"adapters-{quantize}"
    flags = [*LORA]
    if quantize:
        flags += ["--lora.quantize", quantize]
    ours = trained(folder, name, *flags)
    chosen = pairs_of(folder / name)
    setup = setup_of(folder / name)
    state = initial_state(setup)
    config = setup.config
    plain = load_config(str(folder / "tiny.py"))
    base = initial_state(make_setup(plain, config_mesh(plain))).params
    shapes = {path: x.shape for path, x in tree.flatten(base).items()}
    whole = whole_magnitudes(state.params, base)
    family = family_for(config.model)
    start = folder / f"{name}-start"
    save_adapter(start, whole, config.lora, family, config.model, shapes=shapes)
    assert BASE in state.variables

    def there(adapter: Path) -> Any:
        options: dict[str, Any] = {"dtype": torch.float32}
        if quantize:
            options["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            )
            options["device_map"] = "cpu"
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", **options)
        return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)

    model = there(start)
    assert worst(ours, losses_of_trl(folder, model, chosen, beta=0.1)) < TOLERANCE
    assert run("export", folder / name, "--adapter", "--out", folder / f"{name}-end") == 0
    tokens = torch.tensor([chosen[0][0][0]])
    with torch.no_grad():
        after = model.train()(tokens).logits
        exported = there(folder / f"{name}-end").train()(tokens).logits
        before = there(start).train()(tokens).logits
    # Adam makes whole steps of what rounds differently: 0.007 here with a quantized base.
    assert float((exported - after).abs().max()) < (0.02 if quantize else 1e-3)
    assert float((exported - before).abs().max()) > 0.1


def test_a_killed_run_ends_as_if_it_were_not(folder: Path) -> None:
    """SIGKILL after a checkpoint, and again: the same losses to the bit, by the file of the reference model."""
    undisturbed = trained(folder, "undisturbed")
    out = folder / "killed"
    command = [sys.executable, "-m", "spmd.cli", "train", str(folder / "tiny.py")]
    command += ["--out", str(out), "--resume", "auto"]
    process = subprocess.Popen(command, env=os.environ)
    until = time.monotonic() + 300
    while not (out / "checkpoints" / "4").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = (out / "reference").stat().st_mtime_ns
    assert subprocess.run(command, env=os.environ, timeout=300).returncode == 0
    assert (out / "reference").stat().st_mtime_ns == written
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines if "loss" in line] == undisturbed
    (file,) = (out / "reference").glob("*-train.npz")
    file.unlink()
    ended = subprocess.run(
        [*command, "--steps", "12"], env=os.environ, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "has the log-probabilities of the reference model" in ended.stderr
    assert "Traceback" not in ended.stderr
