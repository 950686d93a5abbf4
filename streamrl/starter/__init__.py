"""What helps before the first run: a folder with a commented configuration, and the schema for editors."""
