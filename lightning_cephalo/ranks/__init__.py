"""Processes and their groups: start, control messages, crash reports."""
