"""Docstrings say `Example:`, which is a section of code in the API's pages."""

import re

import griffe


class Examples(griffe.Extension):
    """`Example:` as the parser of docstrings knows it: `Examples:`."""

    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^(\s*)Example:", r"\1Examples:", text, flags=re.M
            )
