"""Heads that compute their logits in chunks of tokens.

``layers.py``     replaces the forwards of the heads
``logits.py``     the logits of a head, which never exist as a whole
``chunked.py``    what a head answers about them
``questions.py``  what is asked
``columns.py``    logits and gradients, in chunks of tokens
"""
