"""Files of a data folder: written atomically, merged, checked, repaired, frozen, and selected for readers.

Start reading at `writer` and `counting`. Called by readers and commands; it calls `tables`.
"""
