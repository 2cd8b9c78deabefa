"""The torch modules of single families, imported inside their `build`; what all share is in `featurize.modules`.

A parameter `config` is the `Config` of the family that imports it.
"""
