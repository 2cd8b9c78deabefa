"""Tables of the warehouse: Arrow schemas, a run as a value, the words of columns, and DuckDB's own settings.

Start reading at `schema`. Called by every other folder and by workers; it calls no other.
"""
