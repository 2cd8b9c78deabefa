"""The torch modules of single families, imported inside their `build`; what all share is in `featurize.modules`."""
