"""Dense and merged beside each other, with the figures of both."""

from __future__ import annotations

from typing import Any

import gradio as gr

from tomadiff.tools.drawing import difference

from . import show
from .events import spoken, teller
from .form import Form
from .look import pair, picture
from .map_tab import MapTab
from .studio import Studio


class CompareTab:
    def __init__(self, studio: Studio, form: Form) -> None:
        self.studio, self.form = studio, form
        self.figures = gr.HTML(show.figures(None), elem_id="figures", padding=False)
        with gr.Row(elem_id="pictures"):
            with gr.Column(scale=3, min_width=300):
                self.slider = picture("Dense | merged", "before-after", kind=gr.ImageSlider, max_height=520)
            with gr.Column(scale=2, min_width=240):
                with pair():
                    self.dense = picture("Dense", "dense", "download", min_width=110)
                    self.merged = picture("Merged", "merged", "download", min_width=110)
                self.heat = picture("Difference", "heat", "download", min_width=110)

    def connect(self, map_tab: MapTab) -> None:
        """A new picture has its maps, too."""
        self.map_tab = map_tab
        shown = [self.slider, self.dense, self.merged, self.heat, self.figures, *map_tab.filled]
        starts = [self.form.generate.click, self.form.prompt.submit]
        self.form.draws("generate", starts, self.make, self.form.fields, shown)

    @spoken
    def make(self, request: gr.Request, progress: gr.Progress = gr.Progress(), *form: Any) -> dict:  # noqa: B008
        generation = self.form.generation(*form)
        name, result = self.studio.compare(generation, request.session_hash, teller(progress))
        heat, most = difference(result.dense.picture, result.merged.picture)
        dense, merged = show.enlarged(result.dense.picture), show.enlarged(result.merged.picture)
        message = show.message(f"Done: {show.title(generation.request, self.studio.model)}.")
        if generation.ratio and not result.merged.merged_steps:
            nothing = "Nothing was merged: all steps were dense."
            message = show.message(nothing, "mistake")
        return {
            self.form.message: message,
            self.slider: (dense, merged),
            self.dense: dense,
            self.merged: merged,
            self.heat: gr.update(value=show.enlarged(heat), label=f"Difference, brightest: {most} of 255"),
            self.figures: show.figures(result),
            **self.map_tab.fill(name, result),
        }
