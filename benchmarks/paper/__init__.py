"""The published planner and its profiles, to compare with."""
