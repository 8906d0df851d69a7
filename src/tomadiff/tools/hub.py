"""Whether the hub of models can be reached."""

from __future__ import annotations

import huggingface_hub


def trouble() -> str | None:
    """Why the hub is out of reach, after a short wait: its own client tries again for half a minute."""
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=5)
        return None
    except Exception as error:  # of the HTTP library
        return str(error).strip() or type(error).__name__
