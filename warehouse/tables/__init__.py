"""Tables of the warehouse: Arrow schemas, a run as a value, the meaning of columns, and DuckDB settings.

Start reading at `schema`. Called by every other folder and by workers; it calls no other.
"""
