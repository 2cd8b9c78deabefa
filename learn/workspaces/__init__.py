"""Fits the workspaces that `featurize.cudnn.distilled` gives where cuDNN is not installed. Start at `labels.py`."""
