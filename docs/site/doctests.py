"""An extension of griffe, which reads the docstrings: examples and lists become those of Python-Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe
from typing_extensions import override

from markdown_lists import adapt_lists

EXAMPLE = re.compile(r"^( *)(>>> .*?)(?=\n *\n|\Z)", flags=re.DOTALL | re.MULTILINE)


class Doctests(griffe.Extension):
    """Put a fence around each example that begins with `>>>`."""

    @override
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = adapt_lists(EXAMPLE.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value))
