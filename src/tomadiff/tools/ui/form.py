"""The left side of the page: what to draw, how to merge, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from tomadiff.tools.demo.embedded import EMBEDDED

from . import show
from .events import LIGHT, drawing
from .look import number, pair
from .studio import Studio
from .wish import CHOSEN, COUNTED, WAYS, Wish, checked

ABOUT_WAYS = {
    "tomadiff": "tomadiff, the default",
    "toma": "ToMA, as published",
    "toma_once": "ToMA once",
    "toma_tile": "ToMA tile",
    "toma_stripe": "ToMA stripe",
    "tome": "ToMe for SD",
    "tofu": "ToFu",
    "todo": "ToDo (75%)",
}
FIELDS = ("prompt", "seed", "steps", "height", "width", "guidance", "ratio", "method")  # beside settings
WAY_CHOICES = [(ABOUT_WAYS.get(way, way), way) for way in WAYS]


class Form:
    def __init__(self, studio: Studio, allow_models: bool) -> None:
        self.studio = studio
        embedded = studio.model in EMBEDDED
        self.model: Any = None  # a dropdown, where others may choose
        if allow_models:
            choices = list(dict.fromkeys([studio.own_model, *EMBEDDED]))
            self.model = gr.Dropdown(
                choices, value=studio.model, label="Model", allow_custom_value=True, elem_id="model"
            )
        self.prompt = gr.Textbox(
            "fox" if embedded else "a red fox in the snow",
            label="Prompt",
            info="One of 48 emoji, such as hot dog or palm tree" if embedded else None,
            max_length=studio.limits.prompt,
            lines=1 if embedded else 2,
            elem_id="prompt",
        )
        self.ratio = gr.Slider(
            0, 0.95, 0.5, step=0.05, label="Ratio", info="Share of the tokens removed", elem_id="ratio"
        )
        self.method = gr.Dropdown(WAY_CHOICES, value=WAYS[0], label="Method", elem_id="method")
        with pair():
            self.seed = number("Seed", "seed", 1)
            self.steps = number("Steps", "steps", studio.usual_steps)
        with gr.Accordion("Size and settings", open=False, elem_id="settings"):
            height, width = studio.usual_size
            with pair():
                self.width = number("Width", "width", width)
                self.height = number("Height", "height", height)
            with pair():
                self.guidance = field("Guidance", "guidance", "model's")
            self.settings: dict[str, Any] = {}
            names = [*CHOSEN, *COUNTED]
            for start in range(0, len(names), 2):
                with pair():
                    self.settings |= {name: setting(name) for name in names[start : start + 2]}
        with gr.Row(elem_id="actions"):
            self.generate = gr.Button("Generate", variant="primary", min_width=120, elem_id="generate")
            self.cancel = gr.Button("Cancel", min_width=80, elem_id="cancel")
        self.message = gr.HTML(
            show.message("Ready."), elem_id="message", min_height=64, container=False, padding=False
        )
        self.fields = [*(getattr(self, name) for name in FIELDS), *self.settings.values()]
        self.cancel.click(self.stop, None, None, **LIGHT)

    def wish(self, *values: Any) -> Wish:
        """What `fields` hold, checked."""
        settings = dict(zip(self.settings, values[len(FIELDS) :]))
        return checked(self.studio.limits, **dict(zip(FIELDS, values)), settings=settings)

    def draws(self, name: str, triggers: list, function: Callable, inputs: list, outputs: list) -> None:
        """Let one of the triggers start what takes its turn in the studio, and tells how far it is."""
        # chained, so that a cancel from before is forgotten before the new one can start
        gr.on(triggers, self.expect, None, None, **LIGHT).then(
            function, inputs, [self.message, *outputs], api_name=name, **drawing(self.message)
        )

    def expect(self, request: gr.Request) -> None:
        self.studio.expect(request.session_hash)

    def stop(self, request: gr.Request) -> None:
        self.studio.cancel(request.session_hash)


def setting(name: str) -> gr.Dropdown | gr.Textbox:
    title, place = name.replace("_", " ").capitalize(), f"setting-{name}"
    if name in COUNTED:
        return field(title, place, "own")
    words = {True: "yes", False: "no"}
    choices = [("own", None), *((words.get(value, value), value) for value in CHOSEN[name])]
    return gr.Dropdown(choices, value=None, label=title, min_width=80, elem_id=place)


def field(title: str, name: str, empty: str) -> gr.Textbox:
    """For a number or nothing: Gradio makes an empty field for numbers 0 once it is seen."""
    return gr.Textbox("", label=title, placeholder=empty, min_width=80, elem_id=name)
