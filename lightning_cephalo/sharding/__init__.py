"""Uneven shards: cuts the flats, places the slices on ranks, gathers and reduces them."""
