"""Build the wheel, check what is in it, and use it in a clean environment: `make wheel-test`.

torch and the other dependencies come from the environment that runs this, tomadiff from the wheel alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = (
    "tomadiff/py.typed",
    "tomadiff/tools/demo/NOTICE",
    "tomadiff/tools/demo/models/flux/model_index.json",
    "tomadiff/tools/evaluate/imagenet.txt",
    "tomadiff/tools/ui/page.css",
)
UNWANTED = ("train", "distill", "test_", "conftest")  # beginnings of file names
SMALL = ("--steps", "2", "--size", "32", "32")
API = """
import sys, torch, tomadiff
from tomadiff.tools.loading import load

assert tomadiff.__file__.startswith(sys.prefix), tomadiff.__file__
pipe = load("emoji-flux")

def draw():
    noise = torch.Generator().manual_seed(0)
    return pipe("fox", num_inference_steps=2, height=32, width=32, generator=noise, output_type="pt").images

before = draw()
with tomadiff.merged(pipe, ratio=0.5):
    assert not torch.equal(draw(), before)
    print(tomadiff.report(pipe))
assert torch.equal(draw(), before)
"""


def build(folder: Path) -> Path:
    """From a copy: setuptools would put what an earlier build left behind into the wheel, too."""
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_content(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in NEEDED if name not in names]
    extra = [name for name in names if Path(name).name.startswith(UNWANTED)]
    outside = [name for name in names if not name.startswith(("tomadiff/", "tomadiff-"))]
    if missing or extra or outside:
        raise SystemExit(f"{wheel.name}: missing {missing}, not wanted {extra + outside}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 2**20:.1f} MB")


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel; the paths of our own packages come last in it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tomadiff-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        check_content(wheel)
        python = install(wheel, folder / "venv")
        command = folder / "venv" / "bin" / "tomadiff"
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        clean["OMP_NUM_THREADS"] = "1"  # small pictures: more threads only wait for each other
        for arguments in (
            [command, "families"],
            [
                command,
                "generate",
                "fox",
                "--steps",
                "2",
                "--size",
                "32",
                "32",
                "--ratio",
                "0.5",
                "-o",
                "fox.png",
            ],
            [python, "-c", API],
        ):
            subprocess.run(arguments, cwd=folder, env=clean, check=True, stdout=subprocess.DEVNULL)
        if not (folder / "fox.png").is_file():
            raise SystemExit("tomadiff generate wrote no picture")
    print("the wheel works: families, generate, and the Python API")


if __name__ == "__main__":
    main()
