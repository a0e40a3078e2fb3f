"""Tables of faults for benchmarks/faults.py."""
