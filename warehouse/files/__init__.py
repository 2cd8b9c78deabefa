"""Files of a data folder: written atomically, merged, checked, mended, frozen, and which of them count.

Start reading at `writer` and `counting`. Called by readers and commands; it calls `tables`.
"""
