"""Turns trainer, loaders and options into a model that is ready to train."""
