"""The tools that a policy can call: one file each, called as the tool is."""
