"""What the reward of an answer is made of: one file a choice."""
