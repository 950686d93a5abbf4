"""The learner: Megatron-Core model, packed steps, checkpoints and Hugging Face conversion."""
