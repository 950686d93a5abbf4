"""The tools that a policy can call: one file each, called as the tool is."""

from streamrl.choices import Kind

TOOLS = Kind("task.args.tools", package="streamrl.tasks.tools", base="streamrl.tasks.tools.base:Tool")
