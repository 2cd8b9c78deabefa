"""The growth cycle: the steps of a night and their records. Start reading at `cycle`."""
