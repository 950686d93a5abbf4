"""Images of prompts in the learner: from encoded files to features in the places of the image tokens."""
