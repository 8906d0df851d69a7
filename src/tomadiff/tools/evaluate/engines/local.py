"""In this process, one picture after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tomadiff.tools.evaluate.job import Drawing, Job, Painter, Work


def run(job: Job, works: Sequence[Work]) -> Iterator[Drawing]:
    painter = Painter(job)
    for work in works:
        for way in work.ways:
            yield painter.draw(work, way)
