"""Planning any mesh in one process: memory, messages, operations and an estimate of time of a training step."""

from meshpar.planning.plan import plan
from meshpar.planning.rates import Rates
from meshpar.planning.report import Plan, RankPlan, Transfer
from meshpar.planning.search import Search, search

__all__ = ["Plan", "RankPlan", "Rates", "Search", "Transfer", "plan", "search"]
