"""Uneven shards: where flats are cut, who holds what, gathers and reduces."""
