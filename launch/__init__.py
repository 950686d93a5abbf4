"""Launching on several machines, and models to begin with.

`launch` in a clone, and `streamrl.launch` wherever streamrl is installed: one folder, which its modules therefore name
by relative imports.
"""
