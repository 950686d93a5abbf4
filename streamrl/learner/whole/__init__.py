"""Models of transformers' own classes, whole on every rank: `model.implementation: transformers`."""
