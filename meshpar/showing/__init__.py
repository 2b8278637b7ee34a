"""Looking at what a model does: the table of a step."""

from meshpar.showing.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
