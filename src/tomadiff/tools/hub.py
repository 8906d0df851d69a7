"""Whether the hub of models can be reached."""

from __future__ import annotations

import huggingface_hub


def trouble() -> str | None:
    """Why the hub can't be reached; waits only briefly, while its own client retries for half a minute."""
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=5)
        return None
    except Exception as error:  # the HTTP library has many
        return str(error).strip() or type(error).__name__
