"""Models and data sets of the Hugging Face hub: where its cache has them, and how they come there."""
