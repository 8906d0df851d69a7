"""The report of what was done to a model's calls, as a table and as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .runtime.session import Session


@dataclass(frozen=True)
class SiteReport:
    """One site: its tokens before and after merging in the last merged call, and how often it ran."""

    name: str
    kind: str
    level: int
    tokens: int
    kept: int
    all_kept: list[int]  # numbers of merged tokens at all ratios so far; several if ranges of steps differ
    calls: int
    dense_calls: int  # those of the calls that settings left dense


@dataclass(frozen=True)
class Report:
    model: str
    family: str  # "" if the model has none, so that nothing can be merged
    asked: dict[str, Any]  # the settings that were given
    settings: dict[str, Any]  # all of them, as they are for this model
    made_for: str | None  # the model class that the settings file was made for, if it differs from this one
    sites: list[SiteReport]
    generations: int
    steps: dict[str, int]  # numbers of steps that were "run" and "forecast"
    model_calls: dict[str, int]  # the same for calls: guidance may make several per step
    why: str  # why the last generation ran these steps
    refreshes: dict[str, int]  # plans made: whole ones ("destinations"), and those with new "weights" only
    held: int  # bytes of plans and outputs that are kept between steps at the moment
    auto: list[str]  # what auto found, for each size
    seconds: dict[str, float] | None  # "plan", "merge", "unmerge", "model"; None on an asynchronous device

    @property
    def overhead(self) -> float | None:
        """Share of the model's time that went into planning, merging and unmerging."""
        if not self.seconds or not self.seconds["model"]:
            return None
        return sum(self.seconds[part] for part in ("plan", "merge", "unmerge")) / self.seconds["model"]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "overhead": self.overhead}

    def __str__(self) -> str:
        on = f"{self.model} ({self.family})" if self.family else self.model
        lines = [f"tomadiff on {on}: {_summary(self.asked, self.settings)}"]
        if self.made_for:
            lines.append(f"these settings were made for {self.made_for}, not for this model")
        lines.append(
            f"{_counted(self.generations, 'generation')}: {_counted(self.steps['run'], 'step')} run, "
            f"{self.steps['forecast']} forecast" + (f"; {self.why}" if self.why else "")
        )
        if self.sites:
            lines += [*_table(self.sites), *self.auto]
            lines.append(
                f"plans made: {self.refreshes['destinations']} whole, "
                f"{self.refreshes['weights']} with new weights only"
            )
        if self.held:
            lines.append(f"{self.held / 2**20:.1f} MB of plans and forecasts are held until the last step")
        if not self.generations:
            lines.append("not called yet: tokens and times are known after a generation")
        elif self.overhead is None or self.seconds is None:
            lines.append("times are not known: this device runs asynchronously")
        elif self.sites:
            parts = ", ".join(f"{name} {self.seconds[name]:.3f} s" for name in ("plan", "merge", "unmerge"))
            lines.append(f"{parts}: {self.overhead:.1%} of the model's {self.seconds['model']:.2f} s")
        return "\n".join(lines)


def make_report(sessions: list[Session], second: str | None = None) -> Report:
    """The report of one model, or of two that take turns; `second` is the name of the other one."""
    first, timed = sessions[0], all(session.times.known for session in sessions)
    for session in sessions:
        session.site_calls.settle()
    return Report(
        model=type(first.model).__name__,
        family=first.family.name if first.family else "",
        asked=first.asked.asked(),
        settings=first.config.to_dict(),
        made_for=first.made_for,
        sites=[
            SiteReport(
                name=hook.bound.name if session is first else f"{second}.{hook.bound.name}",
                kind=hook.site.kind,
                level=hook.bound.level,
                tokens=hook.counts.tokens,
                kept=hook.counts.kept,
                all_kept=[n for of, n in hook.counts.kept_at.values() if of == hook.counts.tokens],
                calls=hook.counts.calls,
                dense_calls=hook.counts.dense_calls,
            )
            for session in sessions
            for hook in session.hooks
        ],
        generations=first.counts.generations,
        steps=_sums([session.counts.steps for session in sessions]),
        model_calls=_sums([session.counts.calls for session in sessions]),
        why=first.counts.why,
        refreshes=_sums([session.counts.refreshes for session in sessions]),
        held=sum(session.held() for session in sessions),
        auto=[line for session in sessions for line in session.found()],
        seconds=_sums([session.times.seconds for session in sessions]) if timed else None,
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _sums(counts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def _summary(asked: dict[str, Any], settings: dict[str, Any]) -> str:
    """Interval and ratio, and what else was asked for."""
    shown = {name: settings[name] for name in ("interval", "ratio") if settings[name] is not None}
    if shown["interval"] == 1 and "ratio" in shown:  # a ratio alone runs every step
        del shown["interval"]
    others = {name: value for name, value in asked.items() if name not in ("interval", "ratio")}
    return ", ".join(f"{name}={value}" for name, value in {**shown, **others}.items())


def _table(sites: list[SiteReport]) -> list[str]:
    """Sites that are alike share a row."""
    rows: dict[tuple, list[SiteReport]] = {}
    for site in sites:
        kept = " to ".join(map(str, site.all_kept or [site.kept]))
        rows.setdefault((site.kind, site.level, site.tokens, kept), []).append(site)
    cells = [("kind", "level", "sites", "tokens", "kept", "calls", "left dense")]
    for (kind, level, tokens, kept), group in rows.items():
        calls, dense = sum(site.calls for site in group), sum(site.dense_calls for site in group)
        cells.append((kind, *map(str, (level, len(group), tokens, kept, calls, dense))))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells]
