"""Who does how much: what there is to plan for, what a plan costs, and the fastest plan.

Pure: numpy and, inside the solver only, cvxpy. No torch, no Lightning.
"""

from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.plan.cost import RankPrediction, StepPrediction, predict
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import Problem, RankProfile
from lightning_cephalo.plan.solver.solve import solve

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
