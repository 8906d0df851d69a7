"""The arguments of every command.

Nothing here imports torch, so that `--help` and a mistyped argument are answered at once. The command itself
is imported after its arguments are parsed (tools/cli.py).
"""
