"""The merge map of each step."""

from __future__ import annotations

from typing import Any

import gradio as gr

from tomadiff.tools.drawing import cell_of, draw_merge_map

from . import show
from .events import LATEST, LIGHT
from .look import number, pair, picture
from .results import Comparison, Sweep
from .studio import Studio

SIDE = 640  # pixels of the map


class MapTab:
    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.result = gr.State(None)  # the key of the result in the studio
        with gr.Row(elem_id="map-columns"):
            with gr.Column(scale=3, min_width=300):
                self.map = picture("Merge map", "map")
            with gr.Column(scale=2, min_width=240):
                self.step = gr.Slider(
                    1, studio.usual_steps, 1, step=1, label="Denoising step", elem_id="map-step"
                )
                self.colours = gr.Radio(
                    [("of groups", True), ("of the picture", False)],
                    value=True,
                    label="Colours",
                    elem_id="map-colours",
                )
                with pair():
                    self.row = number("Row", "map-row", None)
                    self.column = number("Column", "map-column", None)
                self.about = gr.Markdown(
                    "Generate a picture first. Dots are destinations; tokens of one colour went to the same "
                    "one; thick lines are the borders of regions.",
                    elem_id="about-map",
                )
        chosen, place = [self.result, self.step, self.colours], [self.row, self.column]
        shown = [self.map, self.about]
        self.filled = [self.result, self.step, *place, *shown]
        changes = [self.step.change, self.colours.input, self.row.change, self.column.change]
        gr.on(changes, self.draw, [*chosen, *place], shown, **LATEST)
        # which draws by changing the place: a late answer to the slider can't come after it
        self.map.select(self.pick, [self.result, self.step], place, **LIGHT)

    def fill(self, name: str, result: Comparison) -> dict:
        """What `filled` holds for a new result: its first map."""
        first = min(result.maps, default=0) + 1
        drawn, about = map_of(result, first, True, None)
        return {
            self.result: name,
            # a slider needs two different ends, even for a single step
            self.step: gr.update(
                maximum=max(2, result.merged.steps), value=first, interactive=result.merged.steps > 1
            ),
            self.row: None,
            self.column: None,
            self.map: drawn,
            self.about: about,
        }

    def draw(self, name: Any, step: Any, groups: Any, row: Any, column: Any) -> tuple[Any, str]:
        return map_of(self.studio.result(name), step, groups, (row, column))

    def pick(self, name: Any, step: Any, event: gr.SelectData) -> tuple[int | None, int | None]:
        """The place of the token under the mouse, counted from 1."""
        result = self.studio.result(name)
        mapped = result.maps.get(step - 1) if isinstance(result, Comparison) else None
        if mapped is None:
            return None, None
        x, y = event.index
        cell = cell_of(mapped, SIDE)
        return int(y) // cell + 1, int(x) // cell + 1


def map_of(
    result: Comparison | Sweep | None, step: int, groups: bool, place: tuple[Any, Any] | None
) -> tuple[Any, str]:
    """The map of a step with the token at a place, counted from 1, and what there is to say."""
    if not isinstance(result, Comparison):
        return None, "There is no picture, or it is no longer kept: generate one."
    steps, picture = result.merged.steps, result.merged.picture
    mapped = result.maps.get(step - 1)
    if mapped is None:
        dense = f"**Step {step} of {steps}** is dense: all tokens went through as they are."
        return show.enlarged(picture, SIDE), result.no_maps or dense
    height, width = mapped.grid
    token = None
    if place and None not in place and 1 <= place[0] <= height and 1 <= place[1] <= width:
        token = int(place[0] - 1) * width + int(place[1] - 1)
    return draw_merge_map(picture, mapped, SIDE, bool(groups), token), show.about_map(mapped, steps, token)
