"""What another setting would have done: a model of the whole circle, calibrated from a run (`docs/simulate.md`)."""
