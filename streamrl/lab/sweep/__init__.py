"""`streamrl sweep FILE`: many runs of one configuration that differ in some keys, each with several seeds."""
