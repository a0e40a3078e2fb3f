"""Plans the work of one training step: problem, plan, cost model and solver.

Pure: uses numpy and, in the solver only, cvxpy and its scipy. Imports neither torch nor Lightning.
"""

from lightning_cephalo.common.errors import InfeasibleError, PlanError, SolverError
from lightning_cephalo.plan.cost import RankPrediction, StepPrediction, predict
from lightning_cephalo.plan.plan import Plan, RankPlan
from lightning_cephalo.plan.problem import KeptCurves, Links, Problem, RankProfile, StateBytes
from lightning_cephalo.plan.solver.solve import solve

__all__ = [
    "InfeasibleError",
    "KeptCurves",
    "Links",
    "Plan",
    "PlanError",
    "Problem",
    "RankPlan",
    "RankPrediction",
    "RankProfile",
    "SolverError",
    "StateBytes",
    "StepPrediction",
    "predict",
    "solve",
]
