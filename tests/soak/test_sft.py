"""Fine-tuning on conversations gives the losses of `transformers` and `peft`, and adapters load there.

Both sides start from one folder that `transformers` wrote. Their side renders, tokenizes and masks
each conversation by itself, and runs it alone, without packing; only which conversations are in a
batch is taken from here.
"""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spmd import tree
from spmd.data.loader import batches
from spmd.hf.adapter import save_adapter
from spmd.hf.family import family_for
from spmd.lora.adapters import BASE
from spmd.lora.config import LoRAConfig
from spmd.run.build import TrainSetup, config_mesh, make_setup
from spmd.run.init_from import initial_state
from spmd.run.load_config import load_config
from spmd.run.open_text import open_text_dataset
from spmd.training.state import TrainState
from tests.chats import MARKED
from tests.command_line import run
from tests.hf_llama import write_llama

pytestmark = pytest.mark.soak

STEPS, TOLERANCE = 10, 1e-4
LEARNING_RATE, DECAY, CLIP, BETAS, EPS = 3e-3, 0.1, 1.0, (0.9, 0.95), 1e-8
TARGETS = ("attention/(q|v)_proj/kernel", "mlp/down_proj/kernel")
LORA = ("--lora.targets", *TARGETS, "--lora.rank", 4, "--lora.alpha", 8)
CONFIG = """
import spmd
from spmd.models.decoder import DecoderConfig
from spmd.partition_rules.llama import LLAMA

config = spmd.TrainConfig(
    model=DecoderConfig(vocab=320, d_model=64, layers=2, heads=4, kv_heads=2, d_ff=96),
    rules=LLAMA,
    mesh=spmd.MeshShape(data=2, fsdp=2, tensor=2),
    data=spmd.DataConfig(
        source=({folder!r} + "/chats.jsonl",), tokenizer={folder!r} + "/hf/tokenizer.json", sequence=96, batch=8,
        validation=0.2, cache={folder!r} + "/cache",
    ),
    task="sft",
    init={folder!r} + "/hf",
    optimizer=spmd.OptimizerConfig(learning_rate=3e-3, schedule="constant"),
    evaluate=spmd.EvaluationConfig(tokens=512),
    steps=10,
    devices=8,
    log_every=1,
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
    """A config, conversations, and a random model with a tokenizer and a template, as `transformers` writes it."""
    folder = tmp_path_factory.mktemp("sft")
    write_llama(
        folder / "hf",
        MARKED,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        initializer_range=0.08,
    )
    rng = np.random.default_rng(0)
    lines = []
    for n in range(120):
        turns = [{"role": "system", "content": "Be brief."}] * int(rng.integers(2))
        for _ in range(int(rng.integers(1, 3))):
            a, b = rng.integers(10, size=2)
            turns += [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"{a + b}."},
            ]
        lines.append(json.dumps({"messages": turns, "id": n}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "tiny.py").write_text(CONFIG.format(folder=str(folder)))
    return folder


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def setup_of(folder: Path, **fields: Any) -> TrainSetup:
    config = load_config(str(folder / "tiny.py"))
    config = type(config)(**{**vars(config), **fields})
    return make_setup(config, config_mesh(config))


def conversations(folder: Path, setup: TrainSetup) -> list[list[tuple[int, ...]]]:
    """The tokens of each conversation in each batch of training."""
    data, found = setup.config.data, []
    (text,) = open_text_dataset(setup.config).sets
    rows = text.train
    options = {
        "batch": data.batch,
        "sharding": setup.plan.batch_sharding("tokens"),
        "seed": setup.config.seed,
    }
    with batches(rows, start=0, steps=STEPS, **options) as stream:
        for batch in stream:
            arrays = {name: np.asarray(x) for name, x in batch.items()}
            found.append([])
            for row in range(data.batch):
                starts = [*np.unique(arrays["segments"][row]).tolist(), data.sequence]
                for begin, end in itertools.pairwise(starts):
                    if arrays["weights"][row, begin:end].any():
                        ids = [*arrays["tokens"][row, begin:end], arrays["targets"][row, end - 1]]
                        found[-1].append(tuple(map(int, ids)))
    return found


def labels_of(
    transformers: Any, folder: Path, masked: bool = True
) -> dict[tuple[int, ...], list[int]]:
    """Tokens of a conversation → what `transformers` says is the assistant's, or -100."""
    tokenizer, labels = transformers.AutoTokenizer.from_pretrained(folder / "hf"), {}
    for line in (folder / "chats.jsonl").read_text().splitlines():
        found = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = found["input_ids"], found["assistant_masks"]
        labels[tuple(ids)] = [
            x if is_said or not masked else -100 for x, is_said in zip(ids, mask, strict=True)
        ]
    return labels


def next_token_there(ids: tuple[int, ...], logits: Any, targets: Any) -> Any:
    """Sum of the cross-entropies of a conversation."""
    import torch

    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def train_there(
    model: Any, chosen: list, labels: dict, loss_of: Callable[..., Any] = next_token_there
) -> list[float]:
    """Losses of AdamW in PyTorch: each conversation by itself, the sum over a batch divided by its trained tokens."""
    import torch

    named = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    groups = [
        {
            "params": [x for name, x in named if ("norm" in name) == is_norm],
            "weight_decay": 0.0 if is_norm else DECAY,
        }
        for is_norm in (False, True)
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS)
    found = []
    for batch in chosen:
        weight = sum(label != -100 for ids in batch for label in labels[ids][1:])
        total = 0.0
        optimizer.zero_grad()
        for ids in batch:
            logits = model(torch.tensor([ids])).logits[0, :-1]
            loss = loss_of(ids, logits, torch.tensor(labels[ids][1:])) / weight
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_([x for _, x in named], CLIP)
        optimizer.step()
        found.append(total)
    return found


def worst(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) == STEPS
    assert theirs[-1] < theirs[0] - 0.5
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def test_whole_fine_tuning_has_the_losses_of_transformers(folder: Path, transformers: Any) -> None:
    """Ten steps on eight devices, packed, against one conversation at a time; the control trains prompts as well."""
    assert run("train", folder / "tiny.py", "--out", folder / "whole") == 0
    ours, chosen = losses(folder / "whole"), conversations(folder, setup_of(folder))

    def theirs(masked: bool) -> list[float]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
        return train_there(model, chosen, labels_of(transformers, folder, masked))

    assert worst(ours, theirs(masked=True)) < TOLERANCE
    assert worst(ours, theirs(masked=False)) > 100 * TOLERANCE


@pytest.mark.filterwarnings("ignore::UserWarning")  # of TRL, for what it calls experimental
def test_a_student_has_the_losses_of_trl(folder: Path, transformers: Any) -> None:
    """Ten steps beside a larger teacher, whole and with adapters that begin at nothing; the control is its temperature.

    TRL's divergence is not scaled by the squared temperature.
    """
    import torch
    from trl.experimental.gkd import GKDTrainer

    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 4}
    write_llama(folder / "teacher", MARKED, **sizes, num_key_value_heads=4, initializer_range=0.1)
    given = ["--teacher", folder / "teacher", "--distillation.weight", 0.75]
    given += ["--distillation.temperature", 2]
    assert run("train", folder / "tiny.py", "--out", folder / "student", *given) == 0
    chosen, labels = conversations(folder, setup_of(folder)), labels_of(transformers, folder)
    frozen = transformers.AutoModelForCausalLM.from_pretrained(folder / "teacher")

    def theirs(temperature: float) -> list[float]:
        def mixed(ids: tuple[int, ...], logits: Any, targets: Any) -> Any:
            with torch.no_grad():
                taught = frozen(torch.tensor([ids])).logits[0, :-1]
            divergence = GKDTrainer.generalized_jsd_loss(
                logits, taught, targets, beta=0, temperature=temperature, reduction="sum"
            )
            entropy = next_token_there(ids, logits, targets)
            return 0.25 * entropy + 0.75 * temperature**2 * divergence

        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
        return train_there(model, chosen, labels, mixed)

    assert worst(losses(folder / "student"), theirs(temperature=2)) < TOLERANCE
    assert worst(losses(folder / "student"), theirs(temperature=1)) > 100 * TOLERANCE
    assert run("train", folder / "tiny.py", "--out", folder / "taught", *given, *LORA) == 0
    adapted = losses(folder / "taught")
    assert adapted[0] == pytest.approx(losses(folder / "student")[0], abs=TOLERANCE)
    assert adapted[-1] < adapted[0]


def adapter_at_start(folder: Path, out: Path, setup: TrainSetup) -> None:
    """Write the adapters with which a run begins as `peft` reads them."""
    state: TrainState = initial_state(setup)
    config, shapes = (
        setup.config,
        {path: x.shape for path, x in tree.flatten(state.variables[BASE]).items()},
    )
    save_adapter(
        out, state.params, config.lora, family_for(config.model), config.model, shapes=shapes
    )


# of `transformers`, for a name that `peft` uses
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_have_the_losses_of_peft_and_load_there(folder: Path, transformers: Any) -> None:
    """Ten steps from the same adapters; those at the end give the same logits in `peft`, alone and merged.

    The control has adapters of another scale.
    """
    import peft
    import torch

    lora = LoRAConfig(targets=TARGETS, rank=4, alpha=8)
    assert run("train", folder / "tiny.py", "--out", folder / "lora", *LORA) == 0
    setup = setup_of(folder, lora=lora)
    adapter_at_start(folder, folder / "start", setup)
    ours, chosen, labels = (
        losses(folder / "lora"),
        conversations(folder, setup),
        labels_of(transformers, folder),
    )

    def load(adapter: Path, trainable: bool, alpha: float = 8) -> Any:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
        config = peft.PeftConfig.from_pretrained(adapter)
        config.lora_alpha, config.inference_mode = alpha, not trainable
        return peft.PeftModel.from_pretrained(base, adapter, is_trainable=trainable, config=config)

    trained = load(folder / "start", trainable=True)
    assert worst(ours, train_there(trained, chosen, labels)) < TOLERANCE
    other = train_there(load(folder / "start", trainable=True, alpha=4), chosen, labels)
    assert max(abs(a - b) for a, b in zip(ours, other, strict=True)) > 100 * TOLERANCE

    assert run("export", folder / "lora", "--adapter", "--out", folder / "adapter") == 0
    assert run("export", folder / "lora", "--out", folder / "merged") == 0
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder / "hf")
    assert (
        peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter").peft_config["default"].r
        == 4
    )
    tokens = torch.tensor([chosen[0][0]])
    with torch.no_grad():
        alone = load(folder / "adapter", trainable=False).eval()(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")(tokens).logits
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")(tokens).logits
        after = trained.eval()(tokens).logits
    assert float((alone - merged).abs().max()) < 1e-5
    assert float((alone - after).abs().max()) < 1e-4
    assert float((alone - base).abs().max()) > 0.5
    held = sum(
        path.stat().st_size
        for path in (folder / "lora" / "checkpoints" / "10").rglob("*")
        if path.is_file()
    )
    assert held < (folder / "hf" / "model.safetensors").stat().st_size


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_several_adapters_of_one_base(folder: Path, transformers: Any) -> None:
    """A run for each inside the folder of a run of the base; `peft` has both in one model, each with its own logits."""
    import peft
    import torch

    base = folder / "base"
    assert run("import", folder / "hf", "--out", base) == 0
    options = {
        "first": LORA,
        "second": ("--lora.targets", "mlp/(gate|up)_proj/kernel", "--lora.rank", 2),
    }
    for seed, (name, flags) in enumerate(options.items()):
        out = base / "adapters" / name
        given = [folder / "tiny.py", "--init", base, "--seed", seed, "--out", out, *flags]
        assert run("train", *given) == 0
        assert run("export", out, "--adapter", "--out", folder / "several" / name) == 0
        assert run("export", out, "--out", folder / "several-merged" / name) == 0
    assert run("generate", base / "adapters" / "second", "--prompt", "3", "--tokens", 2) == 0
    assert run("status", base / "adapters" / "first") == 0
    of_base = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    model = peft.PeftModel.from_pretrained(of_base, folder / "several" / "first", "first")
    model.load_adapter(folder / "several" / "second", "second")
    tokens = torch.arange(7, 40)[None]
    found = {}
    for name in options:
        model.set_adapter(name)
        merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "several-merged" / name)
        with torch.no_grad():
            found[name] = model.eval()(tokens).logits
            expected = merged(tokens).logits
        assert float((found[name] - expected).abs().max()) < 1e-5
    assert float((found["first"] - found["second"]).abs().max()) > 0.1


def test_packing_does_not_change_the_loss(folder: Path) -> None:
    """Of the validation split, packed and padded: the same tokens, the same mean; perplexity is of answers alone."""
    found = {}
    for packing in ("documents", "padded"):
        out = folder / packing
        assert (
            run(
                "train",
                folder / "tiny.py",
                "--out",
                out,
                "--data.packing",
                packing,
                "--steps",
                1,
                "--optimizer.learning-rate",
                "1e-30",
                "--evaluate.tokens",
                99_999,
            )
            == 0
        )
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found[packing] = next(line["val_loss"] for line in lines if "val_loss" in line)
    assert math.isclose(found["documents"], found["padded"], rel_tol=1e-6)
    assert jax.device_count() == 8
