"""What can go wrong, each with a message that says what to do."""


class ConfigError(ValueError):
    """A setting that is unknown, out of range, in conflict with another, or that this model can't honour."""


class UnsupportedModelError(ValueError):
    """A model with nothing to merge."""


class NotPatchedError(ValueError):
    """A question about merging on a model that has none."""


def reason(error: BaseException) -> str:
    """An exception in one line: its first cause, and of many lines the one that says what is wrong.

    Compilers wrap what went wrong in exceptions of their own, torch's in `inner_exception`. Where the first
    line ends with a colon, it tells the place, and the last line what is wrong there.
    """
    seen = [error]  # a cause may be raised from itself
    while (inner := error.__cause__ or getattr(error, "inner_exception", None)) and inner not in seen:
        error = inner
        seen.append(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1 if lines[0].endswith(':') else 0]}" if lines else repr(error)
