"""Turns a Trainer's module, loaders and options into a model that is ready to train."""
