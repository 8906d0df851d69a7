"""Settings files: what was asked for comes back, and what is wrong with a file is said."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import draw, make
from tiny import build, tiny

import tomadiff
from tomadiff import Config, settings_file
from tomadiff.__main__ import formatted
from tomadiff.config import ConfigFields
from tomadiff.core import RefreshSchedule
from tomadiff.errors import ConfigError
from tomadiff.models import sana, unet
from tomadiff.tools.cli import main
from tomadiff.tools.method_spec import configuration, pairs

CONFIGS: list[dict[str, Any]] = [
    {},
    {"ratio": {1: 0.75, 2: 0.25}},
    {"ratio": {"block": 0.5}, "where": "block", "share": "kind", "shift": True},
    {"where": "module", "modules": ("self", "mlp"), "weigh_keys": True, "interval": 2},
    {"where": "kv", "interval": [0, 1, 4]},
    {"method": "tome", "where": "block"},
    {"method": "todo"},
    {"ratio": [(0, 0.25), (0.5, {1: 0.75})], "dense_last_blocks": 1},
]


@pytest.mark.parametrize("given", CONFIGS, ids=str)
def test_a_config_comes_back_from_its_file_and_from_its_way(given: dict[str, Any], tmp_path: Path) -> None:
    config = tomadiff.Config(**given)
    settings_file.save(tmp_path / "some.json", config, {"device": "abacus", "psnr": 41.5})
    found = settings_file.load(tmp_path / "some.json")
    assert found.config == config and found.notes == {"device": "abacus", "psnr": 41.5}
    ((method, ratio),), left_out = pairs([str(tmp_path / "some.json")], [0.1], unet.FAMILY)
    assert configuration(method, ratio, unet.FAMILY).resolve() == config.resolve() and not left_out


def test_a_config_holds_what_was_asked_and_resolves_to_what_a_model_offers() -> None:
    config = Config(ratio=0.25, interval=[0, 1, 3])
    assert config.asked() == {"interval": (0, 1, 3), "ratio": 0.25} and config.where is None
    assert config.resolve(unet.FAMILY).where == "span" and config.resolve(sana.FAMILY).where == "module"
    model = build(tiny("sana"))
    assert tomadiff.report(tomadiff.apply(model, Config(ratio=0.25))).settings["where"] == "module"


def test_a_preset_takes_its_refreshes_from_the_family_also_in_a_file(tmp_path: Path) -> None:
    config = Config(preset="toma_tile", refresh_weights=5)
    settings_file.save(tmp_path / "some.json", config)
    assert settings_file.load(tmp_path / "some.json").config == config
    assert config.resolve(unet.FAMILY).refresh == RefreshSchedule(10, 5)
    with pytest.raises(ConfigError, match="must be a multiple"):
        config.resolve(sana.FAMILY)  # where the paper keeps plans for a single step


def test_what_was_resolved_can_be_asked_for() -> None:
    for given in CONFIGS:
        resolved = Config(**given).resolve()
        assert Config(**resolved.to_dict()).resolve() == resolved


def test_a_file_has_only_what_was_asked_for(tmp_path: Path) -> None:
    settings_file.save(tmp_path / "some.json", tomadiff.Config(ratio=0.25, interval=4))
    content = json.loads((tmp_path / "some.json").read_text())
    assert content["config"] == {"interval": 4, "ratio": 0.25}


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(
        settings_file.dumps(tomadiff.Config(ratio=0.25)), encoding="utf-8-sig"
    )
    assert settings_file.load(tmp_path / "some.json").config.ratio == 0.25


def test_apply_and_merged_take_a_file_by_name_or_path(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    settings_file.save(path, tomadiff.Config(ratio={1: 0.5}, where="block"))
    pipe = make("sd1")
    tomadiff.apply(pipe, ratio={1: 0.5}, where="block")
    expected = draw(pipe)
    tomadiff.apply(pipe, str(path))
    assert torch.equal(draw(pipe), expected)
    tomadiff.remove(pipe)
    with tomadiff.merged(pipe, path):
        assert torch.equal(draw(pipe), expected)


def test_a_file_means_what_keywords_would(tmp_path: Path) -> None:
    """Also in a model that has no whole blocks to merge: what a file leaves out is as that model allows."""
    model, path = build(tiny("sana")), tmp_path / "some.json"
    path.write_text('{"tomadiff settings": 1, "config": {"ratio": 0.25}}')
    expected = tomadiff.report(tomadiff.apply(model, ratio=0.25)).settings
    assert tomadiff.report(tomadiff.apply(model, path)).settings == expected
    path.write_text('{"tomadiff settings": 1, "config": {"where": "span"}}')
    with pytest.raises(ConfigError, match="sana offers kv, module"):
        tomadiff.apply(model, path)


def test_a_file_and_keywords_together_are_refused(tmp_path: Path) -> None:
    settings_file.save(tmp_path / "some.json", tomadiff.Config())
    with pytest.raises(ConfigError, match="not both"):
        tomadiff.apply(make("sd1"), tmp_path / "some.json", ratio=0.25)


def test_a_config_that_does_not_fit_the_model_is_refused_as_ever(tmp_path: Path) -> None:
    settings_file.save(tmp_path / "some.json", tomadiff.Config(ratio={16: 0.5}))
    with pytest.raises(ConfigError, match="it has 1, 2, 'block'"):
        tomadiff.apply(make("sd1"), tmp_path / "some.json")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("\x00\xff", "not JSON"),
        ("[]", "no settings file"),
        ('{"config": {"ratio": 0.5}}', "no settings file"),
        ('{"tomadiff settings": 2, "config": {}}', "version 2"),
        ('{"tomadiff settings": 1}', '"config" must be'),
        ('{"tomadiff settings": 1, "config": 0.5}', '"config" must be'),
        ('{"tomadiff settings": 1, "config": {}, "notes": "fast"}', '"notes"'),
        ('{"tomadiff settings": 1, "config": {}, "note": {}}', "unknown 'note'"),
        ('{"tomadiff settings": 1, "config": {"ratios": 0.5}}', "did you mean 'ratio'"),
        ('{"tomadiff settings": 1, "config": {"ratio": NaN}}', "at least 0"),
    ],
)
def test_a_file_that_is_wrong_says_how(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError) as error:
        tomadiff.apply(make("sd1"), tmp_path / "some.json")
    assert says in str(error.value) and "some.json" in str(error.value)


@pytest.mark.parametrize("name", ["toma_tile", ".", "no/such.json"])
def test_what_is_no_file_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match="can't be read as a settings file"):
        tomadiff.apply(make("sd1"), name)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"can't write .*fast\.json: there is no folder .*nope$"):
        settings_file.save(tmp_path / "nope" / "fast.json", tomadiff.Config())


def test_the_commands_take_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings_file.save("some.json", tomadiff.Config(ratio={2: 0.5}, where="block"))
    small = ["--model", "emoji-unet", "--steps", "2", "--size", "64", "64"]
    assert main(["generate", "fox", *small, "--settings", "some.json", "-o", "x.png"]) == 0
    assert main(["merge-map", "fox", *small, "--settings", "some.json", "-o", "map.png"]) == 0
    evaluation = ["eval", *small, "--limit", "1", "--metrics", "psnr", "--methods", "some.json", "-o", "e"]
    assert main(evaluation) == 0
    bench = ["bench", *small[:2], "--size", "64", "--repeats", "1", "--no-count", "--methods", "dense"]
    assert main([*bench, "some.json", "--json", "bench.json"]) == 0
    demo = ["demo", "--models", "emoji-unet", "--steps", "1", "--prompts", "fox"]
    assert main([*demo, "--settings", "some.json"]) == 0
    measured = json.loads(Path("bench.json").read_text())["settings"]
    (method,) = (name for name in measured if name != "dense")
    assert "ratio={2: 0.5}" in method and measured[method]["where"] == "block"


def test_commands_refuse_a_file_beside_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "fox", "--settings", "some.json", "--ratio", "0.5"]) == 2
    assert "has all settings in it" in capsys.readouterr().err


# -- files that were made for other models -----------------------------------------------------------------


def test_a_file_that_was_made_for_another_model_warns_and_the_report_says_so(tmp_path: Path) -> None:
    path, pipe = tmp_path / "fast.json", make("sd1")
    settings_file.save(path, tomadiff.Config(ratio=0.25), {"model class": "FluxTransformer2DModel"})
    says = r"fast\.json was made for FluxTransformer2DModel, and this is UNet2DConditionModel"
    with pytest.warns(UserWarning, match=says):
        tomadiff.apply(pipe, path)
    report = tomadiff.report(copy.deepcopy(pipe.unet))
    assert report.made_for == "FluxTransformer2DModel"
    assert "made for FluxTransformer2DModel, not for this model" in str(report)
    tomadiff.apply(pipe, ratio=0.25)
    assert "made for" not in str(tomadiff.report(pipe)), "nothing is left of the file"


@pytest.mark.parametrize("notes", [{}, {"model": "emoji-flux"}, {"model class": "UNet2DConditionModel"}])
def test_a_file_for_the_same_model_or_for_nobody_knows_which_is_silent(
    notes: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    settings_file.save(tmp_path / "fast.json", tomadiff.Config(ratio=0.25), notes)
    pipe = tomadiff.apply(make("sd1"), tmp_path / "fast.json")
    assert not recwarn.list and tomadiff.report(pipe).made_for is None


def test_all_commands_warn_of_a_file_that_was_made_for_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tomadiff.Config(ratio=0.5)
    settings_file.save("fast.json", config, {"model class": "FluxTransformer2DModel"})
    small = ["--model", "emoji-unet", "--steps", "1", "--size", "32", "32"]
    for command in (
        ["generate", "fox", *small, "--settings", "fast.json"],
        ["eval", *small, "--limit", "1", "--metrics", "psnr", "--methods", "fast.json"],
        ["bench", "--size", "32", *small[:2], "--repeats", "1", "--no-count", "--methods", "fast.json"],
        ["demo", "--models", "emoji-unet", "--steps", "1", "--prompts", "fox", "--settings", "fast.json"],
    ):
        with pytest.warns(UserWarning, match="was made for FluxTransformer2DModel") as caught:
            assert main(command) == 0
        (ours,) = [each for each in caught if "was made for" in str(each.message)]
        told = formatted(ours.message, ours.category, ours.filename, ours.lineno)
        assert re.fullmatch(r"tomadiff: fast\.json was made for [^\n]*\n", told), "no line of code with it"


def test_a_note_can_not_write_on_the_terminal(tmp_path: Path) -> None:
    notes = {"model class": "\x1b[31mRED\x1b]0;evil\x07"}
    settings_file.save(tmp_path / "some.json", tomadiff.Config(ratio=0.5), notes)
    pipe = make("sd1")
    with pytest.warns(UserWarning, match="was made for") as caught:
        tomadiff.apply(pipe, tmp_path / "some.json")
    assert str(caught[0].message).isprintable() and r"\x1b[31mRED" in str(caught[0].message)
    assert "\x1b" not in str(tomadiff.report(pipe))


@pytest.mark.parametrize("scale", [1e300, 2e9, 2**70, float("inf"), float("nan"), 0, -1.0])
def test_a_scale_that_would_draw_no_picture_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"scale=.* must be a positive number, at most 1e\+09"):
        Config(ratio=0.5, scale=scale)


@pytest.mark.parametrize("scale", [1e-300, 1e9])
def test_a_scale_at_its_limits_draws_a_picture(scale: float) -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=0.5, scale=scale)
    assert draw(pipe).isfinite().all()


def test_files_of_the_same_name_have_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    for path in ("dense.json", "fast.json", "some/fast.json"):
        settings_file.save(path, tomadiff.Config(ratio=0.5))
    command = ["demo", "--models", "emoji-unet", "--steps", "1", "--prompts", "fox"]
    assert main([*command, "--settings", "dense.json", "fast.json", "some/fast.json"]) == 0
    table = capsys.readouterr().out
    for title in ("dense  ", "dense.json", "fast.json", "some/fast.json"):
        assert f"\n  {title}" in table


def test_editors_are_shown_every_setting_of_a_config() -> None:
    shown = ConfigFields.__annotations__.keys()
    assert shown == {field.name for field in dataclasses.fields(Config)}
