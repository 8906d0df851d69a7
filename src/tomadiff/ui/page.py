"""The page itself: what is where, and which part of the studio answers to what."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from .. import settings
from ..demo.embedded import EMBEDDED
from ..named import label
from ..viz import cell_of, difference, merge_map
from . import show
from .gate import Gate
from .studio import Cancelled, Comparison, Drawn, Merged, Studio, Sweep
from .wish import CHOSEN, COUNTED, WAYS, Wish, checked, checked_model, code

HERE = Path(__file__).parent
RATIOS = (0.25, 0.5, 0.75)
MAP_SIDE = 640  # pixels
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
SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]
MONO_FONTS = ["ui-monospace", "SF Mono", "Menlo", "DejaVu Sans Mono", "monospace"]


def theme() -> gr.themes.Base:
    """Gradio's plainest, with the fonts of the system: nothing is fetched from elsewhere."""
    base = gr.themes.Base(
        primary_hue="teal", neutral_hue="slate", font=SYSTEM_FONTS, font_mono=MONO_FONTS, radius_size="md"
    )
    return base.set(  # dark enough on light, light enough on dark, to be read
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_300",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_300",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_text_color="white",
        color_accent="*primary_600",
        slider_color="*primary_600",
        checkbox_background_color_selected="*primary_600",
        checkbox_background_color_selected_dark="*primary_600",
    )


def build(studio: Studio, folder: Path, allow_models: bool = False) -> gr.Blocks:
    return Page(studio, folder, allow_models).blocks


def launch(
    blocks: gr.Blocks,
    folder: Path,
    *,
    host: str,
    port: int | None,
    auth: tuple[str, str] | None,
    most_waiting: int,
    only_here: bool,
    open_browser: bool = False,
) -> str:
    """Serve it from a thread of its own; returns its address."""
    around = [Middleware(Gate, folder=folder)]
    if only_here and auth is None:  # a name that somebody else points here is not for us
        names = ["localhost", "127.0.0.1", "[::1]", host]
        around.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False))
    # one light event for each slider move goes past the queue; what draws waits in it
    blocks.queue(max_size=most_waiting, api_open=False, default_concurrency_limit=1)
    _, url, _ = blocks.launch(
        server_name=host,
        server_port=port,
        auth=auth,
        inbrowser=open_browser,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        show_error=False,
        footer_links=[],
        run_history=False,
        allowed_paths=[str(folder)],
        max_file_size=0,
        state_session_capacity=64,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        css_paths=[HERE / "page.css"],
        js=(HERE / "page.js").read_text(),
        app_kwargs={"middleware": around, "docs_url": None, "redoc_url": None, "openapi_url": None},
    )
    return url


def spoken(function: Callable[..., dict]) -> Callable[..., dict]:
    """Turn what goes wrong into a message on the page; what nobody expected also goes to the terminal."""

    @wraps(function)
    def speaking(self: Page, *args: Any, **kwargs: Any) -> dict:
        try:
            return function(self, *args, **kwargs)
        except Cancelled:
            return {self.message: show.message("Cancelled.")}
        except (ValueError, OSError, ImportError) as error:
            return {self.message: show.message(str(error), "mistake")}
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            text = f"This should not happen: {type(error).__name__}: {error}"
            return {self.message: show.message(text[:300], "mistake")}

    return speaking


class Page:
    def __init__(self, studio: Studio, folder: Path, allow_models: bool) -> None:
        self.studio = studio
        self.exports = show.Exports(folder / "exports")
        with gr.Blocks(title="tomadiff", analytics_enabled=False, delete_cache=(600, 3600)) as self.blocks:
            self.result, self.swept = gr.State(None), gr.State(None)
            self.heading = gr.HTML(self.about_model(), elem_id="heading")
            with gr.Row(elem_id="columns"):
                with gr.Column(scale=0, min_width=320, elem_id="controls"):
                    self.controls(allow_models)
                with gr.Column(scale=1, min_width=320, elem_id="results"), gr.Tabs():
                    with gr.Tab("Compare", id="compare"):
                        self.compare_tab()
                    with gr.Tab("Merge map", id="map"):
                        self.map_tab()
                    with gr.Tab("Sweep", id="sweep"):
                        self.sweep_tab()
                    with gr.Tab("Code", id="code"):
                        self.code_tab()
            self.connect()

    # what is where

    def about_model(self) -> str:
        studio = self.studio
        return (
            "<h1>tomadiff</h1><p>The same noise, all tokens and fewer. "
            f"<code>{show.html.escape(studio.model)}</code> on {show.html.escape(studio.device)}</p>"
        )

    def controls(self, allow_models: bool) -> None:
        studio = self.studio
        embedded = studio.model in EMBEDDED
        self.model = None
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
        choices = [(ABOUT_WAYS.get(way, way), way) for way in WAYS]
        self.method = gr.Dropdown(choices, value=WAYS[0], label="Method", elem_id="method")
        with gr.Row(elem_classes="pair"):
            self.seed = gr.Number(1, label="Seed", precision=0, min_width=80, elem_id="seed")
            self.steps = gr.Number(
                studio.usual_steps, label="Steps", precision=0, min_width=80, elem_id="steps"
            )
        with gr.Accordion("Size and settings", open=False, elem_id="settings"):
            with gr.Row(elem_classes="pair"):
                height, width = studio.usual_size
                self.width = gr.Number(width, label="Width", precision=0, min_width=80, elem_id="width")
                self.height = gr.Number(height, label="Height", precision=0, min_width=80, elem_id="height")
            with gr.Row(elem_classes="pair"):
                self.guidance = gr.Textbox(
                    "", label="Guidance", placeholder="model's", min_width=80, elem_id="guidance"
                )
            self.settings = {}
            names = [*CHOSEN, *COUNTED]
            for left, right in zip(names[::2], [*names[1::2], None]):
                with gr.Row(elem_classes="pair"):
                    for name in filter(None, (left, right)):
                        self.settings[name] = self.setting(name)
        with gr.Row(elem_id="actions"):
            self.generate = gr.Button("Generate", variant="primary", min_width=120, elem_id="generate")
            self.cancel = gr.Button("Cancel", min_width=80, elem_id="cancel")
        self.message = gr.HTML(
            show.message("Ready."), elem_id="message", min_height=64, container=False, padding=False
        )

    def setting(self, name: str) -> gr.Dropdown | gr.Textbox:
        title = name.replace("_", " ").capitalize()
        if name in COUNTED:
            # Gradio makes an empty field for numbers 0 once it is seen
            return gr.Textbox("", label=title, placeholder="own", min_width=80, elem_id=f"setting-{name}")
        words = {True: "yes", False: "no"}
        choices = [("own", None), *((words.get(value, value), value) for value in CHOSEN[name])]
        return gr.Dropdown(choices, value=None, label=title, min_width=80, elem_id=f"setting-{name}")

    def compare_tab(self) -> None:
        self.figures = gr.HTML(show.figures(None), elem_id="figures", padding=False)
        with gr.Row(elem_id="pictures"):
            with gr.Column(scale=3, min_width=300):
                self.slider = gr.ImageSlider(
                    label="Dense | merged",
                    format="png",
                    interactive=False,
                    buttons=["fullscreen"],
                    max_height=520,
                    elem_id="before-after",
                )
            with gr.Column(scale=2, min_width=240):
                with gr.Row(elem_classes="pair"):
                    self.dense = self.picture("Dense", "dense")
                    self.merged = self.picture("Merged", "merged")
                self.heat = self.picture("Difference", "heat")

    def picture(self, title: str, name: str) -> gr.Image:
        return gr.Image(
            label=title,
            format="png",
            interactive=False,
            buttons=["download", "fullscreen"],
            min_width=110,
            elem_id=name,
        )

    def map_tab(self) -> None:
        with gr.Row(elem_id="map-columns"):
            with gr.Column(scale=3, min_width=300):
                self.map = gr.Image(
                    label="Merge map", format="png", interactive=False, buttons=["fullscreen"], elem_id="map"
                )
            with gr.Column(scale=2, min_width=240):
                self.map_step = gr.Slider(
                    1, self.studio.usual_steps, 1, step=1, label="Denoising step", elem_id="map-step"
                )
                self.colours = gr.Radio(
                    [("of groups", True), ("of the picture", False)],
                    value=True,
                    label="Colours",
                    elem_id="map-colours",
                )
                with gr.Row(elem_classes="pair"):
                    self.row = gr.Number(None, label="Row", precision=0, min_width=80, elem_id="map-row")
                    self.column = gr.Number(
                        None, label="Column", precision=0, min_width=80, elem_id="map-column"
                    )
                self.about_map = gr.Markdown(
                    "Generate a picture first. Dots are destinations; tokens of one colour went to the same "
                    "one; thick lines are the borders of regions.",
                    elem_id="about-map",
                )

    def sweep_tab(self) -> None:
        with gr.Row():
            self.sweep_ratios = gr.CheckboxGroup(
                [(f"{ratio:g}", ratio) for ratio in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)],
                value=list(RATIOS),
                label="Ratios",
                elem_id="sweep-ratios",
            )
            self.sweep_ways = gr.CheckboxGroup(
                [("the form's settings", ""), *((ABOUT_WAYS.get(way, way), way) for way in WAYS)],
                value=[WAYS[0], "tome"],
                label="Methods",
                elem_id="sweep-methods",
            )
        self.sweep = gr.Button("Run the sweep", variant="primary", elem_id="run-sweep")
        self.sheet = gr.Image(
            label="Contact sheet",
            format="png",
            interactive=False,
            buttons=["fullscreen"],
            visible=False,
            elem_id="sheet",
        )
        self.plot = gr.Image(
            label="Quality against speed",
            format="png",
            interactive=False,
            buttons=["fullscreen"],
            visible=False,
            elem_id="plot",
        )
        self.left_out = gr.Markdown(elem_id="left-out")
        with gr.Row(visible=False, elem_id="exports") as self.take_away:
            self.sheet_file = gr.DownloadButton("Sheet, PNG", elem_id="sheet-file")
            self.plot_file = gr.DownloadButton("Plot, PNG", elem_id="plot-file")
            self.cell = gr.Dropdown([], label="Settings of", scale=2, elem_id="cell")
            self.settings_file = gr.DownloadButton("Settings, JSON", elem_id="settings-file")

    def code_tab(self) -> None:
        gr.Markdown("The lines that make the merged picture, for the form as it is.")
        self.code = gr.Code(
            language="python",
            label="Python",
            interactive=False,
            buttons=["copy", "download"],
            elem_id="python",
        )
        gr.Markdown(
            "The same as a settings file, which `tomadiff.apply(pipe, 'settings.json')` and "
            "`tomadiff generate --settings settings.json` take."
        )
        self.settings_text = gr.Code(
            language="json",
            label="Settings",
            interactive=False,
            buttons=["copy", "download"],
            elem_id="settings-text",
        )

    # what does what

    def connect(self) -> None:
        form = [self.prompt, self.seed, self.steps, self.height, self.width, self.guidance]
        form += [self.ratio, self.method, *self.settings.values()]
        drawing = {"concurrency_id": "studio", "concurrency_limit": 1, "show_progress_on": self.message}
        light: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        latest: dict[str, Any] = {**light, "trigger_mode": "always_last"}
        shown = [self.slider, self.dense, self.merged, self.heat, self.figures]
        mapped = [self.map, self.about_map]
        files = [self.take_away, self.cell, self.sheet_file, self.plot_file, self.settings_file]
        # chained, so that a cancel from before is forgotten before the new one can start
        gr.on([self.generate.click, self.prompt.submit], self.expect, None, None, **light).then(
            self.make,
            form,
            [self.message, self.result, *shown, self.map_step, self.row, self.column, *mapped],
            api_name="generate",
            **drawing,
        )
        self.sweep.click(self.expect, None, None, **light).then(
            self.run_sweep,
            [*form, self.sweep_ratios, self.sweep_ways],
            [self.message, self.swept, self.sheet, self.plot, self.left_out, *files],
            api_name="sweep",
            **drawing,
        )
        self.cancel.click(self.stop, None, None, **light)
        self.blocks.unload(self.stop)  # nobody is there any more to look at it
        where = [self.result, self.map_step, self.colours, self.row, self.column]
        gr.on([self.map_step.change, self.colours.input], self.draw_map, where, mapped, **latest)
        gr.on([self.row.input, self.column.input], self.draw_map, where, mapped, **latest)
        self.map.select(
            self.pick, [self.result, self.map_step, self.colours], [self.row, self.column, *mapped], **light
        )
        gr.on(
            [self.blocks.load, *(part.change for part in form)],
            self.write_code,
            form,
            [self.code, self.settings_text],
            **latest,
        )
        self.cell.input(self.choose_cell, [self.swept, self.cell], self.settings_file, **light)
        if self.model is not None:
            self.model.input(
                self.change_model,
                self.model,
                [self.message, self.heading, self.prompt, self.steps, self.height, self.width],
                api_visibility="private",
                **drawing,
            )

    def wish(self, prompt: Any, seed: Any, steps: Any, height: Any, width: Any, *rest: Any) -> Wish:
        guidance, ratio, method, *values = rest
        return checked(
            self.studio.limits,
            prompt=prompt,
            seed=seed,
            steps=steps,
            height=height,
            width=width,
            guidance=guidance,
            ratio=ratio,
            method=method,
            settings=dict(zip(self.settings, values)),
        )

    @spoken
    def make(self, request: gr.Request, progress: gr.Progress = gr.Progress(), *form: Any) -> dict:  # noqa: B008
        wish = self.wish(*form)
        name, result = self.studio.compare(wish, request.session_hash, teller(progress))
        heat, most = difference(result.dense.picture, result.merged.picture)
        dense, merged = show.enlarged(result.dense.picture), show.enlarged(result.merged.picture)
        first = min(result.maps, default=0)
        drawn, about = self.map_of(result, first + 1, True, None)
        said = f"Done: {show.title(wish.request, self.studio.model)}."
        nothing = wish.ratio and not result.merged.merged_steps
        if nothing:
            said = "Nothing was merged: all steps were dense. Take more steps, or fewer dense ones."
        return {
            self.message: show.message(said, "mistake" if nothing else "note"),
            self.result: name,
            self.slider: (dense, merged),
            self.dense: dense,
            self.merged: merged,
            self.heat: gr.update(value=show.enlarged(heat), label=f"Difference, brightest: {most} of 255"),
            self.figures: show.figures(result),
            self.map_step: gr.update(maximum=wish.request.steps, value=first + 1),
            self.row: None,
            self.column: None,
            self.map: drawn,
            self.about_map: about,
        }

    @spoken
    def run_sweep(self, request: gr.Request, progress: gr.Progress = gr.Progress(), *sent: Any) -> dict:  # noqa: B008
        *form, ratios, ways = sent
        wish = self.wish(*form)
        ways = [way or wish.way for way in checked_list("method", ways, ["", *WAYS])]
        ratios = [checked_ratio(ratio) for ratio in checked_list("ratio", ratios)]
        name, result = self.studio.sweep(wish, ways, ratios, request.session_hash, teller(progress))
        sheet = self.exports.sheet(name, result, self.studio.model)
        plot = self.exports.path(f"plot-{name}.png")
        show.plot(result, show.title(wish.request, self.studio.model), plot)
        cells = [label(*cell) for cell in result.cells]
        return {
            self.message: show.message(f"Done: {len(cells)} pictures, and the dense one."),
            self.swept: name,
            self.sheet: gr.update(value=sheet, visible=True),
            self.plot: gr.update(value=plot, visible=True),
            self.left_out: "\n".join(f"- {reason}" for reason in result.left_out),
            self.take_away: gr.update(visible=True),
            self.cell: gr.update(choices=cells, value=cells[0]),
            self.sheet_file: str(sheet),
            self.plot_file: str(plot),
            self.settings_file: self.choose_cell(name, cells[0]),
        }

    def expect(self, request: gr.Request) -> None:
        self.studio.expect(request.session_hash)

    def stop(self, request: gr.Request) -> None:
        self.studio.cancel(request.session_hash)

    def draw_map(self, name: Any, step: Any, groups: Any, row: Any, column: Any) -> tuple[Any, str]:
        return self.map_of(self.studio.result(name), step, groups, (row, column))

    def pick(self, name: Any, step: Any, groups: Any, event: gr.SelectData) -> tuple[Any, Any, Any, str]:
        result = self.studio.result(name)
        mapped = result.maps.get(step - 1) if isinstance(result, Comparison) else None
        if mapped is None:
            return None, None, *self.map_of(result, step, groups, None)
        x, y = event.index
        cell = cell_of(mapped, MAP_SIDE)
        place = (int(y) // cell + 1, int(x) // cell + 1)
        return *place, *self.map_of(result, step, groups, place)

    def map_of(
        self, result: Comparison | Sweep | None, step: int, groups: bool, place: tuple[Any, Any] | None
    ) -> tuple[Any, str]:
        """The map of a step with the token at a place, counted from 1, and what there is to say."""
        if not isinstance(result, Comparison):
            return None, "There is no picture, or it is no longer kept: generate one."
        steps, picture = result.merged.steps, result.merged.picture
        mapped = result.maps.get(step - 1)
        if mapped is None:
            why = (
                result.no_maps or f"**Step {step} of {steps}** is dense: all tokens went through as they are."
            )
            return show.enlarged(picture, MAP_SIDE), why
        height, width = mapped.grid
        token = None
        if place and None not in place and 1 <= place[0] <= height and 1 <= place[1] <= width:
            token = int(place[0] - 1) * width + int(place[1] - 1)
        return merge_map(picture, mapped, MAP_SIDE, bool(groups), token), show.about_map(mapped, steps, token)

    def write_code(self, *form: Any) -> tuple[str, str]:
        studio = self.studio
        try:
            wish = self.wish(*form)
            config = wish.config(studio.family)
        except ValueError as error:
            return f"# {error}", ""
        return code(wish, studio.model, studio.device, studio.dtype), settings.dumps(config, self.notes(wish))

    def notes(self, wish: Wish, merged: Merged | None = None, dense: Drawn | None = None) -> dict[str, Any]:
        """Where a settings file comes from."""
        notes = {"model": self.studio.model, "device": self.studio.device, "dtype": self.studio.dtype}
        notes |= {"steps": wish.request.steps, "size": list(wish.request.size)}
        if merged is not None and dense is not None:
            notes |= {"speedup": round(dense.seconds / merged.seconds, 3), "psnr": show.decibels(merged)}
        return notes

    def choose_cell(self, name: Any, chosen: Any) -> Any:
        """The settings file of one cell of a sweep."""
        result = self.studio.result(name)
        if not isinstance(result, Sweep):
            return gr.skip()
        for number, (cell, merged) in enumerate(result.cells.items()):
            if label(*cell) == chosen:
                path = self.exports.path(f"settings-{name}-{number}.json")
                settings.save(path, merged.config, self.notes(result.wish, merged, result.dense))
                return str(path)
        return gr.skip()

    @spoken
    def change_model(self, request: gr.Request, name: Any) -> dict:
        self.studio.use_model(checked_model(name, self.studio.own_model), request.session_hash)
        height, width = self.studio.usual_size
        embedded = self.studio.model in EMBEDDED
        return {
            self.message: show.message(f"Ready: {self.studio.model}."),
            self.heading: self.about_model(),
            self.prompt: gr.update(info="One of 48 emoji" if embedded else None),
            self.steps: self.studio.usual_steps,
            self.height: height,
            self.width: width,
        }


def checked_list(name: str, values: Any, known: list[Any] | None = None) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"Choose at least one {name}.")
    if known is not None and any(value not in known for value in values):
        raise ValueError(f"There is an unknown {name} among {values!r}"[:200])
    return values


def checked_ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"ratio: {value!r} must be above 0 and below 1"[:200])
    return float(value)


def teller(progress: gr.Progress) -> Callable[[float, str], None]:
    return lambda share, text: progress(share, desc=text)
