"""Advice about pipelines of node groups (docs/design/planner.md): training does not run them.

::

    PipelineProblem --> groups: who may be a stage    --+
                        stages: a wave as a Problem     +--> search --> advice: table and text
                        table: seconds of stages      --+                         figure
                        times: seconds of a step; simulate: the same, event by event
"""
