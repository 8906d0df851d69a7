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
class Wanted:
    """Which metrics, and with which models."""

    metrics: Sequence[str]
    clip_model: str | None = None
    dino_model: str | None = None
    fid_against: str = DENSE
    device: str = "cpu"

    def name_of(self, metric: str) -> str:
        """What a score is kept as: scores of different models are different scores."""
        model = {"clip": self.clip_model, "dino": self.dino_model}.get(metric)
        return f"{metric} of {model}" if model else metric


# of a picture, the dense one and the prompt
Score = Callable[[Tensor, Tensor, str], float]
KEPT = {"sha256": str, "dense": str}  # what a score is of
PSNR_MOST = 100.0  # equal pictures have an infinite one, which no mean survives
# of a network that gets what it can't take; one metric less is better than none
FAILURES = (ValueError, OSError, RuntimeError)


@dataclass
class Judges:
    """Functions for the metrics of single pictures, what FID needs, and what can't be had, with advice."""

    wanted: Wanted
    measures: dict[str, Score]
    inception: Inception | None
    real: Statistics | None  # to compare with instead of the dense pictures
    unavailable: dict[str, str]


def judges_of(wanted: Wanted) -> Judges:
    """Loads every model once, to know before hours of drawing what there will be in the end."""
    makers: dict[str, Callable[[], Score]] = {
        "psnr": lambda: lambda picture, dense, prompt: min(PSNR_MOST, float(psnr(picture, dense))),
        "ssim": lambda: lambda picture, dense, prompt: float(ssim(picture, dense)),
        "lpips": lambda: _pair(Lpips(wanted.device).tried()),
        "dino": lambda: _pair(Dino(wanted.dino_model, wanted.device).tried()),
        "clip": lambda: _text(Clip(wanted.clip_model, wanted.device).tried()),
    }
    judges = Judges(wanted, {}, None, None, {})
    source = Path(wanted.fid_against)
    if wanted.fid_against != DENSE and not source.exists():
        raise ValueError(f"--fid-against {source}: no such folder or file, and it is not {DENSE!r}")
    for name in wanted.metrics:
        try:
            if name in makers:
                judges.measures[name] = makers[name]()
            else:
                judges.inception = Inception(wanted.device).tried()
        except FAILURES as error:
            judges.unavailable[name] = str(error)
    if judges.inception and wanted.fid_against != DENSE:
        judges.real = Inception(wanted.device).statistics(source)  # one of its own, which is let go
    return judges


def score(
    store: Store, asked: Sequence[Row], judges: Judges
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """PerTokenArg with their scores, and scores of whole sets, by label. What fails gets unavailable."""
    wanted, unavailable = judges.wanted, judges.unavailable
    kept = {(row["sha256"], row["dense"]): row for row in read_rows(store.folder / "scores.jsonl", KEPT)}
    dense = {case_of(row): row for row in asked if (row["way"], row["ratio"]) == REFERENCE}
    rows = []
    for row in asked:
        reference = dense.get(case_of(row))
        if reference is None:
            continue
        # the dense picture can't be compared with itself, only with its prompt
        useful = [name for name in judges.measures if row is not reference or name == "clip"]
        found = kept.get((row["sha256"], reference["sha256"]), {})
        found = {name: value for name, value in found.items() if name in KEPT or is_a(value, float)}
        missing = [name for name in useful if wanted.name_of(name) not in found and name not in unavailable]
        if missing:
            print(f"scoring: {row['file']}", file=sys.stderr)
            found = {**found, "sha256": row["sha256"], "dense": reference["sha256"]}
            picture, other = read_picture(store.path(row)), read_picture(store.path(reference))
            for name in missing:
                try:
                    found[wanted.name_of(name)] = judges.measures[name](picture, other, row["prompt"])
                except FAILURES as error:
                    unavailable[name] = str(error)
            append(store.folder / "scores.jsonl", found)
        rows.append({**row, **{name: found.get(wanted.name_of(name)) for name in useful}})
    # a mean of some pictures is not the metric
    rows = [{name: value for name, value in row.items() if name not in unavailable} for row in rows]
    sets: dict[str, dict[str, float]] = {}
    if judges.inception is not None and len({case_of(row) for row in rows}) == 1:
        unavailable["fid"] = "there is one picture of each sort, and a spread is of two or more"
    elif judges.inception is not None:
        try:
            sets = fids(store, rows, judges.inception, judges.real)
        except FAILURES as error:
            unavailable["fid"] = str(error)
    return rows, sets


def fids(
    store: Store, rows: Sequence[Row], inception: Inception, real: Statistics | None
) -> dict[str, dict[str, float]]:
    """The FID of each way's pictures, against the dense ones or real ones."""
    features = inception_features(store, rows, inception)
    files: dict[tuple[str, float], list[str]] = {}
    for row in rows:
        files.setdefault((row["way"], row["ratio"]), []).append(row["sha256"])
    # a covariance needs two
    made = {
        way: Statistics.of([torch.stack([features[sha256] for sha256 in some])])
        for way, some in files.items()
        if len(some) > 1
    }
    reference = real or made.get(REFERENCE)
    if reference is None:
        return {}
    return {
        label(*way): {"fid": fid(statistics, reference)}
        for way, statistics in made.items()
        if statistics is not reference
    }


def inception_features(store: Store, rows: Sequence[Row], inception: Inception) -> dict[str, Tensor]:
    """Of every picture, by its checksum; kept, since they take longer than all the rest."""
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
    """None for what are no features."""
    try:
        features = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
    except ValueError:
        return None
    return features if features.shape == (Inception.channels,) and features.isfinite().all() else None


def _pair(model: Any) -> Score:
    return lambda picture, dense, prompt: float(model(picture, dense))


def _text(model: Any) -> Score:
    return lambda picture, dense, prompt: float(model(picture, [prompt]))
