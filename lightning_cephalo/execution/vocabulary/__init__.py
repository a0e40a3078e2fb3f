"""Embeddings and heads that stay cut along the vocabulary in training; docs/design/vocabulary.md.

Heads that are whole may compute their logits in chunks of tokens.

``layers.py``      replaces the forwards of the layers
``logits.py``      the logits of a head, which never exist as a whole
``chunked.py``     heads that are whole, and answer by themselves
``questions.py``   what microbatches ask
``attendance.py``  one microbatch's questions, and its cut of the graph
``rounds.py``      answers what all microbatches of all ranks ask for, and their backward
``columns.py``     what one rank computes with its own rows
"""
