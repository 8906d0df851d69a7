"""Evaluate methods by the pictures they make: `tomadiff eval`."""
