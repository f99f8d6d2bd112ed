"""The GLM-4 family: GLM-4, and the 0414 checkpoints of GLM-4 and GLM-Z1."""
