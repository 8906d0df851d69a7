"""A page in the browser that shows what merging does: `tomadiff ui`."""
