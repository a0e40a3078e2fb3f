"""Measure every rank: compute time, memory and network, on the running job."""
