"""Several methods at several ratios, as a contact sheet and a plot, with downloads."""

from __future__ import annotations

from typing import Any

import gradio as gr

from tomadiff import settings_file
from tomadiff.tools.method_spec import label

from . import show
from .events import LIGHT, spoken, teller
from .form import METHOD_CHOICES, Form
from .generation import OFFERED, checked_sweep
from .look import picture
from .results import Sweep
from .studio import Studio

RATIOS = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)


class SweepTab:
    def __init__(self, studio: Studio, form: Form, exports: show.Exports) -> None:
        self.studio, self.form, self.exports = studio, form, exports
        self.result = gr.State(None)  # the key of the result in the studio
        with gr.Row():
            self.ratios = gr.CheckboxGroup(
                [(f"{ratio:g}", ratio) for ratio in RATIOS],
                value=[0.25, 0.5, 0.75],
                label="Ratios",
                elem_id="sweep-ratios",
            )
            self.methods = gr.CheckboxGroup(
                [("the form's settings", ""), *METHOD_CHOICES],
                value=[OFFERED[0], "tome"],
                label="Methods",
                elem_id="sweep-methods",
            )
        self.start = gr.Button("Run the sweep", variant="primary", elem_id="run-sweep")
        self.sheet = picture("Contact sheet", "sheet", visible=False)
        self.plot = picture("Quality against speed", "plot", visible=False)
        self.left_out = gr.Markdown(elem_id="left-out")
        with gr.Row(visible=False, elem_id="exports") as self.take_away:
            self.sheet_file = gr.DownloadButton("Sheet, PNG", elem_id="sheet-file")
            self.plot_file = gr.DownloadButton("Plot, PNG", elem_id="plot-file")
            self.cell = gr.Dropdown([], label="Settings of", scale=2, elem_id="cell")
            self.settings_file = gr.DownloadButton("Settings, JSON", elem_id="settings-file")
        shown = [self.result, self.sheet, self.plot, self.left_out]
        files = [self.take_away, self.cell, self.sheet_file, self.plot_file, self.settings_file]
        asked = [*form.fields, self.ratios, self.methods]
        form.draws("sweep", [self.start.click], self.run, asked, [*shown, *files])
        self.cell.input(self.choose, [self.result, self.cell], self.settings_file, **LIGHT)

    @spoken
    def run(self, request: gr.Request, progress: gr.Progress = gr.Progress(), *asked: Any) -> dict:  # noqa: B008
        *form, ratios, methods = asked
        generation = self.form.generation(*form)
        methods, ratios = checked_sweep(generation, methods, ratios)
        name, result = self.studio.sweep(generation, methods, ratios, request.session_hash, teller(progress))
        sheet = self.exports.sheet(name, result, self.studio.model)
        plot = self.exports.path(f"plot-{name}.png")
        show.plot(result, show.title(generation.request, self.studio.model), plot)
        cells = [label(*cell) for cell in result.cells]
        return {
            self.form.message: show.message(f"Done: {len(cells)} pictures, and the dense one."),
            self.result: name,
            self.sheet: gr.update(value=sheet, visible=True),
            self.plot: gr.update(value=plot, visible=True),
            self.left_out: "\n".join(f"- {reason}" for reason in result.left_out),
            self.take_away: gr.update(visible=True),
            self.cell: gr.update(choices=cells, value=cells[0]),
            self.sheet_file: str(sheet),
            self.plot_file: str(plot),
            self.settings_file: self.choose(name, cells[0]),
        }

    def choose(self, name: Any, chosen: Any) -> Any:
        """The settings file of one cell."""
        result = self.studio.result(name)
        if not isinstance(result, Sweep):
            return gr.skip()
        for number, (cell, merged) in enumerate(result.cells.items()):
            if label(*cell) == chosen:
                path = self.exports.path(f"settings-{name}-{number}.json")
                speedup = round(result.dense.seconds / merged.seconds, 3)
                notes = self.studio.notes(result.generation) | {
                    "speedup": speedup,
                    "psnr": show.decibels(merged),
                }
                settings_file.save(path, merged.config, notes)
                return str(path)
        return gr.skip()
