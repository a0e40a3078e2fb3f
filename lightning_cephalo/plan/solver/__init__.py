"""The planner: from a Problem to the fastest Plan, by mixed-integer programs over columns.

::

    Problem -> bounds -> columns -> search -> state -> Plan
                  (no solver)   |  choose: milp
                                +-> infeasible: the same program with slack, and the message

- ``bounds``: lower bounds on the step time of all plans, without a solver.
- ``columns``: the ways in which one rank can run a batch; a plan gives each rank one column.
- ``milp``: the program that chooses columns for all ranks, stated in CVXPY and solved by HiGHS.
- ``search``: selects the columns to consider and keeps track of the proof, then maximises free
  memory.
- ``infeasible``: explains what is missing if there is no plan, and which changes would help.
- ``solve``: the entry point; tries the choices for all ranks (resharding, even shares) one by one.

How to add a constraint
-----------------------

A constraint needs changes in three places. Host memory is an example.

1. A field in ``plan/problem.py``: the available amount, with a default that never binds
   (``RankProfile.host_capacity_bytes``).
2. A term in ``plan/cost.py``: a function that returns a :class:`~lightning_cephalo.plan.cost.Need`,
   the amount that a rank needs: fixed, by peak, per sample, per microbatch (``host_need``).
3. A column's property in ``plan/solver/columns.py``: an entry in ``RESOURCES``, with that function
   and the amount that all ranks share.

Columns, dominance, bounds, the program's rows and the trials of remedies follow from this table.
Two additions help readers only. One is a figure in ``RankPrediction``. The other is a sentence in
``infeasible`` if ranks share the resource, because its messages speak of memory.

A choice between ways to run a rank is a mode. It needs a field of
:class:`~lightning_cephalo.plan.cost.Mode`, a line in ``cost.modes``, and its effect in the terms. A
choice for all ranks together is a variant in ``solve``.

Alternatives considered
-----------------------

- The textbook program, with counts per rank and size, does not finish in 45 s for 8 ranks. Columns
  of equal ranks and a ladder per slowest time take a tenth of a second.
- If dozens of ranks all differ, every column has its own times. Levels of the ladder that are
  closer than the gap of a thousandth are therefore merged; the bound stays valid. With fewer types,
  levels are exact, and so is the optimum.
- A first plan, found by scaling all bounds by the same factor, rules out most columns. It is also
  the result when time is up.
"""
