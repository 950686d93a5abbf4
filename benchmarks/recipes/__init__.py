"""What the recipes' sources say: the facts of configs/recipes, read out of Megatron-LM's and verl's own scripts."""
