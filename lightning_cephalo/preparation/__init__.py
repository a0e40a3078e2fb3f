"""From trainer, loaders and options to a model that is ready to train."""
