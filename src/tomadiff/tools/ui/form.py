"""The left side of the page: what to draw, the settings, and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from tomadiff.tools.demo.embedded import EMBEDDED

from . import show
from .events import LIGHT, drawing
from .generation import CHOSEN, COUNTED, OFFERED, GenerationRequest, checked
from .look import number, pair
from .studio import Studio

METHOD_TITLES = {
    "tomadiff": "tomadiff, the default",
    "toma": "ToMA, as published",
    "toma_once": "ToMA once",
    "toma_tile": "ToMA tile",
    "toma_stripe": "ToMA stripe",
    "tome": "ToMe for SD",
    "tofu": "ToFu",
    "todo": "ToDo (75%)",
}
EMBEDDED_PROMPTS = "One of 96 things, such as: hot dog on yellow; palm tree on the left on pink"
FIELDS = ("prompt", "seed", "steps", "height", "width", "guidance", "ratio", "method")  # beside settings
METHOD_CHOICES = [(METHOD_TITLES.get(method, method), method) for method in OFFERED]


class Form:
    def __init__(self, studio: Studio, allow_models: bool) -> None:
        self.studio = studio
        embedded = studio.model in EMBEDDED
        self.model: Any = None  # a dropdown with --allow-models
        if allow_models:
            choices = list(dict.fromkeys([studio.own_model, *EMBEDDED]))
            self.model = gr.Dropdown(
                choices, value=studio.model, label="Model", allow_custom_value=True, elem_id="model"
            )
        self.prompt = gr.Textbox(
            "fox on blue" if embedded else "a red fox in the snow",
            label="Prompt",
            info=EMBEDDED_PROMPTS if embedded else None,
            max_length=studio.limits.prompt,
            lines=1 if embedded else 2,
            elem_id="prompt",
        )
        self.ratio = gr.Slider(
            0, 0.95, 0.5, step=0.05, label="Ratio", info="Share of the tokens removed", elem_id="ratio"
        )
        self.method = gr.Dropdown(METHOD_CHOICES, value=OFFERED[0], label="Method", elem_id="method")
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

    def generation(self, *values: Any) -> GenerationRequest:
        """The checked request from the values of `fields`."""
        settings = dict(zip(self.settings, values[len(FIELDS) :]))
        return checked(self.studio.limits, **dict(zip(FIELDS, values)), settings=settings)

    def draws(self, name: str, triggers: list, function: Callable, inputs: list, outputs: list) -> None:
        """Let triggers start a function that draws: it waits for its turn, and reports its progress."""
        # chained, so that an earlier cancellation is forgotten before the new work can start
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
    """A text field for a number or nothing: Gradio turns an empty number field into 0."""
    return gr.Textbox("", label=title, placeholder=empty, min_width=80, elem_id=name)
