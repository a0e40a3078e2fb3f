"""What benchmarks/throughput.py is made of: cases, contenders, links, measuring, and the report."""
