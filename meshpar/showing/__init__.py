"""Looking at what a model does and where things lie: the table of a step, and pictures of placements."""

from meshpar.showing.explain import Explanation, explain
from meshpar.showing.picture import Picture, show

__all__ = ["Explanation", "Picture", "explain", "show"]
