"""MaxText's train step as its own `train_compile` compiles it: the program's text and its memory, into a file.

    PYTHON benchmarks/maxtext_step.py FILE.json compile_topology=v5e-256 model_name=llama3-8b …

PYTHON is the interpreter of an environment with MaxText and without spmd. `benchmarks/pods.py`
starts this and reads the file. `rule:NAME=AXIS` splits a logical axis of MaxText's over one axis of
the mesh, in place of its own rules for it.
"""

import importlib.util
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

MODULE = "maxtext.trainers.pre_train.train_compile"


RULE = "rule:"


def _with_rules(base: str, rules: Sequence[str]) -> str:
    """Return the text of base.yml with one row of `logical_axis_rules` for each given axis."""
    lines = base.splitlines()
    for rule in rules:
        name, axis = rule.split("=")
        rows = [i for i, line in enumerate(lines) if line.strip().startswith(f"['{name}',")]
        first, *others = rows
        indent, _ = lines[first].split("[", 1)
        lines[first] = f"{indent}['{name}', ['{axis}']],"
        lines = [line for i, line in enumerate(lines) if i not in others]
    return "\n".join(lines)


def main() -> None:
    file, *arguments = sys.argv[1:]
    analyse = jax.stages.Compiled.memory_analysis

    def analyse_and_write(compiled: Any) -> Any:
        memory = analyse(compiled)
        sizes = {
            "temporaries": memory.temp_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
        }
        found = {"text": compiled.as_text(), "memory": sizes}
        Path(file).write_text(json.dumps(found), encoding="utf-8")
        return memory

    jax.stages.Compiled.memory_analysis = analyse_and_write  # type: ignore[method-assign]  # once, for the train step
    package = importlib.util.find_spec("maxtext")
    if package is None or not package.submodule_search_locations:
        sys.exit(f"MaxText is not installed for {sys.executable}")
    configs = Path(package.submodule_search_locations[0], "configs")
    rules = [argument.removeprefix(RULE) for argument in arguments if argument.startswith(RULE)]
    others = [argument for argument in arguments if not argument.startswith(RULE)]
    base = Path(file).with_suffix(".yml")
    base.write_text(_with_rules((configs / "base.yml").read_text(), rules), encoding="utf-8")
    sys.argv = [MODULE, str(base), *others]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
