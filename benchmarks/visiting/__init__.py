"""The comparison of two checkouts for benchmarks/visits.py."""
