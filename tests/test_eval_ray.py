"""The evaluation on a real Ray cluster of two nodes, with workers that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster as RayCluster
from test_eval import JOB, PROMPTS, SMALL, fill, rows_of

from tomadiff.cli import main
from tomadiff.quality.engines import ray as engine
from tomadiff.quality.job import Job
from tomadiff.quality.store import Store, read_rows

MORE = [*PROMPTS, "red apple", "pizza", "hot dog", "pizza"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes of one CPU each, so that each gets one worker."""
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = RayCluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def workers() -> list[int]:
    """Processes that are drawing, by the name that Ray gives them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::Worker" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def test_a_cluster_draws_the_same_pictures_as_this_process(tmp_path: Path, address: str) -> None:
    fill(Store(tmp_path / "here", JOB, resume=False))
    store = Store(tmp_path / "there", JOB, resume=False)
    for drawing in engine.run(JOB, store.missing(PROMPTS, (0, 1)), engine.Cluster(address)):
        store.add(drawing)
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")


def test_work_of_a_killed_worker_is_done_by_another(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost and nothing is there twice."""
    store = Store(tmp_path, JOB, resume=False)
    works = store.missing(MORE, (0, 1))
    killed = []
    for drawing in engine.run(JOB, works, engine.Cluster(address)):
        store.add(drawing)
        if not killed:
            killed = workers()[:1]
            assert killed, "there must be a worker to kill"
            os.kill(killed[0], signal.SIGKILL)
    assert "a worker died" in capsys.readouterr().err
    rows = read_rows(tmp_path / "rows.jsonl")
    keys = [(row["number"], row["seed"], row["way"], row["ratio"]) for row in rows]
    assert len(keys) == len(set(keys)) == len(MORE) * 2 * len(JOB.ways)
    assert store.missing(MORE, (0, 1)) == []


def test_what_ends_every_worker_comes_to_an_end(tmp_path: Path, address: str) -> None:
    job = Job("emoji-unet", JOB.ways, steps=0, size=(32, 32), threads=1)
    works = Store(tmp_path, job, resume=False).missing(["pizza"], (0,))
    with pytest.raises(Exception, match="at least 1"):
        list(engine.run(job, works, engine.Cluster(address)))


def test_the_command_runs_on_a_cluster(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", *SMALL, "--limit", "2", "--metrics", "psnr", "-o", str(tmp_path / "out")]
    assert main([*command, "--engine", "ray", "--address", address]) == 0
    assert "| tomadiff | 0.5 |" in capsys.readouterr().out


def test_a_cluster_that_is_too_small_says_so(tmp_path: Path, address: str) -> None:
    works = Store(tmp_path, JOB, resume=False).missing(["pizza"], (0,))
    with pytest.raises(ValueError, match="not enough"):
        list(engine.run(JOB, works, engine.Cluster(address, gpus_per_worker=1)))
