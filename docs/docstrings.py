"""Griffe extension for the API reference: shows the "Example:" sections of docstrings, which hold code, as code."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section to "Examples:", which griffe shows as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in an object's docstring."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
