"""The bounded buffer between generation and training, its journal and its service."""
