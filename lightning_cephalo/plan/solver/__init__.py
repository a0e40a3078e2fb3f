"""The planner: from a Problem to the fastest Plan, by mixed-integer programs over columns.

``docs/design/planner.md`` has the order of the files and the alternatives.

A new constraint needs changes in three places. Host memory is an example.

1. A field in ``plan/problem.py``: the available amount, with a default that never binds
   (``RankProfile.host_capacity_bytes``).
2. A function in ``plan/cost.py`` that returns a :class:`~lightning_cephalo.plan.cost.Need`: the
   amount that a rank needs, what it has, and what all ranks have together (``host_need``).
3. An entry for it in ``cost.NEEDS``.

Columns, dominance, bounds, the program's rows and the trials of remedies follow from this table.
Two additions help readers only. One is a figure in ``RankPrediction``. The other is a sentence in
``infeasible`` if ranks share the resource, because its messages speak of memory.

A choice between ways to run a rank is a mode. It needs a field of
:class:`~lightning_cephalo.plan.cost.Mode`, a line in ``cost.modes``, and its effect in the terms. A
choice for all ranks together is a box of its own in ``boxes``.
"""
