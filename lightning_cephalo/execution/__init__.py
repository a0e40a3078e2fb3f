"""Layered gradient accumulation: all microbatches pass one unit before any enters the next."""
