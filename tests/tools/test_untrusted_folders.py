"""Nothing in a model's folder runs unless the user says so, and what is harmless loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from PIL import Image
from pipelines import make, whole_pipeline

from tomadiff.tools import cli
from tomadiff.tools.loading import load, load_model
from tomadiff.tools.ui.studio import Studio

Attack = Callable[[Path, "Trap"], str]  # what should be said to it


class Trap:
    """Code that leaves a file where it ran, in several places of a model's folder."""

    def __init__(self, folder: Path) -> None:
        self.sprung = folder / "sprung"
        self.code = f"open({str(self.sprung)!r}, 'w').close()\n"

    def __reduce__(self) -> Any:  # when it is unpickled
        return exec, (self.code,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_pipeline(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever asks gets consent
    return Trap(tmp_path)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def custom_pipeline(folder: Path, trap: Trap) -> str:
    (folder / "evil.py").write_text(trap.code)
    change(folder / "model_index.json", _class_name=["evil", "Evil"])
    return "as its pipeline, which is code of its own"


def community_pipeline(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", _class_name=["lpw_stable_diffusion", "Pipeline"])
    return "as its pipeline, which is code of its own"


def custom_component(folder: Path, trap: Trap) -> str:
    (folder / "unet" / "evil.py").write_text(trap.code)
    change(folder / "model_index.json", unet=["evil", "Evil"])
    return "'evil', which is none of the libraries"


def python_file(folder: Path, trap: Trap) -> str:
    (folder / "unet" / "diffusers.py").write_text(trap.code)
    return "diffusers.py is Python code that comes with the model"


def installed_module(folder: Path, trap: Trap) -> str:
    (trap.sprung.parent / "innocent.py").write_text(trap.code)
    change(folder / "model_index.json", unet=["innocent", "Evil"])
    return "'innocent', which is none of the libraries"


def module_in_use(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", unet=["subprocess", "Popen"])
    return "'subprocess', which is none of the libraries"


def function_of_a_library(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", unet=["transformers", "pipeline"])
    return "has no such class"


def pipeline_in_a_pipeline(folder: Path, trap: Trap) -> str:
    inner = folder / "unet"
    (inner / "evil.py").write_text(trap.code)
    (inner / "model_index.json").write_text(json.dumps({"_class_name": ["evil", "Evil"]}))
    change(folder / "model_index.json", unet=["diffusers", "StableDiffusionPipeline"])
    return "as its pipeline, which is code of its own"


def pickled_weights(folder: Path, trap: Trap) -> str:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"weight": trap}, folder / "unet" / "diffusion_pytorch_model.bin")
    return "is a pickle"


def automatic_class(folder: Path, trap: Trap) -> str:
    change(folder / "text_encoder" / "config.json", auto_map={"AutoModel": "evil--evil.Evil"})
    return "asks for code from elsewhere by 'auto_map'"


def consent_in_a_file(folder: Path, trap: Trap) -> str:
    change(folder / "text_encoder" / "config.json", text_config={"trust_remote_code": True})
    return "by 'trust_remote_code'"


def kernel_from_the_hub(folder: Path, trap: Trap) -> str:
    change(folder / "text_encoder" / "config.json", _attn_implementation_internal="evil/kernel")
    return "by '_attn_implementation_internal'"


def folder_elsewhere(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", **{"../unet": ["diffusers", "UNet2DConditionModel"]})
    return "is no library and class"


ATTACKS = [
    custom_pipeline,
    community_pipeline,
    custom_component,
    python_file,
    installed_module,
    module_in_use,
    function_of_a_library,
    pipeline_in_a_pipeline,
    pickled_weights,
    automatic_class,
    consent_in_a_file,
    kernel_from_the_hub,
    folder_elsewhere,
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_a_folder_runs(
    attack: Attack, folder: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder.parent)
    said = attack(folder, trap)
    with pytest.raises(ValueError, match=r"(won't|can't) load") as refusal:
        load(str(folder))
    assert said in str(refusal.value) and not trap.sprung.exists()


def test_whoever_trusts_a_folder_says_so(
    folder: Path, trap: Trap, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "evil.py").write_text(
        trap.code
        + "from diffusers import StableDiffusionPipeline\nclass Evil(StableDiffusionPipeline): pass\n"
    )
    change(folder / "model_index.json", _class_name=["evil", "Evil"])
    output = folder.parent / "x.png"
    command = ["generate", "fox", "--model", str(folder), "--steps", "1", "--size", "128", "128"]
    assert cli.main([*command, "-o", str(output)]) == 2
    assert "add --trust-remote-code" in capsys.readouterr().err and not trap.sprung.exists()
    assert cli.main([*command, "-o", str(output), "--trust-remote-code"]) == 0
    assert trap.sprung.exists() and Image.open(output).size == (128, 128)


def test_trust_in_the_pages_own_model_is_none_in_what_the_page_chooses(folder: Path, trap: Trap) -> None:
    custom_component(folder, trap)
    studio = Studio("emoji-flux", trust_remote_code=True)
    with pytest.raises(ValueError, match="won't load"):
        studio.use_model(str(folder), "somebody")
    assert not trap.sprung.exists() and studio.model == "emoji-flux"


@pytest.mark.parametrize("name", ["emoji-unet", "emoji-flux"])
def test_a_saved_copy_of_an_embedded_pipeline_is_a_model_too(name: str, tmp_path: Path) -> None:
    original = load(name)
    original.save_pretrained(tmp_path / "copy")
    for trusting in (False, True):
        copy = load(str(tmp_path / "copy"), trust_remote_code=trusting)
        assert type(copy) is type(original)
        weights = dict(copy.text_encoder.named_parameters())
        for key, weight in original.text_encoder.named_parameters():
            assert torch.equal(weights[key], weight)


def test_a_model_alone_is_checked_too(tmp_path: Path, trap: Trap) -> None:
    make("sd1").unet.save_pretrained(tmp_path / "unet")
    assert load_model(tmp_path / "unet", "cpu", "fp32").config.sample_size
    (tmp_path / "unet" / "evil.py").write_text(trap.code)
    change(tmp_path / "unet" / "config.json", auto_map={"AutoModel": "evil.Evil"})
    with pytest.raises(ValueError, match="is Python code"):
        load_model(tmp_path / "unet", "cpu", "fp32")
    assert not trap.sprung.exists()


@pytest.mark.parametrize("attack", [custom_component, pickled_weights])
def test_files_from_the_hub_are_checked_before_they_are_used(
    attack: Attack,
    folder: Path,
    trap: Trap,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was downloaded before is in a cache, from which it is taken where the hub is out of reach."""
    commit, cached = "0" * 40, tmp_path / "hub" / "models--some--body"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(folder, cached / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load("some/body").unet.config.sample_size
    said = attack(cached / "snapshots" / commit, trap)
    with pytest.raises(ValueError, match="won't load 'some/body'") as refusal:
        load("some/body")
    assert said in str(refusal.value) and not trap.sprung.exists()
