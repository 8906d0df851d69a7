"""`tomadiff selftest`: check that tomadiff works correctly on this machine, and measure what it gains."""
