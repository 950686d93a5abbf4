"""Adapters of libraries of environments: what runs in a virtual environment of the library's own.

They need Python's standard library, that library, and of streamrl nothing but each other and `tasks/order.py`.
"""
