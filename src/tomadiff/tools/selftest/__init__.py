"""`tomadiff selftest`: whether tomadiff does on this machine what it does elsewhere, and what it gains."""
