"""The parts of benchmarks/throughput.py: cases, contenders, links, measuring, and the report."""
