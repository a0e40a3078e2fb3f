"""Keeps the state of training in the hosts' memory, and goes on from it after a restart."""
