"""Adapts Lightning and torch so that they work on shards."""
