"""What is asked and how it is scored: prompt sources, rewards, environments."""
