"""The report of a growth cycle: gathered from journal and warehouse, as a page and as JSON."""
