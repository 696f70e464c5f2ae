"""Tasks of `lm-eval` give the figures that it computes with `transformers`, on every mesh."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd.checkpoint.manager import CheckpointManager
from spmd.data.chat import ChatTemplate
from spmd.data.tokenizer import load_tokenizer
from spmd.run.build import evaluation_config, make_setup
from spmd.run.lm_eval_tasks import TaskModel, as_lm
from spmd.run.load_params import restore_model
from spmd.run.run_dir import RunDir
from tests import tiny
from tests.chats import CHATML, MARKED, TOKENS
from tests.command_line import run
from tests.hf_llama import write_llama

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore"),  # of transformers and lm-eval
]

LONGEST = 64
TASKS = {
    "own_choices": """output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
num_fewshot: 1
fewshot_split: test
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "own_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
""",
    "own_generation": """output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["\\n\\n", "e"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
""",
}
MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "sequence": 2}, {}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer, its import, and tasks with documents of their own."""
    folder = tmp_path_factory.mktemp("lm-eval")
    write_llama(
        folder / "hf",
        CHATML,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=0,
    )
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(30):
        a, b = rng.integers(10, size=2)
        choices = [str(a + b), f"{a + b + 1}, I think", f"it is {a * b} or so"]
        # No window twice: lm-eval takes a context and all but the last token for the same request.
        numbers = rng.integers(1000, size=int(rng.integers(1, 12)))
        text = "".join(f"{number} and {a} are {number + a}. " for number in numbers)
        row = {
            "question": f"What is {a} + {b}?",
            "choices": choices,
            "answer": int(rng.integers(3)),
        }
        rows.append(json.dumps({**row, "text": text, "target": str(a + b)}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "tasks").mkdir()
    for name, body in TASKS.items():
        data = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\n"
        )
        text = f"task: {name}\n{data}test_split: test\n{body}"
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    assert run("import", folder / "hf", "--out", folder / "run") == 0
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The model as `lm-eval` runs it with `transformers`."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder / "hf"), device="cpu", batch_size=4, dtype="float32")


def ours(folder: Path, sizes: dict[str, int]) -> Any:
    """The same model on a mesh."""
    run_dir = RunDir(folder / "run")
    config = evaluation_config(run_dir.config())
    setup = make_setup(config, tiny.mesh(**sizes))
    with CheckpointManager(run_dir.checkpoints, read_only=True) as checkpoints:
        model = restore_model(checkpoints, None, setup.plan)
    own = TaskModel(setup, model, load_tokenizer(config.data.tokenizer))
    assert own.longest == LONGEST
    return as_lm(own)


def figures(model: Any, folder: Path) -> dict[str, Any]:
    """Results and single responses of all tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"))
    return lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
    )


@pytest.fixture(scope="module")
def expected(theirs: Any, folder: Path) -> dict[str, Any]:
    return figures(theirs, folder)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_tasks_are_those_of_transformers(
    folder: Path, expected: dict[str, Any], sizes: dict[str, int]
) -> None:
    """Every log-likelihood to 1e-4, every greedy flag, every text, and so every figure."""
    found = figures(ours(folder, sizes), folder)
    for name in TASKS:
        pairs = zip(found["samples"][name], expected["samples"][name], strict=True)
        for mine, other in pairs:
            for one, two in zip(np.ravel(mine["resps"]), np.ravel(other["resps"]), strict=True):
                if name == "own_generation":
                    assert str(one) == str(two)
                else:
                    assert abs(float(one) - float(two)) < 1e-4 * max(1.0, abs(float(two)) / 100)
        for key, value in expected["results"][name].items():
            if isinstance(value, float):
                np.testing.assert_allclose(found["results"][name][key], value, rtol=1e-5)
    acc = expected["results"]["own_choices"]["acc,none"]
    assert 0 < acc < 1
    lengths = {len(str(each["resps"][0][0])) for each in expected["samples"]["own_generation"]}
    assert len(lengths) > 3  # some stopped early


def test_long_contexts_are_cut_as_there(folder: Path, theirs: Any) -> None:
    """At their beginning; the control has the whole context, of a longer model."""
    text = "What is 4 + 4? It is 8, I think. " * 9
    requests = [
        types.SimpleNamespace(args=(text, " or 9")),
        types.SimpleNamespace(args=("", " so")),
    ]
    mine = ours(folder, {"fsdp": 2}).loglikelihood(requests, disable_tqdm=True)
    other = theirs.loglikelihood(requests, disable_tqdm=True)
    np.testing.assert_allclose([nats for nats, _ in mine], [nats for nats, _ in other], atol=1e-3)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    short = [types.SimpleNamespace(args=(text[:60], " or 9"))]
    (control,) = theirs.loglikelihood(short, disable_tqdm=True)
    assert abs(control[0] - mine[0][0]) > 0.01


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["ChatML", "generation blocks"])
def test_conversations_are_written_as_there(folder: Path, theirs: Any, source: str) -> None:
    """With the prompt for an answer, and up to the end of an answer that goes on; no marks are left."""
    model = ours(folder, {"fsdp": 2})
    model.own = dataclasses.replace(model.own, template=ChatTemplate(source, "a template", TOKENS))
    theirs.tokenizer.chat_template = source
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": " It is "},
    ]
    for messages, prompt in ((history, False), (history[:2], source == CHATML)):
        if not prompt and messages is not history:
            continue  # this template has no prompt for an answer
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt)
        assert model.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    assert "\ufdd0" not in model.apply_chat_template(history)


def test_samples_of_one_prompt_differ(folder: Path) -> None:
    """Also between batches; a batch is repeated with the same seed."""
    own = ours(folder, {"fsdp": 2}).own
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12, "until": []}
    batch = own.setup.config.data.batch
    texts = own.write(["What is 1?"] * 2 * batch, options)
    assert texts[:batch] != texts[batch:]
    assert texts == own.write(["What is 1?"] * 2 * batch, options)


def test_the_command_prints_them(
    folder: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each figure, with the standard error of means; a template is used with --chat."""
    flags = ("--tasks", *TASKS, "--task-folder", folder / "tasks")
    capsys.readouterr()
    assert run("eval", folder / "run", *flags, "--json", "--devices", 8) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"]
    found = {line.pop("task"): line for line in lines}
    own = found["own_choices"]
    assert own["acc,none"] == pytest.approx(expected["results"]["own_choices"]["acc,none"])
    share = own["acc,none"]
    assert own["acc_stderr,none"] == pytest.approx((share * (1 - share) / 29) ** 0.5)
    assert run("eval", folder / "run", *flags, "--limit", 4, "--chat", "--devices", 8) == 0
    out = capsys.readouterr().out
    assert "own_rolling" in out
    assert "± standard error" in out
