"""Fetch the Noto images from npm, and write the chosen ones, on white, as one lossless picture.

python scripts/train_emoji/sheet.py
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from PIL import Image

from tomadiff.tools.demo.data import EMOJI, SHEET, SHEET_COLUMNS, SIZE

PACKAGE = "emoji-datasource-google@16.0.0"


def read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    if member is None:
        raise ValueError(f"{PACKAGE} has no file {name}")
    return member.read()


def write_sheet(sheet: Path = SHEET) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
        (tarball,) = Path(folder).glob("*.tgz")
        with tarfile.open(tarball) as archive:
            files = {entry["short_name"]: entry["image"] for entry in json.loads(read(archive, "emoji.json"))}
            rows = -(-len(EMOJI) // SHEET_COLUMNS)
            picture = Image.new("RGB", (SHEET_COLUMNS * SIZE, rows * SIZE), "white")
            for i, short_name in enumerate(EMOJI.values()):
                emoji = Image.open(io.BytesIO(read(archive, f"img/google/64/{files[short_name]}")))
                emoji = emoji.convert("RGBA")
                picture.paste(emoji, (i % SHEET_COLUMNS * SIZE, i // SHEET_COLUMNS * SIZE), emoji)
    picture.save(sheet, optimize=True)


if __name__ == "__main__":
    write_sheet()
    print(f"{len(EMOJI)} emoji -> {SHEET}")
