"""The generator role: runs groups on SGLang servers and takes in new weights."""
