"""The parts of benchmarks/predictions.py: models, plans, measuring, and the report."""
