"""Who does the work of an evaluation: this process, or a Ray cluster. Both draw the same pictures."""
