"""What a run found: figures, bars, remarks; as JSON, as Markdown and as a short summary. Knows no operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .measure import Captured, Contender, Rates, Timing, time_by_clock, time_in_turns


@dataclass(frozen=True)
class Figure:
    """One contender on one case."""

    section: str
    case: dict[str, Any]  # the shape
    contender: str
    timing: Timing | None  # None: not timed, and `reason` says why
    reason: str = ""
    facts: dict[str, float] = field(default_factory=dict)  # rates and shares derived from the time


@dataclass(frozen=True)
class Bar:
    """Something promised, and whether it holds."""

    name: str
    value: float | None  # None: not measured
    limit: float
    unit: str = ""
    at_least: bool = False  # else at most

    @property
    def holds(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3g}{self.unit}"
        sign = "≥" if self.at_least else "≤"
        return f"{'pass' if self.holds else 'FAIL'}  {self.name}: {value} ({sign} {self.limit:g}{self.unit})"


@dataclass
class Report:
    """Filled by the sections of one run."""

    rates: Rates
    quick: bool = False
    figures: list[Figure] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def compare(
        self, section: str, case: dict[str, Any], contenders: Sequence[Contender], **work: float
    ) -> dict[str, float]:
        """Checks every contender, times those that are right, and returns their microseconds.

        work: `flops` or `bytes` of one call, from which rates and their shares of this run's are derived.
        """
        captured, timings, wrong = [], {}, {}
        for contender in contenders:
            try:
                if contender.check:
                    contender.check()
                    torch.cuda.synchronize()
                if contender.host:
                    timings[contender.name] = time_by_clock(contender)
                else:
                    captured.append(Captured(contender))
            except Exception as error:  # a kernel that fails must not end the run
                wrong[contender.name] = f"{type(error).__name__}: {str(error).strip()[:160]}"
        timings |= time_in_turns(captured)
        for contender in contenders:
            timing = timings.get(contender.name)
            facts = self._facts(timing, **work) if timing else {}
            self.figures.append(Figure(section, case, contender.name, timing, wrong.get(contender.name, ""), facts))
        return {name: timing.us for name, timing in timings.items()}

    def _facts(self, timing: Timing, flops: float = 0, bytes: float = 0) -> dict[str, float]:
        facts = {}
        if flops:
            facts["tflops"] = flops / timing.us / 1e6
            facts["share"] = facts["tflops"] / self.rates.matmul
        if bytes:
            facts["gbs"] = bytes / timing.us / 1e3
            facts["share"] = facts["gbs"] / self.rates.copy
        return facts

    def us(self, section: str, contender: str, **case: Any) -> float | None:
        """The median of a figure, None where it was not timed."""
        for f in self.figures:
            if f.section == section and f.contender == contender and case.items() <= f.case.items() and f.timing:
                return f.timing.us
        return None

    def bar(
        self, name: str, value: float | None, *, at_most: float = 0.0, at_least: float | None = None, unit: str = ""
    ) -> None:
        if at_least is None:
            self.bars.append(Bar(name, value, at_most, unit))
        else:
            self.bars.append(Bar(name, value, at_least, unit, at_least=True))

    def json(self) -> dict[str, Any]:
        return {
            "rates": asdict(self.rates),
            "bars": [asdict(bar) | {"holds": bar.holds} for bar in self.bars],
            "remarks": self.remarks,
            "figures": [asdict(figure) for figure in self.figures],
        }

    def markdown(self) -> str:
        lines = [self._rates(), ""]
        for section in dict.fromkeys(f.section for f in self.figures):
            figures = [f for f in self.figures if f.section == section]
            contenders = list(dict.fromkeys(f.contender for f in figures))
            lines += [f"## {section}", "", f"| case | {' | '.join(contenders)} |", "|---" * (len(contenders) + 1) + "|"]
            for case in dict.fromkeys(_name(f.case) for f in figures):
                cells = {f.contender: _cell(f) for f in figures if _name(f.case) == case}
                lines.append(f"| {case} | {' | '.join(cells.get(c, '') for c in contenders)} |")
            lines.append("")
        lines += ["## Bars", "", *(f"- {bar.line()}" for bar in self.bars), ""]
        return "\n".join([*lines, "## Remarks", "", *(f"- {remark}" for remark in self.remarks), ""])

    def _rates(self) -> str:
        return (
            f"Copy {self.rates.copy:.0f} GB/s (read + written), matmul {self.rates.matmul:.0f} TFLOP/s, "
            f"empty launch {self.rates.launch:.2f} µs."
        )

    def summary(self) -> str:
        failed = sum(not bar.holds for bar in self.bars)
        reasons = dict.fromkeys(f"not timed: {f.section}, {f.contender}: {f.reason}" for f in self.figures if f.reason)
        return "\n".join(
            [self._rates(), *(bar.line() for bar in self.bars), *reasons, f"{len(self.bars)} bars, {failed} not met"]
        )


def _name(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


def _cell(figure: Figure) -> str:
    if figure.timing is None:
        return "wrong" if figure.reason else "–"
    share = f" ({figure.facts['share']:.2f})" if "share" in figure.facts else ""
    return f"{figure.timing.us:.4g} µs{share}"
