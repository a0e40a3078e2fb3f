"""Advice about pipelines of node groups (docs/design/planner.md): training does not run them.

::

    PipelineProblem --> groups: who may be a stage     --+
                        bounds: seconds no plan beats    +--> search --> advice: table and text
                        cuts: units of each stage      --+                figure
                        stages: a stage's wave as a Problem, planned by ``plan.solve``
                        closed_form: seconds of a step; simulate: the same, event by event
"""
