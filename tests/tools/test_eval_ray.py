"""The evaluation on a real Ray cluster of two nodes, with workers that die, and with some that never come."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from evaluations import JOB, PROMPTS, SMALL, fill, lines_of, same_pictures
from ray.cluster_utils import Cluster as RayCluster

from tomadiff.tools.cli import main
from tomadiff.tools.evaluate.engines import ray as engine
from tomadiff.tools.evaluate.job import REFERENCE, Drawing, Work
from tomadiff.tools.evaluate.store import Store, read_rows

MORE = [*PROMPTS, "red apple", "banana", "taco", "sushi"]
ONE = [Work("pizza", 0, (REFERENCE,))]


@pytest.fixture(scope="module")
def address(free_port: int) -> Iterator[str]:
    """Two nodes of one CPU each, so that each gets one worker; clients come in by the free port."""
    head = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": free_port}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # else what Ray's client starts now and then dies of it
        patch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "3")  # seconds, instead of 30
        cluster = RayCluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()


def processes(name: bytes) -> list[int]:
    """Below this one, by the name that Ray gives a process for what it does."""
    parents, found = {}, []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if name in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it ended meanwhile
            continue

    def ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and ours(parents[process]))

    return [process for process in found if ours(process)]


def test_a_cluster_draws_the_same_pictures_as_this_process(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if more workers are asked for than there is room for."""
    fill(Store(tmp_path / "here", JOB, resume=False))
    store = Store(tmp_path / "there", JOB, resume=False)
    works = store.missing(PROMPTS, (0, 1))
    for drawing in engine.run(JOB, works, engine.Cluster(address, workers=4)):
        store.add(drawing)
    assert same_pictures(tmp_path / "there", tmp_path / "here")
    said = "room for 2 of 4 workers: the cluster has nodes 2 x (1 CPUs, 0 GPUs), and a worker needs 1 CPUs"
    assert said in capsys.readouterr().err
    processes = {(row["prompt"], row["seed"]): set() for row in store.rows.values()}
    for row in store.rows.values():
        processes[row["prompt"], row["seed"]].add(row["process"])
    assert all(len(names) == 1 for names in processes.values()), "a prompt and seed stay with one worker"
    assert len(set.union(*processes.values())) <= 2


def test_work_of_a_killed_worker_is_done_by_another(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost and nothing is there twice, and what it had finished is kept."""
    store = Store(tmp_path, JOB, resume=False)
    works = store.missing(MORE, (0, 1))
    killed = []
    for drawing in engine.run(JOB, works, engine.Cluster(address)):
        store.add(drawing)
        if not killed:
            starting = processes(b"ray::Worker.__init__")  # these have no work yet that could be lost
            killed = [worker for worker in processes(b"ray::Worker") if worker not in starting][:1]
            assert killed, "there must be a worker to kill"
            os.kill(killed[0], signal.SIGKILL)
    assert "a worker died" in capsys.readouterr().err
    rows = read_rows(tmp_path / "rows.jsonl")
    keys = [(row["prompt"], row["seed"], row["method"], row["ratio"]) for row in rows]
    assert len(keys) == len(set(keys)) == len(MORE) * 2 * len(JOB.contenders)
    assert store.missing(MORE, (0, 1)) == []


def test_what_kills_every_worker_comes_to_an_end(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ATTEMPTS", 2)
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.05):
            for process in processes(b"ray::Worker.draw"):
                os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(engine.ClusterError, match=r"'pizza' with seed 0, dense, failed 2 times"):
            list(engine.run(replace(JOB, steps=5000), ONE, engine.Cluster(address)))
    finally:
        ended.set()
        killer.join()
    assert capsys.readouterr().err.count("is tried again") == 1


def test_work_that_always_fails_says_why(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        engine.ClusterError, match=r"failed 3 times; the last: ValueError: 0 steps: .*at least 1"
    ):
        list(engine.run(replace(JOB, steps=0), ONE, engine.Cluster(address)))
    said = capsys.readouterr().err
    assert said.count("is tried again: ValueError: 0 steps") == 2 and "a worker died" not in said


def test_workers_that_can_not_start_say_why(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ATTEMPTS", 2)
    job = replace(JOB, model=str(tmp_path / "nowhere"))
    with pytest.raises(engine.ClusterError, match=r"2 workers failed to start; .*can't load .*nowhere"):
        list(engine.run(job, ONE, engine.Cluster(address)))
    assert capsys.readouterr().err.count("a worker failed to start") == 2


def test_workers_that_never_come_are_not_waited_for_forever(address: str) -> None:
    asked = engine.Cluster(address, workers=1, gpus_per_worker=1, patience=2)
    says = (
        r"no worker was ready after 2 s: the cluster has .*0 GPUs\), and a worker needs 1 CPUs, 1 GPUs on one"
    )
    with pytest.raises(engine.ClusterError, match=says):
        list(engine.run(JOB, ONE, asked))


@pytest.mark.parametrize(("threads", "gpus"), [(2, 0), (1, 1)])
def test_a_worker_must_fit_on_one_node(address: str, threads: int, gpus: int) -> None:
    """The two nodes have two CPUs together, but that is of no use."""
    with pytest.raises(engine.ClusterError, match="not enough for a single worker"):
        list(engine.run(replace(JOB, threads=threads), ONE, engine.Cluster(address, gpus_per_worker=gpus)))


@pytest.mark.parametrize(
    ("cpus", "gpus", "threads", "share", "room"),
    [
        (8, 0, 3, 0, 2),
        (8, 4, 1, 1, 4),
        (2, 4, 1, 1, 2),
        (8, 2, 1, 0.6, 2),  # what is left of one GPU and another is no whole
        (8, 2, 1, 0.5, 4),
        (8, 3, 1, 2, 1),
        (8, 0, 1, 1, 0),
    ],
)
def test_room_on_a_node(cpus: int, gpus: int, threads: int, share: float, room: int) -> None:
    assert engine.room_on({"CPU": cpus, "GPU": gpus}, {"CPU": threads, "GPU": share}) == room


def test_a_worker_with_other_versions_is_refused() -> None:
    job = replace(JOB, versions=JOB.versions | {"torch": "1.0"})
    with pytest.raises(ValueError, match=r"'torch': '1\.0'.*install the same"):
        engine.Worker(job)


def test_a_cluster_that_is_lost_midway_leaves_a_summary_and_can_be_resumed(
    tmp_path: Path,
    address: str,
    free_port: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through Ray's client, whose end of the line is killed; then without, as the cluster is lost."""
    command = ["eval", *SMALL, "--limit", "4", "--metrics", "psnr", "-o", str(tmp_path)]
    cluster = ["--engine", "ray", "--workers", "1", "--address", f"ray://127.0.0.1:{free_port}"]
    keep = Store.add

    def keep_and_kill(store: Store, drawing: Drawing) -> None:
        keep(store, drawing)
        if len(store.rows) == 2:
            for process in processes(b"specific-server"):
                os.kill(process, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", keep_and_kill)
        assert main([*command, *cluster]) == 2
    said = capsys.readouterr().err
    assert "the cluster is lost: " in said and "continue with --resume" in said
    kept = sum(row["method"] == "dense" for row in read_rows(tmp_path / "rows.jsonl"))
    assert lines_of(tmp_path)["dense"]["pictures"] == kept < 4
    assert main([*command, "--resume"]) == 0
    assert {line["pictures"] for line in lines_of(tmp_path).values()} == {4}
