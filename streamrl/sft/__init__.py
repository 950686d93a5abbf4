"""`streamrl sft`: supervised fine-tuning by the learner of a run alone, as the step before reinforcement learning."""
