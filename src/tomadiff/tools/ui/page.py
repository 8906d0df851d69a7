"""The page: a form on the left, tabs with the results on the right."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from tomadiff.tools.demo.embedded import EMBEDDED

from . import show
from .code_tab import CodeTab
from .compare_tab import CompareTab
from .events import drawing, spoken
from .form import EMBEDDED_PROMPTS, Form
from .generation import checked_model
from .map_tab import MapTab
from .studio import Studio
from .sweep_tab import SweepTab


def build(studio: Studio, folder: Path, allow_models: bool = False) -> gr.Blocks:
    return Page(studio, show.Exports(folder / show.EXPORTS), allow_models).blocks


class Page:
    def __init__(self, studio: Studio, exports: show.Exports, allow_models: bool) -> None:
        self.studio = studio
        with gr.Blocks(title="tomadiff", analytics_enabled=False, delete_cache=(600, 3600)) as self.blocks:
            self.heading = gr.HTML(heading(studio), elem_id="heading")
            with gr.Row(elem_id="columns"):
                with gr.Column(scale=0, min_width=320, elem_id="controls"):
                    self.form = Form(studio, allow_models)
                with gr.Column(scale=1, min_width=320, elem_id="results"), gr.Tabs():
                    with gr.Tab("Compare", id="compare"):
                        compare_tab = CompareTab(studio, self.form)
                    with gr.Tab("Merge map", id="map"):
                        map_tab = MapTab(studio)
                    with gr.Tab("Sweep", id="sweep"):
                        SweepTab(studio, self.form, exports)
                    with gr.Tab("Code", id="code"):
                        CodeTab(studio, self.form)
            compare_tab.connect(map_tab)
            self.blocks.unload(self.form.stop)  # the user has left the page
            if self.form.model is not None:
                form = self.form
                changed = [form.message, self.heading, form.prompt, form.steps, form.height, form.width]
                form.model.input(
                    self.change_model, form.model, changed, api_visibility="private", **drawing(form.message)
                )

    @spoken
    def change_model(self, request: gr.Request, name: Any) -> dict:
        studio, form = self.studio, self.form
        studio.use_model(checked_model(name, studio.own_model), request.session_hash)
        height, width = studio.usual_size
        return {
            form.message: show.message(f"Ready: {studio.model}."),
            self.heading: heading(studio),
            form.prompt: gr.update(info=EMBEDDED_PROMPTS if studio.model in EMBEDDED else None),
            form.steps: studio.usual_steps,
            form.height: height,
            form.width: width,
        }


def heading(studio: Studio) -> str:
    return (
        "<h1>tomadiff</h1><p>The same noise, all tokens and fewer. "
        f"<code>{escape(studio.model)}</code> on {escape(studio.device)}</p>"
    )
