"""Who does how much: what there is to plan for, what a plan costs, and the fastest plan.

Pure: numpy and, inside the solver only, cvxpy. No torch, no Lightning.
"""

from .cost import RankPrediction, StepPrediction, predict
from .errors import InfeasibleError, PlanError, SolverError
from .plan import Plan, RankPlan
from .problem import Problem, RankProfile
from .solve import solve

__all__ = [
    "InfeasibleError",
    "Plan",
    "PlanError",
    "Problem",
    "RankPlan",
    "RankPrediction",
    "RankProfile",
    "SolverError",
    "StepPrediction",
    "predict",
    "solve",
]
