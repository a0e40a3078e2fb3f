"""Predicted against measured: what benchmarks/predictions.py runs and prints."""
