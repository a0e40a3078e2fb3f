"""Advice about pipelines of node groups: would one be faster than sharding over all ranks?

Nothing here trains: the runtime does not run pipelines. The advice says what a cluster's links
cost, and below which bandwidth between nodes a pipeline would win.

::

    PipelineProblem --> groups: who may be a stage     --+
                        bounds: seconds no plan beats    +--> search --> advice: table and text
                        cuts: units of each stage      --+                figure
                        stages: a stage's wave as a Problem, planned by ``plan.solve``
                        closed_form: seconds of a step; simulate: the same, event by event
"""
