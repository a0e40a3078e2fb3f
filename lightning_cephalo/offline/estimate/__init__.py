"""Estimates the times and memory of a step on a cluster without access to it.

The sources are measured curves, tables and datasheets::

    cluster = Cluster.load("cluster.yaml")
    work = work_of("gpt2", sequence_length=512, dtype="fp16", n_layer=24)
    estimate = build_problem(cluster, work, global_batch_size=64)
    plan = solve(estimate.problem)

Reading a cluster needs no torch; counting a model does.
"""
