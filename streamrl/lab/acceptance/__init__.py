"""`streamrl doctor --gpu`: what the first hour on a GPU machine has to show, check by check, with a table at the end.

    command ──▶ one process a check, with its deadline (`child`) ──▶ runs of the product itself (`trial`) ──▶ its record
                                                                                                         ──▶ a verdict

`check.py` says what a check is, `checks.py` is the table of them, the other files are the checks by what they look at.
What a check starts is what a user would start: `streamrl train`, `replay`, `retrain`. On a machine without GPUs the
same checks run on gloo and the CPU; what only a GPU can show is skipped, with the reason.
"""
