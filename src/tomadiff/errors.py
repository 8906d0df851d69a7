"""What can go wrong, each with a message that says what to do."""


class ConfigError(ValueError):
    """A setting that is unknown, out of range, in conflict with another, or that this model can't honour."""


class UnsupportedModelError(ValueError):
    """A model with nothing to merge."""


class NotPatchedError(ValueError):
    """A question about merging on a model that has none."""
