"""Tests that a choice of one's own must pass, a module for each kind: they run under pytest, on a name or a path.

Those that streamrl brings pass them as well.
"""
