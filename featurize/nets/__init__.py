"""The torch modules that families are built from, imported inside their `build`, and imports of model libraries.

Start reading at `modules`. Called by families and by expert parallelism; it calls no other folder.
"""
