"""Bytes of the binary units, and how the units of memory convert.

Start reading at `MIB`. Every room may import this.
"""

MIB = 2**20  # bytes
MIB_PER_GIB = 1024.0
