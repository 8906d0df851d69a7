"""Draw on a Ray cluster: a pipeline in each worker, prompts handed out as workers become free.

One worker draws a prompt and seed with all contenders, so that times that are compared come from one process.
It draws one picture per call: each is stored as soon as it is made, and a worker that dies loses only the
picture under way, which another worker repeats with the rest of the prompt. (Ray's streaming generators would
do that too, but not through ray:// addresses.)
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from tomadiff.runtime.machine import versions
from tomadiff.tools.arguments.evaluate import PATIENCE
from tomadiff.tools.evaluate.job import Drawing, ImageGenerator, Job, Work
from tomadiff.tools.method_spec import label

ATTEMPTS = 3  # to draw a picture, and to start workers, before giving up


class ClusterError(ValueError):
    """The cluster can't do the work; what was finished before is kept."""


@dataclass(frozen=True)
class Cluster:
    """Which cluster, and how many workers."""

    address: str | None = None  # None: Ray starts here
    workers: int | None = None  # None: as many as the cluster's GPUs or CPUs allow
    gpus_per_worker: float = 0.0
    patience: float = PATIENCE  # seconds until a worker is ready


def check(address: str | None) -> None:
    """Raise early if something is not installed."""
    if find_spec("ray") is None:
        raise ImportError("the engine ray needs Ray: pip install 'tomadiff[ray]'")
    if address and address.startswith("ray://") and find_spec("grpc") is None:
        raise ImportError(
            f"{address} needs Ray's client: pip install 'tomadiff[ray]', or take --address auto"
        )


def run(job: Job, works: Sequence[Work], cluster: Cluster) -> Iterator[Drawing]:
    check(cluster.address)
    import ray

    started = not ray.is_initialized()
    if started:
        before = os.umask(0o077)  # Ray may write its authentication token to a file that nobody else may read
        try:
            ray.init(address=cluster.address or "local", log_to_driver=False, include_dashboard=False)
        finally:
            os.umask(before)
    try:
        yield from RayPool(ray, job, works, cluster).draw_all()
    except _losses(ray) as error:
        raise ClusterError(f"the cluster is lost: {reason_of(error)}") from error
    finally:
        if started:
            ray.shutdown()


def _losses(ray: Any) -> tuple[type[Exception], ...]:
    """The errors that Ray, or gRPC below its client, raises when the cluster is gone."""
    if find_spec("grpc") is None:
        return (ray.exceptions.RayError, ConnectionError)
    import grpc

    return (ray.exceptions.RayError, ConnectionError, grpc.RpcError)


class Worker:
    """Runs in a process of the cluster."""

    def __init__(self, job: Job) -> None:
        if (here := versions()) != job.versions:
            raise ValueError(f"this worker has {here}, but the evaluation {job.versions}: install the same")
        self.generator = ImageGenerator(job)

    def ready(self) -> None:
        """Returns once the pipeline is loaded."""

    def draw(self, work: Work) -> Drawing:
        """Draw with the first of the contenders."""
        return self.generator.draw(work, work.contenders[0])


class RayPool:
    """The workers, and what each of them is doing."""

    def __init__(self, ray: Any, job: Job, works: Sequence[Work], cluster: Cluster) -> None:
        self.ray, self.job, self.cluster = ray, job, cluster
        self.needs = {"CPU": float(job.threads or 1), "GPU": cluster.gpus_per_worker}
        self.kind = ray.remote(Worker).options(
            num_cpus=self.needs["CPU"], num_gpus=self.needs["GPU"], scheduling_strategy="SPREAD"
        )
        self.waiting = deque((work, 1) for work in works)  # work and the number of the attempt
        self.starting: dict[Any, Any] = {}  # actor by the future of ready()
        self.free: deque[Any] = deque()
        self.running: dict[Any, tuple[Any, Work, int]] = {}  # by the future of the picture
        self.failed_starts = 0

    def draw_all(self) -> Iterator[Drawing]:
        """Keep all workers that are ready busy until everything is drawn."""
        for _ in range(self.num_workers()):
            self.start()
        late: float | None = time.monotonic() + self.cluster.patience
        while self.waiting or self.running:
            while self.waiting and self.free:
                self.submit(self.free.popleft(), *self.waiting.popleft())
            ready, _ = self.ray.wait(
                [*self.starting, *self.running], num_returns=1, timeout=self.cluster.patience
            )
            if ready and ready[0] in self.starting:
                self.on_ready(ready[0])
            elif ready:
                yield from self.collect(ready[0])
            elif not self.running:
                raise ClusterError(
                    f"no worker was ready after {self.cluster.patience:g} s: {self.resources()}; ask for "
                    "less with --threads or --gpus-per-worker, or wait longer with --patience"
                )
            if late is not None and time.monotonic() > late:
                late = None  # warn once
                if self.starting:
                    print(f"{len(self.starting)} workers have not started: going on without", file=sys.stderr)

    def num_workers(self) -> int:
        """How many workers to start."""
        room = sum(room_on(node, self.needs) for node in self.nodes())
        if self.cluster.workers is None:
            if not room:
                raise ClusterError(f"not enough for a single worker: {self.resources()}")
            return min(room, len(self.waiting))
        wanted = min(self.cluster.workers, len(self.waiting))
        if wanted > room:  # start them all the same: the cluster may grow
            print(
                f"there is room for {room} of {wanted} workers: {self.resources()}; going on with those "
                "that can start",
                file=sys.stderr,
            )
        return wanted

    def nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def resources(self) -> str:
        sizes = Counter(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in self.nodes())
        has = " and ".join(f"{count} x ({size})" for size, count in sizes.items())
        needs = f"{self.needs['CPU']:g} CPUs, {self.needs['GPU']:g} GPUs"
        return f"the cluster has nodes {has}, and a worker needs {needs} on one of them"

    def start(self) -> None:
        actor = self.kind.remote(self.job)
        self.starting[actor.ready.remote()] = actor

    def on_ready(self, answer: Any) -> None:
        actor = self.starting.pop(answer)
        try:
            self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            self.failed_starts += 1
            print(f"a worker failed to start: {reason_of(error)}", file=sys.stderr)
            if self.failed_starts < ATTEMPTS:
                self.start()
            elif not (self.starting or self.free or self.running):
                raise ClusterError(
                    f"{self.failed_starts} workers failed to start; the last: {reason_of(error)}"
                ) from error
        else:
            self.free.append(actor)

    def submit(self, actor: Any, work: Work, attempt: int) -> None:
        self.running[actor.draw.remote(work)] = (actor, work, attempt)

    def collect(self, picture: Any) -> Iterator[Drawing]:
        actor, work, attempt = self.running.pop(picture)
        try:
            drawing = self.ray.get(picture)
        except self.ray.exceptions.RayTaskError as error:  # the worker is still alive
            self.retry(work, attempt, error)
            self.free.append(actor)
        except self.ray.exceptions.RayError as error:
            print("a worker died", file=sys.stderr)
            self.retry(work, attempt, error)
            self.start()
        else:
            rest = replace(work, contenders=work.contenders[1:])
            if rest.contenders:
                self.submit(actor, rest, 1)
            else:
                self.free.append(actor)
            yield drawing

    def retry(self, work: Work, attempt: int, error: Exception) -> None:
        what = f"{work.prompt!r} with seed {work.seed}, {label(*work.contenders[0])},"
        if attempt == ATTEMPTS:
            raise ClusterError(f"{what} failed {ATTEMPTS} times; the last: {reason_of(error)}") from error
        print(f"{what} is tried again: {reason_of(error)}", file=sys.stderr)
        self.waiting.appendleft((work, attempt + 1))  # next, so that what always fails ends soon


def room_on(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many workers fit on one node; a fraction of a GPU can't be spread over several."""
    room = int(node.get("CPU", 0) // needs["CPU"])
    gpus, share = node.get("GPU", 0), needs["GPU"]
    if not share:
        return room
    return min(room, int(gpus) * int(1 / share) if share < 1 else int(gpus // share))


def reason_of(error: Exception) -> str:
    """The last line of an error of Ray, which is a long traceback or a paragraph."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    if callable(details := getattr(error, "details", None)):  # of gRPC
        return str(details())
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
