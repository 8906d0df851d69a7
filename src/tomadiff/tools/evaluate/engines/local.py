"""Draw in this process, one picture after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tomadiff.tools.evaluate.job import Drawing, ImageGenerator, Job, Work


def run(job: Job, works: Sequence[Work]) -> Iterator[Drawing]:
    generator = ImageGenerator(job)
    for work in works:
        for contender in work.contenders:
            yield generator.draw(work, contender)
