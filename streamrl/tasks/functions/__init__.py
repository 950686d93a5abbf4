"""Tasks made of a user's functions: rewards, tools and environments as Python objects, over the rows of a data set."""
