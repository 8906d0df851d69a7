"""The command answers at once where it needs no model, and ends quietly when it is interrupted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tomadiff.config import CHOICES, PRESETS
from tomadiff.tools import method_spec, samplers
from tomadiff.tools.arguments import names
from tomadiff.tools.bench.architectures import ARCHITECTURES
from tomadiff.tools.cli import COMMANDS
from tomadiff.tools.demo.embedded import EMBEDDED
from tomadiff.tools.evaluate.summary import METRICS
from tomadiff.tools.loading import DTYPES
from tomadiff.tools.rivals import RIVALS

HEAVY = {"torch", "numpy", "PIL", "diffusers", "transformers", "peft", "gradio"}
COMMAND = """
import sys
from tomadiff.__main__ import main
sys.argv = ["tomadiff", *{arguments!r}]
try:
    status = main()
except SystemExit as ended:
    status = ended.code
print("loaded:", *sorted({{name.partition(".")[0] for name in sys.modules}}))
sys.exit(status)
"""
# Ctrl-C at the moment when a module is looked for
INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, Interrupt())
sys.argv = ["tomadiff", "inspect", "no-such-model", "--depth", "-1"]
from tomadiff.__main__ import main
sys.exit(main())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--help"], 0, "list the supported architectures"),
        (["--version"], 0, ""),
        (["families"], 0, "UNet2DConditionModel"),
        (["families", "--refused"], 0, "UNet1DModel"),
        (["generat"], 2, "invalid choice: 'generat'"),
        (["generate", "fox", "--ration", "0.5"], 2, "unrecognized arguments: --ration"),
        (["generate", "fox", "--method", "tmoe"], 2, "invalid choice: 'tmoe'"),
        *([[command.name, "--help"], 0, "show this help message"] for command in COMMANDS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_needs_no_model_does_not_import_torch(arguments: list[str], status: int, says: str) -> None:
    done = python(COMMAND.format(arguments=arguments))
    assert done.returncode == status and says in done.stdout + done.stderr
    loaded = set(done.stdout.rpartition("loaded:")[2].split())
    assert "tomadiff" in loaded and not loaded & HEAVY


@pytest.mark.parametrize("module", ["tomadiff.tools.cli", "torch", "diffusers"])
def test_ctrl_c_while_it_starts_ends_quietly(module: str) -> None:
    done = python(INTERRUPTED.format(module=module, handler="signal.default_int_handler"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_process_that_ignores_ctrl_c_goes_on_doing_so() -> None:
    done = python(INTERRUPTED.format(module="torch", handler="signal.SIG_IGN"))
    assert (done.returncode, done.stderr) == (2, "tomadiff: --depth -1 must be at least 0\n"), (
        "and no warnings"
    )


def test_names_on_the_command_line_are_those_of_what_they_name() -> None:
    assert tuple(EMBEDDED) == names.EMBEDDED
    assert tuple(ARCHITECTURES) == names.ARCHITECTURES
    assert tuple(DTYPES) == names.DTYPES
    assert tuple(METRICS) == names.METRICS
    assert tuple(PRESETS) == names.PRESETS
    assert tuple(RIVALS) == names.RIVALS
    assert names.METHODS == method_spec.NAMES
    assert names.SAMPLERS == samplers.NAMES
    for setting, choices in names.CHOICES.items():  # the ideal is a limit of speed: its pictures are noise
        assert choices == tuple(choice for choice in CHOICES[setting] if choice != "ideal")
