"""The current form as Python code and as a settings file."""

from __future__ import annotations

from typing import Any

import gradio as gr

from tomadiff import settings_file

from .events import LATEST
from .form import Form
from .generation import code
from .studio import Studio


class CodeTab:
    def __init__(self, studio: Studio, form: Form) -> None:
        self.studio, self.form = studio, form
        gr.Markdown("The lines that make the merged picture, for the form as it is.")
        python = listing("Python", "python", "python")
        gr.Markdown(
            "The same as a settings file, which `tomadiff.apply(pipe, 'settings.json')` and "
            "`tomadiff generate --settings settings.json` take."
        )
        file = listing("Settings", "settings-text", "json")
        # without triggers: when the page loads, and when a field changes
        gr.on(None, self.write, form.fields, [python, file], **LATEST)

    def write(self, *form: Any) -> tuple[str, str]:
        studio = self.studio
        try:
            generation = self.form.generation(*form)
            config = generation.config(studio.family)
        except ValueError as error:
            return f"# {error}", ""
        lines = code(generation, studio.model, studio.device, studio.dtype, studio.offload)
        return lines, settings_file.dumps(config, studio.notes(generation))


def listing(title: str, name: str, language: str) -> gr.Code:
    buttons = ["copy", "download"]
    return gr.Code(language=language, label=title, interactive=False, buttons=buttons, elem_id=name)
