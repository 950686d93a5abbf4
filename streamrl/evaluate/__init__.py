"""Evaluation: held-out prompts, answered by one version of the policy and judged."""
