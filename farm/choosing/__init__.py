"""What to measure next: candidates of a space, and policies that choose among them. Start reading at `selection`."""
