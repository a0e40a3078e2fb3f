"""Shared basics without torch: errors, quantities with units, checked records, files."""
