"""Rows from others and for others: importers of published measurements, data sets, cards.

Start reading at `imported_rows` and `dataset`. Called by `ingest`, `export` and `publish`; it calls files and
reading.
"""
