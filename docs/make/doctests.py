"""Griffe extension for the API reference: render `Example:` sections of docstrings as code."""

import re
from typing import Any

import griffe


class DoctestSections(griffe.Extension):
    """Rename `Example:` to `Examples:`, the only heading under which griffe looks for doctests."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
