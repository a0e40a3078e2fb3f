"""The mixed-integer program that chooses a plan."""
