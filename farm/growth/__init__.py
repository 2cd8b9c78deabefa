"""The growth cycle: what a night does, step by step, and what it writes down. Start reading at `cycle`."""
