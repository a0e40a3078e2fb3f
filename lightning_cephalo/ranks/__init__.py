"""Starts the processes and groups of a run; carries control messages and crash reports."""
