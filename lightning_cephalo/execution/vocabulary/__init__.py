"""Embeddings and heads that stay cut along the vocabulary in training; docs/design/vocabulary.md.

``layers.py``      replaces the forwards of the layers
``logits.py``      the logits of a head, of which no rank holds all
``questions.py``   what microbatches ask
``attendance.py``  one microbatch's questions, and its cut of the graph
``rounds.py``      answers what all microbatches of all ranks ask for, and their backward
``columns.py``     what one rank computes with its own rows
"""
