"""Cases of published families, in one module for each group of families.

A module has dictionaries of these names:

- `MODELS`: name of a case → the class of `transformers`, without its ending, and the fields of a small
  model, which `make parity` compares with ours;
- `PUBLISHED`: preset → number of elements in the tensors of the published checkpoint;
- `WITH_IMAGES`: class of a model of images and text, without its ending → its fields; the text part is
  read;
- `REFUSED`: entry point of a family → fields of config.json, each with a value that it refuses.
"""

import copy
import functools
import importlib
import pkgutil
from typing import Any


@functools.cache
def cases(name: str) -> dict[str, Any]:
    """Return the dictionaries of a name of all modules as one.

    Raises:
        ValueError: Two modules have the same key.
    """
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(__path__):
        theirs = getattr(importlib.import_module(f"{__name__}.{module.name}"), name, {})
        twice = found.keys() & theirs.keys()
        if twice:
            raise ValueError(f"{name} of {module.name}: {sorted(twice)} are elsewhere too")
        # config classes of transformers write their defaults into tables that cases share
        found |= {key: copy.deepcopy(case) for key, case in theirs.items()}
    return found
