"""How events are handled: light ones at once, drawing in a queue, errors as messages on the page."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import gradio as gr

from . import show
from .runner import Cancelled, Tell

# handled at once, outside of the queue for drawing
LIGHT: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
# of many in a row, such as a slider's, only the last is handled
LATEST: dict[str, Any] = {**LIGHT, "trigger_mode": "always_last"}


def drawing(message: gr.HTML) -> dict[str, Any]:
    return {"concurrency_id": "studio", "concurrency_limit": 1, "show_progress_on": message}


def spoken(function: Callable[..., dict]) -> Callable[..., dict]:
    """Turn errors into messages on the page; unexpected ones are also printed on the terminal."""

    @wraps(function)
    def speaking(self: Any, *args: Any, **kwargs: Any) -> dict:
        try:
            return function(self, *args, **kwargs)
        except Cancelled:
            return {self.form.message: show.message("Cancelled.")}
        except (ValueError, OSError, ImportError) as error:
            return {self.form.message: show.message(str(error), "mistake")}
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            text = f"This should not happen: {type(error).__name__}: {error}"
            return {self.form.message: show.message(text[:300], "mistake")}

    return speaking


def teller(progress: gr.Progress) -> Tell:
    return lambda share, text: progress(share, desc=text)
