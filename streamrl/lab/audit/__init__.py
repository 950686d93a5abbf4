"""`streamrl audit RUN`: what a run recorded, checked against what it promised, by means that are not its own."""
