"""Deals each global batch unevenly to the ranks, and splits a rank's batch into microbatches.

Nothing here communicates: ranks agree through functions that the caller passes in.
"""
