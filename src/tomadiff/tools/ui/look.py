"""How the page looks: fonts, colours, and the pieces that its parts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

CSS, SCRIPT = Path(__file__).with_name("page.css"), Path(__file__).with_name("page.js")
SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif"]
MONO_FONTS = ["ui-monospace", "SF Mono", "Menlo", "DejaVu Sans Mono", "monospace"]


def theme() -> gr.themes.Base:
    """Gradio's plainest, with the fonts of the system: nothing is fetched from elsewhere."""
    base = gr.themes.Base(
        primary_hue="teal", neutral_hue="slate", font=SYSTEM_FONTS, font_mono=MONO_FONTS, radius_size="md"
    )
    return base.set(  # enough contrast on light and on dark backgrounds
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


def pair() -> gr.Row:
    """A row for two narrow components."""
    return gr.Row(elem_classes="pair")


def number(title: str, name: str, value: int | None) -> gr.Number:
    return gr.Number(value, label=title, precision=0, min_width=80, elem_id=name)


def picture(title: str, name: str, *buttons: str, kind: type = gr.Image, **more: Any) -> Any:
    """A picture that can be viewed in full screen."""
    shown = {"format": "png", "interactive": False, "buttons": [*buttons, "fullscreen"]}
    return kind(label=title, elem_id=name, **shown, **more)
