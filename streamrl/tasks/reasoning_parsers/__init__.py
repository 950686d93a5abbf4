"""The forms in which models write their reasoning: one file a form."""
