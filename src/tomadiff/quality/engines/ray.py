"""On a Ray cluster: a pipeline in each worker, prompts handed out as workers get free.

The unit is one prompt with one seed, in all ways, so that the times that are compared come from one worker.
A worker that dies loses what it was drawing; that is handed to another, and a new worker takes its place.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..job import Drawing, Job, Painter, Work

ATTEMPTS = 3  # for one prompt and seed: what kills every worker that touches it must come to an end


@dataclass(frozen=True)
class Cluster:
    """Where, and how many."""

    address: str | None = None  # None: Ray starts here
    workers: int | None = None  # None: as many as the cluster's GPUs or CPUs allow
    gpus_per_worker: float = 0.0


def run(job: Job, works: Sequence[Work], cluster: Cluster) -> Iterator[Drawing]:
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        ray.init(address=cluster.address or "local", log_to_driver=False, include_dashboard=False)
    try:
        yield from _share_out(ray, job, works, cluster)
    finally:
        if started:
            ray.shutdown()


def _share_out(ray: Any, job: Job, works: Sequence[Work], cluster: Cluster) -> Iterator[Drawing]:
    """Keep every worker busy until all is drawn."""
    worker = ray.remote(Worker).options(
        num_gpus=cluster.gpus_per_worker, num_cpus=job.threads or 1, scheduling_strategy="SPREAD"
    )
    waiting: deque[tuple[Work, int]] = deque((work, 1) for work in works)
    free = [worker.remote(job) for _ in range(_workers(ray, job, works, cluster))]
    running: dict[Any, tuple[Any, Work, int]] = {}
    while waiting or running:
        while waiting and free:
            actor, (work, attempt) = free.pop(), waiting.popleft()
            running[actor.draw.remote(work)] = (actor, work, attempt)
        (finished,), _ = ray.wait(list(running), num_returns=1)
        actor, work, attempt = running.pop(finished)
        try:
            drawings = ray.get(finished)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None  # it would go wrong on any worker
        except ray.exceptions.RayError as error:
            if attempt == ATTEMPTS:
                raise RuntimeError(
                    f"{work.prompt!r} with seed {work.seed} ended {ATTEMPTS} workers; the last: {error}"
                ) from error
            print(f"a worker died; {work.prompt!r} goes to another: {error}", file=sys.stderr)
            waiting.appendleft((work, attempt + 1))  # so that what ends every worker comes to an end soon
            free.append(worker.remote(job))
            continue
        free.append(actor)
        yield from drawings


class Worker:
    """Runs in a process of the cluster."""

    def __init__(self, job: Job) -> None:
        self.painter = Painter(job)

    def draw(self, work: Work) -> list[Drawing]:
        return list(self.painter.draw(work))


def _workers(ray: Any, job: Job, works: Sequence[Work], cluster: Cluster) -> int:
    if cluster.workers:
        return cluster.workers
    resources = ray.cluster_resources()
    if cluster.gpus_per_worker:
        most = int(resources.get("GPU", 0) / cluster.gpus_per_worker)
    else:
        most = int(resources.get("CPU", 1) / (job.threads or 1))
    if not most:
        raise ValueError(
            f"the cluster has {resources.get('GPU', 0):g} GPUs and {resources.get('CPU', 0):g} CPUs: not "
            f"enough for a worker with {cluster.gpus_per_worker:g} GPUs and {job.threads or 1} threads"
        )
    return min(most, len(works))


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("the engine ray needs Ray: pip install 'tomadiff[ray]'") from error
    return ray
