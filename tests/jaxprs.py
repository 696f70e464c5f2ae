"""Programs as tests look at them, before they are compiled."""

from collections.abc import Iterator


def equations(jaxpr) -> Iterator:
    """Every equation of a program, those inside loops, calls and checkpoints too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)
