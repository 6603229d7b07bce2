"""``optimum``: a schedule's steady loop beside its bounds and the best modulo schedule of the same operations.

A command of its own, not a line of ``predict``: a prediction takes milliseconds, the search for a schedule takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import cli
from .cli_options import as_json, problem_options

if TYPE_CHECKING:
    from .model.schedule import Schedule
    from .sim.modulo import Placed
    from .sim.optimum import Optimum, Variant
    from .sim.predict import Result
    from .sim.switches import Tried

SECONDS = 60.0
#: Switches that are shown: those that gain, and so many of the others.
OTHERS = 3


@click.command()
@click.argument("schedule", metavar="SCHEDULE|FILE.py")
@problem_options
@click.option("--kernel", metavar="NAME", help="Which kernel of the schedule [default: the longest with a loop].")
@click.option("--seconds", type=float, default=SECONDS, show_default=True, help="For all that comes after the first simulation.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@click.option("--as-built", is_flag=True, help="Only the loop as it is: no switches, no more buffers or tiles.")
@as_json
def optimum(schedule: str, as_json: bool, **options: Any) -> None:
    """The best modulo schedule beside SCHEDULE's own steady loop: interval, bounds, what to move.

    Operations, costs and dependences are those of the schedule's Program on this chip; its order is not. Cycles are of one trip
    (one K/V block) of all CTAs of an SM. About half of --seconds goes into the search for the loop as built, three tenths into
    running the engine with switches set otherwise, the rest into more buffers and tiles; what needs less leaves the rest more.
    """
    from .sim.extras import extra
    from .sim.modulo import NEEDS
    from .sim.optimum import RECORDS, best

    extra("ortools", "optimum", NEEDS)
    if not 0 < options["seconds"] <= 3600:
        raise ValueError(f"seconds is {options['seconds']:g}; it must be above 0 and at most 3600: change --seconds")
    if not 0 <= options["seed"] < 2**31:
        raise ValueError(f"seed is {options['seed']}; it must be from 0 to {2**31 - 1}: change --seed")
    gpu, attention = cli._problem(options)
    pipeline = cli._schedule(schedule, options["sets"])
    result = cli._simulate(pipeline, gpu, attention, options, record_limit=RECORDS)

    def run(changed: Schedule) -> Result:
        return cli._simulate(changed, gpu, attention, options, record_limit=RECORDS)

    search = {name: options[name] for name in ("kernel", "seconds", "seed")}
    as_built = options["as_built"]
    with cli._working("looking for the best schedule"):
        found = best(result, gpu, variants=not as_built, pipeline=pipeline, run=None if as_built else run, **search)
    if as_json:
        cli._print_json(as_dict(found))
    else:
        _print(found, f"{result.schedule} on {gpu.name}: {attention.label}")


# --- for people ---


def headline(found: Optimum) -> str:
    """The one line: own interval, bound, best found, and how good that is."""
    bounds = found.built.bounds
    own = f"II {found.own:,.0f} cycles" if found.own else "II unknown (too few trips)"
    why = f"busiest unit: {bounds.unit}" if bounds.resource >= bounds.recurrence else "recurrence"
    line = f"this schedule: {own}; bound {bounds.bound:,.0f} ({why})"
    if found.better is None and found.own:
        return f"{line}; no better order found: {_searched(found.built)}"
    return f"{line}; {_best(found.built)}"


def _best(variant: Variant) -> str:
    s = variant.schedule
    if s is None:
        return "no schedule found in time"
    return f"best found {s.interval:,}" + (", optimal" if s.optimal else "")


def _searched(variant: Variant) -> str:
    s = variant.schedule
    if s is None:
        return "the search had too little time"
    return f"the best of the search is {s.interval:,}" + (", optimal in its model" if s.optimal else "")


def notes(found: Optimum) -> list[str]:
    """What the numbers mean together, in sentences."""
    built, out = found.built, []
    s = built.schedule
    plain, unit = max((cycles, name) for name, cycles in built.bounds.plain.items())
    if built.bounds.resource > plain * 1.001:
        out.append(f"if products slowed nothing beside them (as in predict), the busiest unit would need {plain:,.0f} ({unit})")
    if s is not None and not s.optimal:
        out.append(f"not proven optimal in {s.seconds:.0f} s: none is shorter than {s.proven:,.0f}; more --seconds may find one")
    if found.own and s is not None and s.interval < found.own and not found.moves and found.waits:
        waits = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.waits[:4])
        out.append(f"its order is the kernel's own, which loses time by waiting: of all its time its warps wait for {waits}")
    if found.own and found.better is None and found.own > built.bounds.bound:
        over = 100 * (found.own / built.bounds.bound - 1)
        out.append(f"the kernel's own order stands: no order of the same operations gains more than {over:.1f} %")
    for variant in found.variants[1:]:
        if variant.schedule is not None:
            share = variant.schedule.interval * found.ctas / variant.ctas
            per = f", {share:,.0f} for what the kernel has in flight" if variant.ctas != found.ctas else ""
            room = f"; it does not fit as it is ({variant.fits})" if variant.fits else ""
            if found.interval is None or share < found.interval:
                out.append(f"{variant.change}: {_best(variant)}{per}{room}")
    if found.left_out:
        out.append(f"no time to run the engine with {', '.join(found.left_out)}: give more --seconds")
    return out


def switches(found: Optimum) -> list[str]:
    """What the engine makes of the schedule's switches: those that gain, then the nearest others, then those it cannot run."""
    ran = [t for t in found.tried if not t.refused]
    gains = [t for t in ran if found.own and t.comparable < found.own]
    shown = [*gains, *[t for t in ran if t not in gains][:OTHERS]]
    fields = {name for t in ran for name, _ in t.fields}
    refused: dict[str, str] = {}
    for t in found.tried:  # of a field that nothing else could run with, the first
        (name, _), *_ = t.fields
        if t.refused and name not in fields:
            refused.setdefault(name, f"{t.switch}: cannot run ({t.refused})")
    return [*(_switch(t, found.own or 0.0) for t in shown), *refused.values()]


def _switch(t: Tried, own: float) -> str:
    change = 100 * (t.comparable / own - 1)
    other = abs(t.interval / t.comparable - 1) > 0.001
    work = f", {t.comparable:,.0f} for the work of a trip now" if other else ""
    says = f" ({t.says})" if t.says else ""
    return f"{t.switch}{says}: the engine's II is {t.interval:,.0f}{work}, {change:+.1f} %"


def _print(found: Optimum, title: str) -> None:
    from rich.markup import escape

    from .render import _console

    console, bounds = _console(), found.built.bounds
    ctas = "1 CTA" if found.ctas == 1 else f"{found.ctas} CTAs"
    console.print(f"[bold]{escape(title)}[/bold] ({escape(found.kernel)}, {ctas} an SM)")
    console.print("initiation interval (II): cycles from one trip of the steady loop to the next", style="dim")
    console.print(escape(headline(found)))
    if bounds.chain:
        console.print(escape(f"recurrence {bounds.recurrence:,.0f}: {' -> '.join(bounds.chain)}"))
    units = sorted(bounds.units.items(), key=lambda item: -item[1])[:8]
    console.print(escape("busy cycles a trip: " + ", ".join(f"{name} {cycles:,.0f}" for name, cycles in units)))
    _print_trip(found)
    for move in found.moves:
        console.print(escape(f"move: {move}"))
    for switch in switches(found):
        console.print(escape(f"switch: {switch}"))
    for note in notes(found):
        console.print(escape(f"note: {note}"))
    console.print(f"the search took {found.seconds:.0f} s", style="dim")


def _print_trip(found: Optimum) -> None:
    """The best schedule, or a trip of the kernel's own where that is the best."""
    from rich.markup import escape

    from .render import _console, _table

    s = found.better
    columns = ("operation", "role", "unit", "start", "cycles", "alone")
    if s is not None:
        table = _table(f"best schedule, II {s.interval:,}", *columns, "stage", text=3)
        placed, stages = s.placed, True
    elif found.trip is not None:
        table = _table(f"the kernel's own trip, II {found.own:,.0f}", *columns, text=3)
        placed, stages = found.trip.placed, False
    else:
        return
    for p in ordered(placed):
        op = p.operation
        role = f"{op.role}.{op.cta}" if found.ctas > 1 else op.role
        cells = [escape(op.name), role, op.unit, f"{p.start:,}", f"{p.cycles:,}", f"{op.cycles:,.0f}"]
        table.add_row(*cells, *([str(p.stage)] if stages else []))
    _console().print(table)


def ordered(placed: tuple[Placed, ...]) -> list[Placed]:
    return sorted(placed, key=lambda p: (p.start, p.operation.role, p.operation.name))


# --- for programs ---


def as_dict(found: Optimum) -> dict[str, Any]:
    """An Optimum in plain numbers, for ``--json``."""
    return {
        "kernel": found.kernel, "gpu": found.gpu, "ctas": found.ctas, "own_ii": found.own, "line": headline(found),
        "interval": found.interval, "own_is_best": found.better is None, "seconds": found.seconds, "moves": list(found.moves),
        "switches": [_switch_dict(t) for t in found.tried], "switches_left_out": list(found.left_out),
        "waits": dict(found.waits), "notes": notes(found),
        "variants": [_variant_dict(v) for v in found.variants],
    }  # fmt: skip


def _switch_dict(t: Tried) -> dict[str, Any]:
    if t.refused:
        return {"set": dict(t.fields), "refused": t.refused}
    return {"set": dict(t.fields), "ii": t.interval, "ii_for_the_same_work": t.comparable}


def _variant_dict(v: Variant) -> dict[str, Any]:
    bounds, s = v.bounds, v.schedule
    rows = [] if s is None else [
        {
            "op": p.operation.name, "role": p.operation.role, "cta": p.operation.cta, "kind": p.operation.kind,
            "unit": p.operation.unit, "start": p.start, "stage": p.stage, "cycles": p.cycles, "alone": p.operation.cycles,
        }
        for p in ordered(s.placed)
    ]  # fmt: skip
    return {
        "change": v.change, "ctas": v.ctas, "fits": not v.fits, "lacks": v.fits,
        "bounds": {
            "bound": bounds.bound, "resource": bounds.resource, "unit": bounds.unit, "recurrence": bounds.recurrence,
            "chain": list(bounds.chain),
            "units": dict(bounds.units), "units_without_slowdown": dict(bounds.plain),
        },
        "best_ii": None if s is None else s.interval, "optimal": bool(s and s.optimal),
        "proven_ii": None if s is None else s.proven, "seconds": None if s is None else s.seconds,
        "copies": {} if s is None else dict(s.copies), "schedule": rows,
    }  # fmt: skip
