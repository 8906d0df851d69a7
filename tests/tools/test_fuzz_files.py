"""Files of others, at random: each is read, or refused in words, and nothing in it runs.

The same examples in every run of the tests; `make fuzz` tries many others.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from evaluations import JOB, PROMPTS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tomadiff import settings_file
from tomadiff.config import CHOICES, Config
from tomadiff.errors import ConfigError
from tomadiff.tools.bench import figures
from tomadiff.tools.bench.measure import Run
from tomadiff.tools.bench.record import Record
from tomadiff.tools.evaluate import scores, summary
from tomadiff.tools.evaluate.job import Drawing, encode
from tomadiff.tools.evaluate.prompts import READERS, load_prompts
from tomadiff.tools.evaluate.store import Store
from tomadiff.tools.loading import load

NAMES = [field.name for field in fields(Config)]
WORDS = sorted(
    {word for words in CHOICES.values() for word in words} | {"auto", "self", "mlp", "", "$_$", "\0"}
)
MODULES = [
    "diffusers",
    "transformers",
    "os",
    "evil",
    "stable_diffusion",
    "../evil",
    "builtins",
    "auto_pipeline",
]
CLASSES = ["UNet2DModel", "DDPMScheduler", "DDPMPipeline", "Evil", "AutoPipelineForText2Image", "pipeline"]

# numbers are small: a model of a billion channels is no mistake, but out of memory
numbers = (
    st.integers(-3, 70) | st.floats(-2, 2) | st.sampled_from([float("nan"), float("inf"), 1e300, 10**400])
)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(WORDS)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["0", "1", "2", "block", *WORDS]), inner, max_size=3)
    ),
    max_leaves=6,
)
fuzz = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def somewhere(like: Path | None = None) -> Iterator[Path]:
    """A folder for one example, a copy of another."""
    with tempfile.TemporaryDirectory() as name:
        if like is not None:
            shutil.copytree(like, name, dirs_exist_ok=True)
        yield Path(name)


def changed(content: Any, path: list[int], value: Any) -> Any:
    """JSON with one part replaced; the numbers choose which, level by level."""
    if not path or not isinstance(content, (dict, list)) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[key] = changed(content[key], path[1:], value)
    return copy


paths = st.lists(st.integers(0, 50), min_size=1, max_size=4)
changes = st.lists(st.tuples(paths, values), min_size=1, max_size=3)


# -- settings ------------------------------------------------------------------------------------------------


@fuzz
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), values, max_size=4), values)
@example({"modules": [["self"]]}, {})
@example({"ratio": {"9" * 5000: 0.5}}, {})
def test_settings_are_read_or_refused(config: dict[str, Any], notes: Any) -> None:
    with somewhere() as folder:
        file = folder / "x.json"
        file.write_text(json.dumps({settings_file.HEAD: 1, "config": config, "notes": notes}))
        try:
            found = settings_file.load(file)
        except ConfigError as error:
            assert str(file) in str(error)
            return
        settings_file.save(file, found.config, found.notes)
        assert settings_file.load(file).config == found.config


@fuzz
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode(errors="surrogatepass")))
def test_what_is_no_settings_file_is_refused(content: bytes) -> None:
    with somewhere() as folder:
        (folder / "x.json").write_bytes(content)
        with pytest.raises(ConfigError):
            settings_file.load(folder / "x.json")


# -- prompts -------------------------------------------------------------------------------------------------

lines = st.lists(
    st.text(max_size=12)
    | values.map(json.dumps)
    | st.sampled_from(
        ["prompt,id", 'a,"b', "text", "#", '{"prompt": "\\ud800"}', "a,b,c", "\ufeff", "\0", "\r"]
    ),
    max_size=5,
)


@fuzz
@given(lines, st.sampled_from(list(READERS)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_prompts_are_read_or_refused(content: list[str], ending: str, newline: str) -> None:
    with somewhere() as folder:
        file = folder / f"prompts{ending}"
        file.write_bytes(newline.join(content).encode(errors="surrogatepass"))
        try:
            prompts = load_prompts(str(file))
        except ValueError as error:
            assert str(file) in str(error)
            return
    assert prompts and all(prompt.strip() == prompt != "" for prompt in prompts)
    assert len(set(prompts)) == len(prompts)


# -- folders of models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(4, 4),
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=20)).save_pretrained(folder)
    return folder


names = st.lists(st.sampled_from([*MODULES, *CLASSES]) | scalars, min_size=1, max_size=3)
parts = st.tuples(st.sampled_from(["_class_name", "unet", "scheduler", "vae", "../unet"]), names | values)


@settings(fuzz, max_examples=max(30, settings().max_examples // 4))  # each loads a model
@given(
    st.lists(parts, max_size=2),
    st.sampled_from(["unet/config.json", "scheduler/scheduler_config.json"]),
    changes,
)
def test_models_are_loaded_or_refused_and_run_nothing(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    index: list[tuple[str, Any]],
    config: str,
    altered: list[tuple[list[int], Any]],
) -> None:
    with somewhere(model) as folder, monkeypatch.context() as patch:
        sprung = folder / "sprung"
        (folder / "installed").mkdir()
        (folder / "installed" / "evil.py").write_text(f"open({str(sprung)!r}, 'w').close()\n")
        patch.syspath_prepend(folder / "installed")
        file = folder / "model_index.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **dict(index)}))
        content = json.loads((folder / config).read_text())
        for path, value in altered:
            content = changed(content, path, value)
        (folder / config).write_text(json.dumps(content))
        try:
            load(str(folder))
        except (ValueError, ImportError) as error:
            assert str(folder) in str(error)
        assert not sprung.exists()


# -- evaluations ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    store = Store(folder, JOB, resume=False)
    for number, prompt in enumerate(PROMPTS):
        for shade, contender in enumerate(JOB.contenders):
            picture = encode(Image.new("RGB", (12, 12), (60 * shade, 50 * number, 0)))
            store.add(Drawing(prompt, 0, *contender, 1.0 + shade, "somebody", picture, flops=9 - shade))
    scores.score(
        store, store.asked(PROMPTS, (0,)), scores.load_metrics(scores.MetricOptions(["psnr", "ssim"]))
    )
    return folder


@fuzz
@given(
    st.sampled_from(["rows.jsonl", "scores.jsonl"]),
    st.lists(st.tuples(st.integers(0, 9), paths, values), min_size=1, max_size=4),
    st.text(max_size=10),
)
@example("rows.jsonl", [(0, [8], "x")], "")  # FLOPs, which only some rows have
def test_rows_of_an_evaluation_are_believed_or_made_again(
    evaluation: Path, name: str, altered: list[tuple[int, list[int], Any]], garbage: str
) -> None:
    with somewhere(evaluation) as folder:
        file = folder / name
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for number, path, value in altered:
            rows[number % len(rows)] = changed(rows[number % len(rows)], path, value)
        text = "".join(json.dumps(row) + "\n" for row in rows) + garbage
        file.write_bytes(text.encode(errors="surrogatepass"))
        store = Store(folder, JOB, resume=True)
        assert len(store.rows) + sum(len(work.contenders) for work in store.missing(PROMPTS, (0,))) >= len(
            JOB.contenders
        )
        asked = store.asked(PROMPTS, (0,))
        found, _ = scores.score(store, asked, scores.load_metrics(scores.MetricOptions(["psnr", "ssim"])))
        assert summary.table(summary.summarise(found, JOB.contenders, {}), {})
        assert len(Store(folder, JOB, resume=True).rows) == len(store.rows)


# -- benchmarks ----------------------------------------------------------------------------------------------


def recorded() -> dict[str, Any]:
    record = Record({"model": "x"})
    for number in range(2):
        for method, ratio in (("dense", 0.0), ("ideal", 0.5), ("tomadiff", 0.5)):
            record.runs.append(Run((8, 8), method, ratio, number, 1.0 + number, 0.1, 0.1, None, 9, 1))
    record.counts = [{"size": [8, 8], "method": "tomadiff", "ratio": 0.5, "model_flops": 1e9}]
    record.keep_steps = {"tomadiff": 2, "ideal": 1, "dense": 1}
    return json.loads(json.dumps(asdict(record)))


@fuzz
@given(changes)
def test_records_of_benchmarks_are_read_or_refused(altered: list[tuple[list[int], Any]]) -> None:
    content = recorded()
    for path, value in altered:
        content = changed(content, path, value)
    with somewhere() as folder:
        (folder / "x.json").write_text(json.dumps(content))
        record = Record({"model": "x"})
        try:
            record.resume(folder / "x.json")
        except ValueError as error:
            assert "can't resume" in str(error)
            return
    rows = record.rows()
    assert figures.table(rows, "call") is not None and figures.words(rows) is not None
