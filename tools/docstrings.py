"""An extension of griffe: the sections of our docstrings, as mkdocstrings shows them.

`Example:` becomes `Examples:`, which is read as a session of the interpreter; `Communication:` and `Source:`, which
griffe does not know, it shows as a box of that name by itself.
"""

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Name the section of examples as the google style does."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
