"""How close pictures are to each other."""
