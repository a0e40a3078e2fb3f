"""Layered gradient accumulation: every microbatch passes a unit before any passes the next."""
