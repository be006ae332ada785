"""The plan of a step made on the GPU."""
