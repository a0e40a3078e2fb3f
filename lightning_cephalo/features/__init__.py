"""What few steps need, and the executor does not name: each brings its places and handlers."""
