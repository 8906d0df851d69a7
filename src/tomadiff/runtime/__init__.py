"""What happens while a patched model runs."""
