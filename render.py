"""What the command line prints: tables for people (rich) and plain dicts for ``--json``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .model.sourced import TOLD

if TYPE_CHECKING:
    from .model.attention import Attention
    from .model.gpu import GPU
    from .model.schedule import Schedule
    from .sim.predict import Launch, Result

BAR = 24  # characters of a full bar
PIPED_WIDTH = 120  # columns where the output is not a terminal and COLUMNS does not tell
SHOWN_STALL = 0.0005


def _console() -> Console:
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(highlight=False, width=None if told else PIPED_WIDTH)


def _table(title: str, *columns: str, text: int = 1) -> Table:
    """A table whose first ``text`` columns are words and whose others are numbers."""
    name = Text(title, no_wrap=True, overflow="ignore")  # a title may be wider than its table
    table = Table(title=name, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text else "right", overflow="fold")
    return table


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


def _signed(pct: float) -> str:
    """Per cent with its sign, which nothing has not; from 100 on without decimals."""
    if not round(pct, 1):
        return "0.0 %"
    return f"{pct:+.1f} %" if abs(pct) < 100 else f"{pct:+,.0f} %"


def milliseconds(ms: float) -> str:
    """Four digits, whatever the last ones are."""
    return f"{ms:#.4g}".rstrip(".")


def _smem(n: float) -> str:
    """Shared memory, in the unit that it is given out in."""
    return f"{n / 1024:.4g} KiB"


def brief(limiter: str) -> str:
    """A limiter for a table's cell: the unit and its share, or what warps wait for; before it that SMs have unequal work."""
    if limiter.startswith("imbalance"):
        unit = limiter.partition("; there ")[2].replace(" is ", ", ")
        return f"imbalance, {brief(unit or limiter.replace('imbalance', 'latency', 1))}"
    if limiter.startswith("latency"):
        return f"waits: {limiter.partition('wait most for ')[2]}"
    idle = re.match(r"parallelism: (\d+ of \d+ SMs)", limiter)
    head = f"{idle[1]} idle" if idle else re.sub(r" \([^)]*\)", "", limiter.partition(";")[0])
    return head.removeprefix("the ").replace(" and the ", " and ").replace(" together", "").replace(" busy", "").replace(",", "")


# --- chips and schedules ---


def gpu_list(chips: Sequence[GPU]) -> None:
    """One row a chip."""
    table = _table(
        "chips", "name", "chip", "architecture", "SMs", "boost MHz", "SMEM/SM", "L2", "HBM", "16-bit TFLOP/s", text=3
    )
    for gpu in chips:
        peak = gpu.sm.count * gpu.sm.tensor_flop_per_clk * gpu.clock.tensor_peak_mhz / 1e6
        table.add_row(
            gpu.name, gpu.full_name, gpu.architecture, f"{gpu.sm.count:.0f}", f"{gpu.clock.boost_mhz:.0f}",
            f"{gpu.sm.smem_bytes / 1024:.0f} KiB", f"{gpu.l2.size_bytes / 2**20:.0f} MiB",
            f"{gpu.hbm.peak_bytes_per_s / 1e12:.2f} TB/s", f"{peak:.0f}",
        )
    _console().print(table)


def gpu_numbers(gpu: GPU) -> None:
    """Every number of a chip with its unit, kind and source."""
    table = _table(f"{gpu.full_name} ({gpu.name}, {gpu.architecture})", "number", "value")
    for column in ("unit", "kind", "source"):
        table.add_column(column, overflow="fold")
    for each in table.columns[:-1]:
        each.no_wrap = True
    for name, number in gpu.numbers():
        table.add_row(name, f"{float(number):.12g}", number.unit, number.kind, escape(number.source))
    console, known = _console(), dict(gpu.numbers())
    console.print(table)
    told = ", ".join(f"{name} ({instead})" for name, instead in TOLD.items() if name in known)
    console.print(escape(f"These enter no prediction: {told}"))


def chip_file(text: str) -> str:
    """A chip's TOML with a comment at what enters no prediction; none is added twice."""
    section, lines = "", []
    for line in text.splitlines():
        section = line.strip().strip("[]") if line.startswith("[") else section
        instead = TOLD.get(f"{section}.{line.partition(' =')[0]}")
        lines.append(f"{line}  # enters no prediction: {instead}" if instead and "# enters no" not in line else line)
    return "\n".join([*lines, ""])


def schedule_list(schedules: Mapping[str, type[Any]]) -> None:
    """One row a schedule: the first sentence of its module."""
    table = _table("schedules", "name", "what it is", text=2)
    for name, cls in schedules.items():
        doc = sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""
        table.add_row(name, escape(_prose(doc.strip().splitlines()[0])))
    _console().print(table)


def schedule_fields(schedule: Schedule) -> None:
    """What a schedule is, and its fields with their values and types, for --set."""
    console, cls = _console(), type(schedule)
    console.print(escape(_prose(sys.modules[cls.__module__].__doc__)), "\n", sep="")
    if is_dataclass(schedule):
        table = _table("fields (--set field=value)", "field", "value", "type", text=3)
        for f in fields(schedule):
            value = getattr(schedule, f.name)
            shown = str(value).lower() if value is None or isinstance(value, bool) else str(value)
            kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)
            table.add_row(*(escape(text) for text in (f.name, shown, kind)))
        console.print(table)
    else:
        console.print(escape(f"{schedule.name} has no fields: make its class a dataclass to give it some"))
    if not (cls.__doc__ or "").startswith(f"{cls.__name__}("):  # what dataclass writes itself repeats the fields
        console.print(escape(_prose(cls.__doc__)), style="dim")


def _prose(doc: str | None) -> str:
    """A docstring for a terminal: one paragraph, without the marks of code."""
    return " ".join((doc or "").replace("``", "").split())


# --- one prediction ---


def prediction(result: Result) -> None:
    """The panel and tables of ``predict``."""
    from .sim.held import held

    console = _console()
    compulsory = _compulsory(result.attention)
    console.print(
        Panel(
            "\n".join(
                (
                    f"[bold]{milliseconds(result.ms)} ms[/bold]   {_kernels(result)}{result.cycles:,.0f} cycles at"
                    f" {result.clock_mhz:,.0f} MHz, {escape(result.clock_rule)}",
                    f"[bold]{result.tflops:.1f} TFLOP/s[/bold] (papers' convention), {result.tflops_exact:.1f}"
                    f" (unmasked pairs only); {100 * result.utilization:.1f} % of the 16-bit tensor peak at that clock",
                    f"limiter: [bold]{escape(result.limiter)}[/bold]",
                    *(escape(note) for note in result.notes),
                )
            ),
            title=escape(f"{result.schedule} on {result.gpu}: {result.attention.label}"), title_align="left",
        )
    )
    side = Table.grid(padding=(0, 4))
    holds = held(result)
    longer = any(holds[name] > 1.005 * share for name, share in result.units.items())
    side.add_row(_shares("units busy", result.units, holds if longer else None), _shares("warps wait for", _stalls(result)))
    console.print(side)
    if longer:
        console.print("held: with what products add to instructions beside them; a warp waits for as long", style="dim")
    ledger = _table("bytes", "", "moved", "compulsory", "ratio")
    for name, label in (("hbm_read", "HBM read"), ("hbm_write", "HBM write"), ("l2", "L2"), ("smem", "SMEM")):
        moved, least = result.bytes[name], compulsory.get(name)
        ledger.add_row(label, _size(moved), _size(least) if least else "", f"{moved / least:.2f}x" if least else "")
    console.print(ledger)
    _launches(console, result)
    summaries = ("max_of_units", "sum_of_units", "ii", "ii_resource", "ii_recurrence")
    units = {k: v for k, v in result.bounds.items() if k not in summaries}
    top = max(units, key=lambda name: units[name])
    bounds = result.bounds
    console.print(
        f"[bold]bounds[/bold]  lower (max of units: {top}) {bounds['max_of_units']:,.0f} cycles, predicted {result.cycles:,.0f},"
        f" units one after the other (sum of units) {bounds['sum_of_units']:,.0f}{_below(result)}\n"
        f"  least initiation interval (II) of the steady loop, a trip of an SM's CTAs: {bounds['ii']:,.0f}"
        f" (busiest unit {bounds['ii_resource']:,.0f}, one warp's instructions {bounds['ii_recurrence']:,.0f});\n"
        "  loads are left out; flashsim optimum adds them, what products slow beside them, and dependences"
    )
    counts = ", ".join(f"{name} {n:,}" for name, n in result.instructions.items())
    console.print(f"[bold]warp instructions[/bold]  {counts}\n  counts from: {escape('; '.join(result.counts_from))}")
    kinds = ", ".join(f"{n} {kind}" for kind, n in result.provenance.items())
    gpu = escape(result.gpu)
    console.print(f"[bold]numbers of {gpu}[/bold]  {kinds} (flashsim gpus {gpu} lists them)")


def _kernels(result: Result) -> str:
    """The time on the chip, where the host and the gaps between kernels add to it."""
    if result.ms < 1.005 * result.kernel_ms:
        return ""
    what = "the kernel" if len(result.launches) == 1 else f"{len(result.launches)} kernels"
    return f"of which {what} {milliseconds(result.kernel_ms)} ms: "


def _below(result: Result) -> str:
    """Why a prediction can be above the sum of units."""
    if result.cycles <= result.bounds["sum_of_units"]:
        return ""
    return "\n  the sum is less than predicted: it has all work spread evenly over all SMs, without waits, launch and idle SMs"


def _stalls(result: Result) -> dict[str, float]:
    return {name: share for name, share in result.stalls.items() if share >= SHOWN_STALL}


def _shares(title: str, shares: Mapping[str, float], held: Mapping[str, float] | None = None) -> Table:
    """Shares with bars, the largest first; ``held``: a column of units' shares with what products beside them add."""
    table = _table(title, "", "share", *(["held"] if held else []), text=1)
    table.add_column("", justify="left", no_wrap=True)
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        longer = [f"{100 * held[name]:.1f} %"] if held else []
        table.add_row(name, f"{100 * share:.1f} %", *longer, "█" * round(BAR * min(1.0, share)))
    return table


def _launches(console: Console, result: Result) -> None:
    from .sim.unit_words import counted

    for launch in result.launches:
        fits, tiles = launch.occupancy, len(launch.program.tiles)
        idle = f", {launch.dispatch.idle_sms} SMs idle" if launch.dispatch.idle_sms else ""
        share = f" [{100 * launch.cycles / result.cycles:.0f} % of the cycles]" if len(result.launches) > 1 else ""
        console.print(
            f"[bold]occupancy[/bold]  {launch.program.name}{escape(share)}: {counted(fits.ctas_per_sm, 'CTA')} of"
            f" {counted(launch.program.warps, 'warp')} per SM, bound by {fits.limiter}; {counted(tiles, 'CTA')},"
            f" {launch.dispatch.waves:.2f} waves{idle}"
        )
        for name, arithmetic in fits.arithmetic.items():
            console.print(f"  {name}: {escape(arithmetic)}", style="bold" if name == fits.limiter else "dim")


def _compulsory(attention: Attention) -> dict[str, int]:
    return {"hbm_read": attention.compulsory_read_bytes, "hbm_write": attention.compulsory_write_bytes}


def as_dict(result: Result) -> dict[str, Any]:
    """A Result in plain numbers, for ``--json``. ``occupancy`` is the longest kernel's, ``launches`` has all."""
    from .sim.held import held

    attention = asdict(result.attention)
    attention["pass"] = attention.pop("pass_")
    compulsory = {f"compulsory_{name}": n for name, n in _compulsory(result.attention).items()}
    longest = max(result.launches, key=lambda launch: launch.cycles)
    return {
        "schedule": result.schedule, "gpu": result.gpu, "attention": attention,
        "cycles": result.cycles, "ms": result.ms, "kernel_ms": result.kernel_ms,
        "tflops": result.tflops, "tflops_exact": result.tflops_exact,
        "utilization": result.utilization, "clock_mhz": result.clock_mhz, "clock_rule": result.clock_rule,
        "limiter": result.limiter, "host_bound": result.host_bound, "scope": result.scope, "notes": list(result.notes),
        "units": dict(result.units), "held": held(result), "stalls": dict(result.stalls),
        "bytes": {**result.bytes, **compulsory}, "instructions": dict(result.instructions),
        "counts_from": list(result.counts_from), "occupancy": asdict(longest.occupancy), "bounds": dict(result.bounds),
        "provenance": dict(result.provenance), "launches": [_launch_dict(launch) for launch in result.launches],
    }


def _launch_dict(launch: Launch) -> dict[str, Any]:
    return {
        "name": launch.program.name, "cycles": launch.cycles, "clock_mhz": launch.clock.mhz,
        "watts": launch.clock.watts,
        "ctas": len(launch.program.tiles), "waves": launch.dispatch.waves, "idle_sms": launch.dispatch.idle_sms,
        "load_of_last_sm": launch.dispatch.load,
        "warps_per_cta": launch.program.warps, "registers_per_thread": launch.program.registers,
        "smem_bytes_per_cta": launch.program.smem_bytes, "occupancy": asdict(launch.occupancy),
        "counts_from": launch.program.profile,
    }


# --- several ---


def comparison(rows: Sequence[tuple[str, Result | str]], gpu: GPU, attention: Attention) -> None:
    """One row a schedule; those that cannot run are listed below with their sentence."""
    columns = ("schedule", "ms", "TFLOP/s", "util", "cycles", "MHz", "HBM", "speed-up")
    table = _table(f"{attention.label} on {gpu.name}", *columns)
    table.add_column("limiter", justify="left", overflow="fold")
    for row in comparison_dict(rows):
        if "error" in row:
            table.add_row(escape(row["schedule"]), *["-"] * 7, escape(row["error"]))
        else:
            table.add_row(
                escape(row["schedule"]), milliseconds(row["ms"]), f"{row['tflops']:.1f}",
                f"{100 * row['utilization']:.1f} %", f"{row['cycles']:,.0f}", f"{row['clock_mhz']:.0f}",
                _size(row["hbm_bytes"]), f"{row['speedup']:.2f}x", escape(row["limiter"]),
            )
    console = _console()
    console.print(table)
    for label, result in rows:
        for note in () if isinstance(result, str) else result.notes:
            console.print(escape(f"note: {label}: {note}"))


def comparison_dict(rows: Iterable[tuple[str, Result | str]]) -> list[dict[str, Any]]:
    """Rows of ``compare --json``; ``speedup`` is over the first schedule that runs."""
    out: list[dict[str, Any]] = []
    first: float | None = None
    for label, result in rows:
        if isinstance(result, str):
            out.append({"schedule": label, "error": result})
            continue
        first = first or result.ms
        out.append(
            {
                "schedule": label, "ms": result.ms, "tflops": result.tflops, "utilization": result.utilization,
                "cycles": result.cycles, "clock_mhz": result.clock_mhz,
                "hbm_bytes": result.bytes["hbm_read"] + result.bytes["hbm_write"], "limiter": result.limiter,
                "speedup": first / result.ms, "notes": list(result.notes),
            }
        )
    return out
