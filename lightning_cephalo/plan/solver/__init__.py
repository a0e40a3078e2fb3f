"""The planner: from a Problem to the fastest Plan, by mixed-integer programs over columns.

::

    Problem -> bounds -> columns -> search -> state -> Plan
                  (no solver)   |  choose: milp
                                +-> infeasible: the same program with slack, and the message

- ``bounds``: what no plan can beat, without a solver.
- ``columns``: the ways in which one rank can run a batch; a plan gives each rank one column.
- ``milp``: the program that chooses columns for all ranks, stated in CVXPY and solved by HiGHS.
- ``search``: which columns are looked at, and what is proven by that; then the room for memory.
- ``infeasible``: what is missing where there is no plan, and which changes would do.
- ``solve``: the entrance; tries what holds for all ranks (resharding, even shares) one by one.

How to add a constraint
-----------------------

Three places, as for host memory, which is a constraint of this kind:

1. A field in ``plan/problem.py``: what there is, with a default that never binds
   (``RankProfile.host_capacity_bytes``).
2. A term in ``plan/cost.py``: a function that returns a :class:`~lightning_cephalo.plan.cost.Need`,
   which says what a rank takes: fixed, by peak, per sample, per microbatch (``host_need``).
3. A column's property in ``plan/solver/columns.py``: an entry in ``RESOURCES``, with that function
   and what all ranks share of it.

Columns, dominance, bounds and the program's rows follow from the table, as does what a remedy is
tried against. Two things are for whoever reads: a figure in ``RankPrediction``, and a sentence in
``infeasible`` where ranks share the resource, as memory is what it speaks of.

A choice between ways to run a rank is a mode: a field of
:class:`~lightning_cephalo.plan.cost.Mode`, a line in ``cost.modes``, and what it changes in the
terms. A choice for all ranks together is a variant in ``solve``.

What was weighed
----------------

- The textbook program, with counts per rank and size, does not finish in 45 s for 8 ranks. Columns
  of equal ranks and a ladder per slowest time take a tenth of a second.
- Where dozens of ranks all differ, every column has times of its own. Levels of the ladder that are
  closer than the gap of a thousandth are therefore merged, which keeps the bound. With fewer types,
  levels are exact, and so is the optimum.
- A first plan, found by stretching all bounds alike, cuts most columns off and is what remains when
  time is up.
"""
