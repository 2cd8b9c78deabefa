"""Tables of the warehouse: Arrow schemas, a run as a value, column descriptions, and DuckDB settings.

Start reading at `schema`. Called by every other folder and by workers; it calls no other.
"""
