"""The algorithm as pure tensor functions: advantages, importance weights, losses, diagnostics.

Nothing here knows of processes, files or models. Equations: docs/algorithm.md.
"""
