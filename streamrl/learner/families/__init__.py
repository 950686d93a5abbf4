"""Model families: one file each. What a family is, `base.py` says."""
