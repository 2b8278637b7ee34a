"""What is sent to ranks and comes back: functions and classes of a notebook, too, by cloudpickle where it is installed.

Invariant: what cannot be sent is named before anything is; nothing of a notebook is imported by the ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
from collections.abc import Mapping
from typing import Any

from meshpar.errors import SpecError, explain
from meshpar.testing.pool import dumps_by_name, undumpable


def has_cloudpickle() -> bool:
    """Tell whether functions and classes can be sent by what they are, not by where they are imported from."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(value: Any) -> bytes:
    """Pickle a value, what is defined in `__main__` by its code; without cloudpickle that is an error."""
    if not has_cloudpickle():
        return dumps_by_name(value)
    data: bytes = importlib.import_module("cloudpickle").dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def packed(parts: Mapping[str, Any]) -> bytes:
    """Pickle what a call needs, all in one, so that what two of its parts share stays shared.

    Args:
        parts: by the names that an error calls them.

    Raises:
        SpecError: some of it cannot be sent.
    """
    try:
        return dumps(list(parts.values()))
    except Exception as error:
        bad = undumpable(parts, dumps)
        if has_cloudpickle():
            needs = "models, functions and values that can be copied: no process groups, locks, open files, generators"
            fix = "make those inside of the function, on the ranks"
        else:
            needs = "functions and classes of importable modules; those of a notebook or script need cloudpickle"
            fix = 'pip install "meshpar[notebook]", or move them to a module of their own'
        got = [", ".join(bad) or "all of it together", f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"]
        raise SpecError(explain("simulate: cannot be sent to the ranks.", got=got, needs=needs, fix=fix)) from error
