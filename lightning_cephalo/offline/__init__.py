"""Planning without a cluster: command line, simulation, estimates, figures.

No other part of the package imports this folder.
"""
