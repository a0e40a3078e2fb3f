"""Observes a run: timing, memory, traces, reports."""
