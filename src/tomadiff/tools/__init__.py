"""The commands, and everything behind them. Some need more packages than torch and diffusers."""
