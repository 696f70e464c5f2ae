"""Calls of a clumsy or hostile person, as data: what is typed, the exit code, and a pattern of what must be printed.

`{config}` is the file of a tiny model, `{run}` a finished run of it, `{out}` a run folder of the
call's own, `{folder}` a folder of its own with the call's files, `{copy}` a copy of `{run}` with the
call's damage.
"""

import dataclasses
from collections.abc import Mapping

START = "import dataclasses, spmd\nfrom pathlib import Path\nexec(Path({config!r}).read_text())\n"
"""Beginning of a config that changes the tiny one; `{config}` is filled in."""
BIG = 10**30


@dataclasses.dataclass(frozen=True)
class Call:
    """One command line.

    Attributes:
        arguments: As typed after `spmd`, with `{config}`, `{run}`, `{out}`, `{folder}`.
        says: Regular expression of the output.
        code: Exit code.
        files: Name in `{folder}` → text, written before.
        damage: The same in `{copy}`; a name that ends in `|` is a named pipe.
    """

    arguments: str
    says: str
    code: int = 2
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    damage: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _flags() -> list[Call]:
    """Values that a field cannot have: the field is named."""
    counts = (
        "steps",
        "accumulate",
        "logits-chunk",
        "log-every",
        "max-to-keep",
        "data.batch",
        "data.sequence",
    )
    sizes = ("layers", "heads", "kv-heads", "d-model", "d-ff", "vocab", "unroll")
    values = {
        **{flag: ("0", "-5", "1.5", "many", "nan") for flag in counts},
        **{f"model.{name}": ("0", "-1", "x") for name in sizes},
        "seed": ("-1", str(2**32), str(BIG), "x"),
        "steps ": (str(2**63), str(BIG)),
        "data.batch ": (str(2**63), str(BIG)),
        "data.sequence ": (str(2**63), str(BIG)),
        "model.layers ": (str(BIG),),
        "model.vocab ": (str(2**63), str(BIG)),
        "checkpoint-every": ("-1", "x"),
        "evaluate.every": ("-1",),
        "evaluate.tokens": ("0", "-7"),
        "zero": ("4", "-1", "all"),
        "remat": ("some", "save:", "save:nothing_like_it"),
        "precision": ("bf8", "float64"),
        "attention": ("flash3",),
        "offload": ("everything",),
        "on-nan": ("hope",),
        "recovery.on-spike": ("hope",),
        "recovery.spike-factor": ("0.5", "nan"),
        "recovery.rollbacks": ("-1",),
        "optimizer.name": ("adamm", ""),
        "optimizer.learning-rate": ("0", "-1e-3", "nan", "inf", "fast"),
        "optimizer.b1": ("1", "-0.1", "nan"),
        "optimizer.b2": ("1.5",),
        "optimizer.warmup-steps": ("-1", "4", "400"),
        "optimizer.clip-norm": ("-1", "nan"),
        "optimizer.schedule": ("triangle",),
        "data.validation": ("0", "1", "-3", "nan"),
        "data.source": ("/no/such/file", ""),
        "data.tokenizer": ("/no/such/tokenizer.json", ""),
        "data.threads": ("-1",),
        "mesh.fsdp": ("0", "-2", "3", "1000", "x", str(BIG)),
        "mesh.tensor": ("3", "7"),
        "mesh.pipe": ("2", "3"),
        "mesh.expert": ("2",),
        "slices.data": ("3", "0"),
        "pipeline.schedule": ("2f2b",),
        "pipeline.microbatches": ("-1",),
        "devices": ("-1", "1000000", str(BIG), "x"),
        "sample.temperature": ("-1", "nan"),
        "sample.top-p": ("0", "2"),
        "lora.targets": ("no_such_kernel",),
        "xla": ("no_such_flag=1", "x"),
        "compilation-cache-dir": ("/dev/null/cache",),
        "data.cache": ("/dev/null/cache",),
        "profile": ("5", "9:3", "x:y", "-1:2"),
        "resume": ("perhaps",),
        "init": ("/no/such/run",),
    }
    calls = []
    for flag, bad in values.items():
        name = flag.strip()
        said = name.replace("-", "[-_]").replace("mesh.", "").replace(".", r"\.")
        calls += [Call(f"train {{config}} --out {{out}} --{name} '{value}'", said) for value in bad]
    return calls


def _configs() -> list[Call]:
    """Config files that fail: the file, the line and the exception are named."""
    failing = {
        "raise Exception('no luck')": r"mine\.py:4.*Exception: no luck",
        "raise KeyError('key')": r"mine\.py:4.*KeyError: 'key'",
        "raise RuntimeError('run')": r"mine\.py:4.*RuntimeError: run",
        "class Odd(Exception): pass\nraise Odd('odd')": r"mine\.py:5.*Odd: odd",
        "raise SystemExit(0)": r"mine\.py",
        "import sys; sys.exit('bye')": r"mine\.py",
        "assert config.steps > 9": r"mine\.py:4.*AssertionError",
        "1 / 0": r"mine\.py:4.*ZeroDivisionError",
        "undefined": r"mine\.py:4.*NameError",
        "import no_such_module": r"mine\.py:4.*no_such_module",
        "def f(): return f()\nf()": r"mine\.py.*RecursionError",
        "x = [": r"mine\.py:4.*not Python",
        "config = None": r"mine\.py.*config",
        "config = 7": r"mine\.py.*7",
        "config = spmd.TrainConfig": r"mine\.py",
        "config = lambda: config": r"mine\.py",
        "del config": r"mine\.py.*no config",
        "config = dataclasses.replace(config, model=7)": "model",
        "config = dataclasses.replace(config, model=object())": "model",
        "config = dataclasses.replace(config, rules=7)": "rules",
        "config = dataclasses.replace(config, rules=[('kernel', None)])": "rules",
        "config = dataclasses.replace(config, steps='9')": "steps",
        "config = dataclasses.replace(config, steps=1e3)": "steps",
        "config = dataclasses.replace(config, seed=None)": "seed",
        "config = dataclasses.replace(config, data=None)": "data",
        "config = dataclasses.replace(config, mesh={'fsdp': 2})": "mesh",
        "config = dataclasses.replace(config, optimizer='adamw')": "optimizer",
        "config = dataclasses.replace(config, offload='params')": "offload",
        "config = dataclasses.replace(config, step=9)": "step",
        "config = dataclasses.replace(config, rules=spmd.Rules([('.*', spmd.replicate('all'))]))": r"\.\*",
        "config = dataclasses.replace(config, rules=spmd.Rules([('(', spmd.replicate('all'))]))": r"\(",
        "config = dataclasses.replace(config, rules=spmd.Rules([]))": "no rule matches",
        (
            "backtracking = [('(([a-z_/]+)+)+#', spmd.replicate('x')), *config.rules.params]\n"
            "config = dataclasses.replace(config, rules=dataclasses.replace(config.rules, params=backtracking))"
        ): r"a-z_/",
    }
    calls = [
        Call("train {folder}/mine.py --out {out}", says, files={"mine.py": START + c})
        for c, says in failing.items()
    ]
    bytes_file = {"mine.py": "\0\0\0"}
    calls += [
        Call("train {folder}/mine.py --out {out}", r"mine\.py", files=bytes_file),
        Call("train {folder}/mine.py --out {out}", r"mine\.py", files={"mine.py": ""}),
        Call("train {folder} --out {out}", r"folder|config"),
        Call("train /dev/null --out {out}", "/dev/null"),
        Call("train {folder}/none.py --out {out}", r"none\.py"),
        Call("train demoo --out {out}", "demo"),
        Call("train '' --out {out}", "config"),
        Call("train --out {out}", "CONFIG"),
        Call("train {config} {config} --out {out}", "(?i)unrecognized", files={}),
    ]
    # These work: what a person would expect to work.
    subclass = (
        "from spmd.models.decoder import DecoderConfig\n"
        "@dataclasses.dataclass(frozen=True)\nclass Mine(DecoderConfig):\n    extra: float = 0.5\n"
        "config = dataclasses.replace(config, model=Mine(**vars(config.model)))"
    )
    calls += [
        Call(
            "train {folder}/mine.py --out {out} --model.extra 0.25",
            "step 2/2",
            0,
            {"mine.py": START + subclass},
        ),
        Call(
            "train {folder}/mine.py --out {out}",
            "step 2/2",
            0,
            {
                "mine.py": START
                + "import beside\nconfig = dataclasses.replace(config, seed=beside.SEED)",
                "beside.py": "SEED = 3",
            },
        ),
    ]
    return calls


def _folders() -> list[Call]:
    """Run folders that cannot be one."""
    return [
        Call("train {config} --out {config}", r"tiny\.py|out"),
        Call("train {config} --out {config}/below", r"tiny\.py|out"),
        Call("train {config} --out /dev/null", "/dev/null"),
        Call("train {config} --out /dev/full", "/dev/full"),
        Call("train {config} --out /dev/null/run", "/dev/null"),
        Call("train {config} --out /proc/run", "/proc/run"),
        Call("train {config} --out /sys/run", "/sys/run"),
        Call("train {config} --out " + "x" * 300, "x{100}"),
        Call("train {config} --out " + "x/" * 3000, "x/x/x"),
        Call("train {config} --out {run}", "already contains a run"),
        Call("train {config} --out {out} --resume always", "contains no run"),
        Call("train {config} --out {folder} --resume always", "contains no run"),
        Call("train {config} --out {folder}", "links", files={"plan.txt -> /etc/passwd": ""}),
        Call("train {config} --out {folder}", "folder", files={"checkpoints": "a file"}),
        Call("train {config} --out {folder}", "folder", files={"logs": "a file"}),
        Call(
            "train {config} --out {folder} --resume auto", "folder", files={"checkpoints/5/x": ""}
        ),
        Call(
            "train {config} --out {folder} --resume auto", "folder", files={"metrics.jsonl/x": ""}
        ),
        Call("train {config} --out {folder} --resume auto", "folder", files={"config.json/x": ""}),
    ]


def _resumes() -> list[Call]:
    """Resumed runs whose config changed: the field, with both values, before anything compiles."""
    changed = {
        "model.heads 4": r"model\.heads.*2.*4",
        "model.kv-heads 2": r"model\.kv_heads.*1.*2",
        "model.layers 2": r"model\.layers.*1.*2",
        "model.d-ff 64": r"model\.d_ff.*32.*64",
        "model.d-model 32": r"model\.d_model.*16.*32",
        "model.vocab 512": r"model\.vocab.*256.*512",
        "model.rope-theta 500": r"model\.rope_theta.*10000.*500",
        "model.norm-eps 0.1": r"model\.norm_eps",
        "model.tied": r"lm_head",
        "model.no-stacked": r"model\.stacked",
        "model.window 4": r"model\.window.*0.*4",
        "model.layer.mixer.qkv-bias": r"q_proj/bias",
        "model.layer.mixer.qk-norm head": r"q_norm",
        "seed 3": "seed.*0.*3",
        "data.batch 4": r"batch.*2.*4",
        "data.sequence 16": r"sequence.*8.*16",
        "data.validation 0.4": "data",
        "steps 1": "steps",
        "optimizer.name lion": r"optimizer|m_|mu",
        "precision bf16-params": "precision|params",
        "lora.targets q_proj/kernel": "lora|init",
    }
    return [
        Call(f"train {{config}} --out {{run}} --resume always --{change}", says)
        for change, says in changed.items()
    ]


def _commands() -> list[Call]:
    """Commands on what is not there, not theirs, or not possible."""
    return [
        Call("", "usage"),
        Call("--help", "usage", 0),
        Call("--version", r"spmd \d", 0),
        Call("trian {config}", 'did you mean "train"'),
        Call("train {config} --no-such-flag 3", "no-such-flag"),
        Call("train {config} --steps", "steps"),
        Call("train {config} --stesp 4", "steps"),
        Call("train demo --out {out} --data.sequence 64 --steps 0", "steps"),
        Call("train demo --out {out} --steps 10 --optimizer.warmup-steps 30", "warmup"),
        Call("plan", "CONFIG"),
        Call("plan {config} --topology", "topology"),
        Call("plan {config} --topology v9:4x4", "v9"),
        Call("plan {config} --topology v5e", "v5e:"),
        Call("plan {config} --topology v5e:3x5", "hosts"),
        Call("plan {config} --topology v5e:99x99", "slice"),
        Call("plan {config} --topology 0xv5e:4x4", "slices"),
        Call("plan {config} --topology v5e:4x4x4", "v5e:"),
        Call("plan {config} --topology h100:0x8", "h100"),
        Call("plan {config} --topology cpu:-1", "cpu"),
        Call(f"plan {{config}} --topology cpu:{BIG}", "cpu"),
        Call("plan {config} --topology v5e:4x4 --mesh.fsdp 3", "fsdp|devices"),
        Call("plan {config} --diff none", "none"),
        Call("plan {config} --svg /dev/null/x.svg --schedule", "pipe|svg"),
        Call("plan {config} --schedule", "pipe"),
        Call("check {config} --check-steps 0", "check-steps"),
        Call("check {config} --products -1", "products"),
        Call("check {config} --products 9", "products|devices"),
        Call("check {config} --inject bugs", "inject"),
        Call("report", "needs a config"),
        Call("report {config}", "--out"),
        Call("report {config} --out {folder}/no/a.html", "no folder"),
        Call("report {run} --out /proc/a.html", "cannot be written"),
        Call("report {run} --out {out}", "HTML"),
        Call("report {run} --out {folder}/a.html --topology v5e:4x4", "topology"),
        Call("report {folder} --out {folder}/a.html", "no run"),
        Call(
            "report {folder} --out {folder}/a.html",
            "cut or damaged",
            0,
            files={"config.json": "[" * 100_000},
        ),
        Call(
            "report {folder} --out {folder}/a.html",
            "no metrics",
            0,
            files={"metrics.jsonl": "{\0" * 9999},
        ),
        Call("report {run} {run} {run} --out {folder}/a.html", "too many"),
        Call("report {run} --out {folder}/a.html", "written to", 0),
        Call("generate", "usage|required|RUN", 2),
        Call("generate /no/such/run --prompt x", "no/such/run"),
        Call("generate {folder} --prompt x", "folder"),
        Call("generate {run}", "prompt"),
        Call("generate {run} --prompt ''", "prompt"),
        Call("generate {run} --prompt x --tokens -1", "tokens"),
        Call("generate {run} --prompt x --tokens 999", "999"),
        Call("generate {run} --prompt x --temperature nan", "temperature"),
        Call("generate {run} --prompt x --step 77", "77"),
        Call("generate {run} --prompt x --top-p 3", "top.p"),
        Call("generate {run} --prompt x --devices 1000000", "devices"),
        Call("generate {folder} --prompt x", "folder", files={"config.json": "{"}),
        Call("generate {folder} --prompt x", "folder", files={"config.json": "[" * 100_000}),
        Call(
            "generate {folder} --prompt x",
            "folder",
            files={"config.json": '{"config": 7}', "config.py": "config = 7"},
        ),
        Call(
            "generate {folder} --prompt x",
            "folder|import",
            files={"config.json": '{"architectures": ["Llama"]}'},
        ),
        Call("import", "usage|required", 2),
        Call("import /no/such --out {out}", "/no/such"),
        Call("import {folder} --out {out}", "config.json"),
        Call("import {folder} --out {out}", "config.json", files={"config.json": "{}"}),
        Call("import {folder} --out {out}", "config.json", files={"config.json": "\0"}),
        Call(
            "import {folder} --out {out}",
            "RwkvForCausalLM(?!.*did you mean)",
            files={"config.json": '{"architectures": ["RwkvForCausalLM"]}'},
        ),
        Call(
            "import {folder} --out {out}",
            "safetensors|hidden_size",
            files={"config.json": '{"architectures": ["LlamaForCausalLM"]}'},
        ),
        Call(
            "import {folder} --out {run}",
            "run",
            files={"config.json": '{"architectures": ["LlamaForCausalLM"]}'},
        ),
        Call("export /no/such --out {out}", "/no/such"),
        Call("export {run} --out {run}", "run"),
        Call("export {run} --out {config}", r"tiny\.py"),
        Call("export {run} --out {out} --dtype int3", "dtype"),
        Call("export {run} --out {out} --shard-size many", "shard.size"),
        Call("export {run} --out {out} --step 99", "99"),
        Call("script", "slurm"),
        Call("script pbs {config}", "slurm"),
        Call("script slurm {config}", "nodes"),
        Call("script slurm {config} --nodes 0", "nodes"),
        Call("script slurm {config} --nodes x", "nodes"),
        Call("script slurm /no/such --nodes 2", "no/such"),
        Call("launch", "processes"),
        Call("launch --processes 2", "train"),
        Call("launch --processes 0 -- train {config} --out {out}", "processes"),
        Call("launch --processes -3 -- train {config} --out {out}", "processes"),
        Call("launch --processes 2 -- train {config} --out {out} --steps 0", "steps"),
        Call("launch --processes 2 -- train {folder}/none.py --out {out}", r"none\.py"),
        Call("launch --processes 2 -- plan {config}", "train"),
        Call("launch --processes 2 -- train {config} --out {out} --mesh.fsdp 7", "fsdp|devices"),
        Call(
            "launch --processes 2 -- train {config} --mesh.data 2 --out {run}",
            "already contains a run",
        ),
        Call("launch --processes 100000 -- train {config} --out {out}", "processes"),
        Call(
            "train {config} --out {out} --coordinator nowhere --processes 2 --process-id 0",
            "coordinator",
        ),
        Call(
            "train {config} --out {out} --processes 2 --process-id 5 --coordinator 127.0.0.1:1",
            "process.id",
        ),
        Call("train {config} --out {out} --process-id 0", "processes|coordinator"),
        Call("train {config} --out {out} --cluster moon", "cluster"),
    ]


def _not_finite() -> list[Call]:
    """Runs whose every step is NaN: none ends with 0."""
    broken = START + (
        "class Broken(type(config.model)):\n"
        "    def build(self, rngs):\n"
        "        model = super().build(rngs)\n"
        "        model.norm.scale[...] = model.norm.scale[...] * float('nan')\n"
        "        return model\n"
        "size = dict(vocab=256, d_model=16, layers=1, heads=2, kv_heads=1, d_ff=32)\n"
        "config = dataclasses.replace(config, model=Broken(**size))"
    )
    files = {"mine.py": broken}
    return [
        Call("train {folder}/mine.py --out {out}", "step 1", files=files),
        Call("train {folder}/mine.py --out {out} --on-nan skip --steps 40", "skip", files=files),
        Call(
            "train {folder}/mine.py --out {out} --on-nan roll-back --steps 40",
            "step 1|roll",
            files=files,
        ),
        Call(
            "train {folder}/mine.py --out {out} --precision fp16 --steps 80",
            "scale|skip",
            files=files,
        ),
        Call(
            "train {config} --out {out} --optimizer.learning-rate 1e38 --steps 40 --optimizer.warmup-steps 0",
            "step",
        ),
    ]


NESTED = "[" * 200_000
LARGE = "1" + "0" * 400
DAMAGED_LINES = (
    NESTED,
    f'{{"step": {LARGE}}}',
    f'{{"step": 1, "loss": {LARGE}}}',
    '{"step": 1, "loss": 1e400}',
    '{"step": "1"}',
    '{"step": 1, "loss": ' + "[" * 900 + "]" * 900 + "}",
    "[]",
    "\0",
)


def _damaged() -> list[Call]:
    """Run folders whose files were damaged, exchanged or replaced: an answer, and nothing lost without a word."""
    resume = "train {config} --out {copy} --resume auto --steps 3"
    report = "report {copy} --out {folder}/a.html"
    folder = {"here": ""}
    calls = []
    for line in DAMAGED_LINES:
        two = f"{line}\n{line}\n"
        moved = "2 lines were damaged, moved to metrics.jsonl.damaged"
        calls += [
            Call(resume, moved, 0, damage={"metrics.jsonl": two}),
            Call(resume, "step 3/3", 0, damage={"goodput.jsonl": two}),
            Call(report, "cut or damaged|no metrics", 0, folder, {"metrics.jsonl": two}),
            Call(report, "goodput.jsonl is damaged", 0, folder, {"goodput.jsonl": two}),
        ]
    for text in (NESTED, "null", '{"config": ' + NESTED, '{"config": {"steps": ' + LARGE + "}}"):
        for arguments in ("eval {copy}", "generate {copy} --prompt x", "export {copy} --out {out}"):
            calls.append(Call(arguments, "Run|run|steps|config", damage={"config.json": text}))
        calls.append(Call(report, "written to", 0, folder, {"config.json": text}))
    pipes = ("logs/process-0.log", "metrics.jsonl", "goodput.jsonl", "config.json", "plan.txt")
    for name in pipes:
        says = f"{name}: is neither a file nor a folder"
        calls.append(Call(resume, says, damage={f"{name}|": ""}))
    for arguments in ("eval {copy}", "generate {copy} --prompt x", "export {copy} --out {out}"):
        calls.append(Call(arguments, "not a regular file", damage={"config.json|": ""}))
    for number in ("1" * 19, "9" * 18, "0", "007"):
        says = "is not a lease of this version"
        held = {f"lease/{number}.json": "{}"}
        free = {f"lease/{number}.released": "{}"}
        calls.append(Call(resume, f"{number}.json: {says}", damage=held))
        calls.append(Call(f"{resume} --take-over", f"{number}.released: {says}", damage=free))
    return calls


def _templates() -> list[Call]:
    """Chat templates that cannot be compiled, or that ask for the whole machine."""
    templates = {
        "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}": "not a Jinja template",
        "{% for a in b %}" * 99 + "{% endfor %}" * 99: "not a Jinja template",
        "{{ " + "9" * 5000 + " }}": "not a Jinja template",
        "{% extends 'x' %}": "the template fails",
        "{{ 'a' * (messages | length * 10 ** 12) }}": "MiB of memory|fails",
        "{% set s = namespace(x='aaaa') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}"
        "{% endfor %}{{ s.x }}": "MiB of memory",
        "{{ messages[0].content.center(10 ** 12) }}": "MiB of memory|fails",
        "{{ messages | tojson(indent=10 ** 12) }}": "MiB of memory|fails",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}": "SecurityError|fails",
        "a" * (2**20 + 1): "above the limit of 1,048,576",
    }
    chats = (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    arguments = (
        "train {config} --out {out} --task sft --data.source {folder}/chats.jsonl "
        "--chat.template {folder}/t.jinja --data.cache {folder}/cache"
    )
    return [
        Call(arguments, says, files={"t.jinja": template, "chats.jsonl": chats * 9})
        for template, says in templates.items()
    ]


CALLS: dict[str, list[Call]] = {
    "flags": _flags(),
    "configs": _configs(),
    "folders": _folders(),
    "resumes": _resumes(),
    "commands": _commands(),
    "not finite": _not_finite(),
    "damaged": _damaged(),
    "templates": _templates(),
}
"""All calls, by kind."""
