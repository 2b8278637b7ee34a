"""Several ranks from one process: a step of a model, or any function, on ranks of this machine; the demo."""

from meshpar.simulating.pieces import Piece
from meshpar.simulating.ranks import Ranks
from meshpar.simulating.simulate import simulate
from meshpar.simulating.step import OnRank, Simulation

__all__ = ["OnRank", "Piece", "Ranks", "Simulation", "simulate"]
