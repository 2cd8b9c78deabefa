"""What a growth cycle tells in the morning: gathered from journal and warehouse, as a page and as JSON."""
