"""Chooses what to measure next: candidates of a space, and policies. Start reading at `selection`."""
