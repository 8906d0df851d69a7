"""Scores of the pictures in a store, kept beside them so that nothing is computed twice."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tomadiff.runtime.files import is_a
from tomadiff.tools.method_spec import DENSE, label

from .features import Clip, Dino, Inception, Lpips
from .job import REFERENCE
from .metrics import Statistics, fid, psnr, ssim
from .pictures import read_picture
from .store import Row, Store, append, case_of, read_rows


@dataclass(frozen=True)
class MetricOptions:
    """Which metrics, and with which models."""

    metrics: Sequence[str]
    clip_model: str | None = None
    dino_model: str | None = None
    fid_against: str = DENSE
    device: str = "cpu"

    def name_of(self, metric: str) -> str:
        """The key of a score in the file; scores by different models have different keys."""
        model = {"clip": self.clip_model, "dino": self.dino_model}.get(metric)
        return f"{metric} of {model}" if model else metric


# of a picture, the dense one and the prompt
Score = Callable[[Tensor, Tensor, str], float]
KEPT = {"sha256": str, "dense": str}  # the checksums of the two pictures that a score compares
MAX_PSNR = 100.0  # for equal pictures, whose PSNR is infinite, so that means stay finite
# what a metric's model may raise on some picture: that metric is left out, the others go on
FAILURES = (ValueError, OSError, RuntimeError)


@dataclass
class Metrics:
    """Metrics of single pictures as functions, what FID needs, and what is unavailable, with advice."""

    wanted: MetricOptions
    measures: dict[str, Score]
    inception: Inception | None
    real: Statistics | None  # statistics of real pictures, instead of the dense ones
    unavailable: dict[str, str]


def load_metrics(wanted: MetricOptions) -> Metrics:
    """Load every metric's model once, to find out before hours of drawing which are available."""
    makers: dict[str, Callable[[], Score]] = {
        "psnr": lambda: lambda picture, dense, prompt: min(MAX_PSNR, float(psnr(picture, dense))),
        "ssim": lambda: lambda picture, dense, prompt: float(ssim(picture, dense)),
        "lpips": lambda: _pair(Lpips(wanted.device).tried()),
        "dino": lambda: _pair(Dino(wanted.dino_model, wanted.device).tried()),
        "clip": lambda: _text(Clip(wanted.clip_model, wanted.device).tried()),
    }
    metrics = Metrics(wanted, {}, None, None, {})
    source = Path(wanted.fid_against)
    if wanted.fid_against != DENSE and not source.exists():
        raise ValueError(f"--fid-against {source}: no such folder or file, and it is not {DENSE!r}")
    for name in wanted.metrics:
        try:
            if name in makers:
                metrics.measures[name] = makers[name]()
            else:
                metrics.inception = Inception(wanted.device).tried()
        except FAILURES as error:
            metrics.unavailable[name] = str(error)
    if metrics.inception and wanted.fid_against != DENSE:
        metrics.real = Inception(wanted.device).statistics(source)  # by an Inception that is freed afterwards
    return metrics


def score(
    store: Store, asked: Sequence[Row], metrics: Metrics
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Rows with their scores, and scores of whole sets by label. A metric that fails becomes unavailable."""
    wanted, unavailable = metrics.wanted, metrics.unavailable
    kept = {(row["sha256"], row["dense"]): row for row in read_rows(store.folder / "scores.jsonl", KEPT)}
    dense = {case_of(row): row for row in asked if (row["method"], row["ratio"]) == REFERENCE}
    rows = []
    for row in asked:
        reference = dense.get(case_of(row))
        if reference is None:
            continue
        # the dense picture can't be compared with itself, only with its prompt
        useful = [name for name in metrics.measures if row is not reference or name == "clip"]
        found = kept.get((row["sha256"], reference["sha256"]), {})
        found = {name: value for name, value in found.items() if name in KEPT or is_a(value, float)}
        missing = [name for name in useful if wanted.name_of(name) not in found and name not in unavailable]
        if missing:
            print(f"scoring: {row['file']}", file=sys.stderr)
            found = {**found, "sha256": row["sha256"], "dense": reference["sha256"]}
            picture, other = read_picture(store.path(row)), read_picture(store.path(reference))
            for name in missing:
                try:
                    found[wanted.name_of(name)] = metrics.measures[name](picture, other, row["prompt"])
                except FAILURES as error:
                    unavailable[name] = str(error)
            append(store.folder / "scores.jsonl", found)
        rows.append({**row, **{name: found.get(wanted.name_of(name)) for name in useful}})
    # a metric that failed on some pictures has no mean
    rows = [{name: value for name, value in row.items() if name not in unavailable} for row in rows]
    sets: dict[str, dict[str, float]] = {}
    if metrics.inception is not None and len({case_of(row) for row in rows}) == 1:
        unavailable["fid"] = "it needs two pictures or more by each method"
    elif metrics.inception is not None:
        try:
            sets = fids(store, rows, metrics.inception, metrics.real)
        except FAILURES as error:
            unavailable["fid"] = str(error)
    return rows, sets


def fids(
    store: Store, rows: Sequence[Row], inception: Inception, real: Statistics | None
) -> dict[str, dict[str, float]]:
    """The FID of each contender's pictures, against the dense ones or real ones."""
    features = inception_features(store, rows, inception)
    files: dict[tuple[str, float], list[str]] = {}
    for row in rows:
        files.setdefault((row["method"], row["ratio"]), []).append(row["sha256"])
    # a covariance needs at least two pictures
    made = {
        contender: Statistics.of([torch.stack([features[sha256] for sha256 in some])])
        for contender, some in files.items()
        if len(some) > 1
    }
    reference = real or made.get(REFERENCE)
    if reference is None:
        return {}
    return {
        label(*contender): {"fid": fid(statistics, reference)}
        for contender, statistics in made.items()
        if statistics is not reference
    }


def inception_features(store: Store, rows: Sequence[Row], inception: Inception) -> dict[str, Tensor]:
    """Features of every picture by its checksum; stored, since they are slow to compute."""
    file = store.folder / "inception.jsonl"
    kept = read_rows(file, {"sha256": str, "features": str})
    features = {row["sha256"]: found for row in kept if (found := _unpack(row["features"])) is not None}
    for row in rows:
        if row["sha256"] not in features:
            found = inception(read_picture(store.path(row)))[0]
            append(file, {"sha256": row["sha256"], "features": _pack(found)})
            features[row["sha256"]] = found
    return features


def _pack(features: Tensor) -> str:
    return base64.b64encode(features.float().numpy().tobytes()).decode()


def _unpack(text: str) -> Tensor | None:
    """None if the text is no vector of features."""
    try:
        features = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
    except ValueError:
        return None
    return features if features.shape == (Inception.channels,) and features.isfinite().all() else None


def _pair(model: Any) -> Score:
    return lambda picture, dense, prompt: float(model(picture, dense))


def _text(model: Any) -> Score:
    return lambda picture, dense, prompt: float(model(picture, [prompt]))
