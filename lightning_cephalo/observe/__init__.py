"""What watches a run: timing, memory, traces, reports."""
