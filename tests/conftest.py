from __future__ import annotations

import os

# Tiny models: more threads only wait for each other. torch reads this once, when it is imported, for threads
# that tests start; the commands that they start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes that import torch again
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # plain C++ says the same, and g++ is done sooner

import fcntl
import gc
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# Not torch and what needs it: the process that starts the workers would import it, too, and they wait for it.
if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# What inductor kept of a run with another OMP_NUM_THREADS or ATEN_CPU_CAPABILITY can abort the process.
INDUCTOR_CACHE = tempfile.TemporaryDirectory(prefix="tomadiff-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR_CACHE.name
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 otherwise: beside other tests, Ray hardly starts
# The same examples in every run, and no folder of them; --hypothesis-profile fuzz looks for others.
# No deadline: no test may depend on how busy the machine is.
hypothesis.settings.register_profile("steady", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("fuzz", max_examples=1000, database=None, deadline=None)
hypothesis.settings.load_profile("steady")


# Files that take long go first, and the many small groups of all families last: two workers end together.
LONG = (
    *("test_eval_ray", "test_serving", "test_compile", "test_promises", "test_robustness", "test_demo"),
    *("test_ui_browser", "test_kernels", "test_composition"),
)
# Ray's look for its processes: one by one.
GROUPS = {"test_eval_ray": "ray", "test_serving": "ray"}
FAMILIES = {file.stem for file in Path(__file__).with_name("tiny").glob("*.py")}


class Scheduler(LoadScopeScheduling):
    """A file is for one worker, as its tests share models and servers; those of all families share a model.

    Of xdist's own, `--dist loadgroup` groups nothing with pytest 9.2 (pytest-dev/pytest-xdist#1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        path, _, test = nodeid.partition("::")
        file = Path(path).stem
        models = [part for part in test.rstrip("]").replace("[", "-").split("-") if part in FAMILIES]
        return f"family {models[0]}" if file == "test_families" and models else GROUPS.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    config.option.loadscopereorder = False  # it would begin with the groups of most tests
    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--screenshots"):  # they are written where they are asked for
        items[:] = [item for item in items if not item.name.startswith("test_screenshots")]
    order = {name: number for number, name in enumerate((*LONG, "others", "test_families"))}
    items.sort(key=lambda item: order.get(item.path.stem, order["others"]))


def pytest_collection_finish() -> None:
    """The collector need not look at a million objects of imported modules again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="write pictures of the page for the docs")


@pytest.fixture(scope="session", autouse=True)
def little_work() -> None:
    import torch

    from tomadiff.tools.demo import true_size

    torch.set_num_threads(1)  # whatever the environment says
    true_size.ROUNDS, true_size.SIDE = 1, 8  # a block takes seconds at its true size, and no test reads them


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Commands set the number for the whole process."""
    import torch

    yield
    torch.set_num_threads(1)


@pytest.fixture(params=["sd1", "sdxl", "sd3", "flux"])  # the makers of `pipelines`
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pipe(name: str) -> Iterator[DiffusionPipeline]:
    """A fresh pipeline of each kind."""
    from pipelines import make

    yield make(name)


@pytest.fixture(scope="module")
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def downloaded() -> Path:
    """The real weights, through the package's own fetch, kept for the next run of the tests."""
    from tomadiff.tools.evaluate.weights import WEIGHTS, fetch

    folder = Path.home() / ".cache" / "tomadiff-tests"
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may want them at the same time
        patch.setenv("TOMADIFF_CACHE", str(folder))
        for name in WEIGHTS:
            fetch(name)
    return folder


@pytest.fixture
def real(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOMADIFF_CACHE", str(downloaded))
