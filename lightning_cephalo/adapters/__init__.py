"""What Lightning and torch need changed to work on shards."""
