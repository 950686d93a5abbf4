"""The forms in which models write calls of tools: one file a form."""
