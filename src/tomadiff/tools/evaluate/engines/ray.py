"""On a Ray cluster: a pipeline in each worker, prompts handed out as workers get free.

A worker draws one prompt with one seed in all ways, so that times that are compared come from one process.
But it is asked for one picture at a time: each is kept as soon as it is made, and a worker that dies loses
only the one under way, which goes to another with the rest of its prompt. (Ray's streaming generators would
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
from tomadiff.tools.evaluate.job import Drawing, Job, Painter, Work
from tomadiff.tools.method_spec import label

ATTEMPTS = 3  # for one picture, and for starting workers: what always fails must come to an end


class ClusterError(ValueError):
    """The cluster can't do the work; what was finished before is kept."""


@dataclass(frozen=True)
class Cluster:
    """Where, and how many."""

    address: str | None = None  # None: Ray starts here
    workers: int | None = None  # None: as many as the cluster's GPUs or CPUs allow
    gpus_per_worker: float = 0.0
    patience: float = PATIENCE  # seconds until a worker is ready


def check(address: str | None) -> None:
    """Complain early about what is not installed."""
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
        before = os.umask(0o077)  # Ray may write the token that guards its ports: for nobody else to read
        try:
            ray.init(address=cluster.address or "local", log_to_driver=False, include_dashboard=False)
        finally:
            os.umask(before)
    try:
        yield from Crew(ray, job, works, cluster).draw_all()
    except _losses(ray) as error:
        raise ClusterError(f"the cluster is lost: {reason_of(error)}") from error
    finally:
        if started:
            ray.shutdown()


def _losses(ray: Any) -> tuple[type[Exception], ...]:
    """What Ray raises when the cluster is gone; through its client, also what gRPC does."""
    if find_spec("grpc") is None:
        return (ray.exceptions.RayError, ConnectionError)
    import grpc

    return (ray.exceptions.RayError, ConnectionError, grpc.RpcError)


class Worker:
    """Runs in a process of the cluster."""

    def __init__(self, job: Job) -> None:
        if (here := versions()) != job.versions:
            raise ValueError(f"this worker has {here}, but the evaluation {job.versions}: install the same")
        self.painter = Painter(job)

    def ready(self) -> None:
        """Answers as soon as there is a pipeline."""

    def draw(self, work: Work) -> Drawing:
        """The first of its ways."""
        return self.painter.draw(work, work.ways[0])


class Crew:
    """The workers, and what each is at."""

    def __init__(self, ray: Any, job: Job, works: Sequence[Work], cluster: Cluster) -> None:
        self.ray, self.job, self.cluster = ray, job, cluster
        self.needs = {"CPU": float(job.threads or 1), "GPU": cluster.gpus_per_worker}
        self.kind = ray.remote(Worker).options(
            num_cpus=self.needs["CPU"], num_gpus=self.needs["GPU"], scheduling_strategy="SPREAD"
        )
        self.waiting = deque((work, 1) for work in works)  # and which attempt it is
        self.starting: dict[Any, Any] = {}  # by the answer of ready()
        self.free: deque[Any] = deque()
        self.running: dict[Any, tuple[Any, Work, int]] = {}  # by the picture under way
        self.failed_starts = 0

    def draw_all(self) -> Iterator[Drawing]:
        """Keep everybody who is ready busy until all is drawn; nobody waits for those who are not."""
        for _ in range(self.number()):
            self.start()
        late: float | None = time.monotonic() + self.cluster.patience
        while self.waiting or self.running:
            while self.waiting and self.free:
                self.ask(self.free.popleft(), *self.waiting.popleft())
            ready, _ = self.ray.wait(
                [*self.starting, *self.running], num_returns=1, timeout=self.cluster.patience
            )
            if ready and ready[0] in self.starting:
                self.welcome(ready[0])
            elif ready:
                yield from self.take(ready[0])
            elif not self.running:
                raise ClusterError(
                    f"no worker was ready after {self.cluster.patience:g} s: {self.situation()}; ask for "
                    "less with --threads or --gpus-per-worker, or wait longer with --patience"
                )
            if late is not None and time.monotonic() > late:
                late = None  # said once
                if self.starting:
                    print(f"{len(self.starting)} workers have not started: going on without", file=sys.stderr)

    def number(self) -> int:
        """How many to start."""
        room = sum(room_on(node, self.needs) for node in self.nodes())
        if self.cluster.workers is None:
            if not room:
                raise ClusterError(f"not enough for a single worker: {self.situation()}")
            return min(room, len(self.waiting))
        wanted = min(self.cluster.workers, len(self.waiting))
        if wanted > room:  # they are asked for all the same: a cluster may grow
            print(
                f"there is room for {room} of {wanted} workers: {self.situation()}; going on with those "
                "that can start",
                file=sys.stderr,
            )
        return wanted

    def nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def situation(self) -> str:
        sizes = Counter(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in self.nodes())
        has = " and ".join(f"{count} x ({size})" for size, count in sizes.items())
        needs = f"{self.needs['CPU']:g} CPUs, {self.needs['GPU']:g} GPUs"
        return f"the cluster has nodes {has}, and a worker needs {needs} on one of them"

    def start(self) -> None:
        actor = self.kind.remote(self.job)
        self.starting[actor.ready.remote()] = actor

    def welcome(self, answer: Any) -> None:
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

    def ask(self, actor: Any, work: Work, attempt: int) -> None:
        self.running[actor.draw.remote(work)] = (actor, work, attempt)

    def take(self, picture: Any) -> Iterator[Drawing]:
        actor, work, attempt = self.running.pop(picture)
        try:
            drawing = self.ray.get(picture)
        except self.ray.exceptions.RayTaskError as error:  # the worker lives
            self.again(work, attempt, error)
            self.free.append(actor)
        except self.ray.exceptions.RayError as error:
            print("a worker died", file=sys.stderr)
            self.again(work, attempt, error)
            self.start()
        else:
            rest = replace(work, ways=work.ways[1:])
            if rest.ways:
                self.ask(actor, rest, 1)
            else:
                self.free.append(actor)
            yield drawing

    def again(self, work: Work, attempt: int, error: Exception) -> None:
        what = f"{work.prompt!r} with seed {work.seed}, {label(*work.ways[0])},"
        if attempt == ATTEMPTS:
            raise ClusterError(f"{what} failed {ATTEMPTS} times; the last: {reason_of(error)}") from error
        print(f"{what} is tried again: {reason_of(error)}", file=sys.stderr)
        self.waiting.appendleft((work, attempt + 1))  # at once, so that what always fails ends soon


def room_on(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many workers fit on one node; a share of a GPU must be had from one GPU."""
    room = int(node.get("CPU", 0) // needs["CPU"])
    gpus, share = node.get("GPU", 0), needs["GPU"]
    if not share:
        return room
    return min(room, int(gpus) * int(1 / share) if share < 1 else int(gpus // share))


def reason_of(error: Exception) -> str:
    """Ray's errors are tracebacks of the worker, or paragraphs: what happened stands last."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    if callable(details := getattr(error, "details", None)):  # of gRPC
        return str(details())
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
