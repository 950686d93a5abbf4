"""The tasks that are named by a word: one file each, called as the task is."""
