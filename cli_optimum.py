"""``optimum``: a schedule's steady loop beside its bounds and the best modulo schedule of the same operations.

A command of its own, not a line of ``predict``: a prediction takes milliseconds, the search for a schedule takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import cli

if TYPE_CHECKING:
    from .sim.modulo import Placed
    from .sim.optimum import Optimum, Variant

SECONDS = 20.0


@click.command()
@click.argument("schedule")
@cli.problem_options
@click.option("--kernel", metavar="NAME", help="Which kernel of the schedule [default: the longest with a loop].")
@click.option("--seconds", type=float, default=SECONDS, show_default=True, help="To look for each schedule.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@click.option("--as-built", is_flag=True, help="Do not look at more buffers and tiles than the kernel has.")
@cli.as_json
def optimum(schedule: str, as_json: bool, **options: Any) -> None:
    """The best modulo schedule beside SCHEDULE's own steady loop: interval, bounds, what to move.

    Operations, costs and dependences are those of the schedule's Program on this chip; its order is not. Cycles are of one trip
    (one K/V block) of all CTAs of an SM.
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
    result = cli._simulate(cli._schedule(schedule, options["sets"]), gpu, attention, options, record_limit=RECORDS)
    with cli._working("looking for the best schedule"):
        search = {name: options[name] for name in ("kernel", "seconds", "seed")}
        found = best(result, gpu, variants=not options["as_built"], **search)
    if as_json:
        cli._print_json(as_dict(found))
    else:
        _print(found, f"{result.schedule} on {gpu.name}: {attention.label}")


# --- for people ---


def headline(found: Optimum) -> str:
    """The one line: own interval, bound, best found, and how good that is."""
    built = found.built
    bounds = built.bounds
    own = f"II {found.own:,.0f} cycles" if found.own else "II unknown (too few trips)"
    why = bounds.unit if bounds.resource >= bounds.recurrence else "recurrence"
    return f"this schedule: {own}; bound {bounds.bound:,.0f} ({why}); {_best(built)}"


def _best(variant: Variant) -> str:
    s = variant.schedule
    if s is None:
        return "no schedule found in time"
    return f"optimal {s.interval:,}" if s.optimal else f"best found {s.interval:,} in {s.seconds:.0f} s"


def notes(found: Optimum) -> list[str]:
    """What the numbers mean together, in sentences."""
    built, out = found.built, []
    plain, unit = max((cycles, name) for name, cycles in built.bounds.plain.items())
    if built.bounds.resource > plain * 1.001:
        out.append(f"if products slowed nothing beside them, the busiest unit would need {plain:,.0f} ({unit})")
    if found.own and built.schedule is not None and found.own < built.schedule.interval:
        over = 100 * (found.own / built.bounds.bound - 1)
        gain = f"; no order of the same operations gains more than {over:.1f} %" if over > 0 else ""
        out.append(f"the kernel mixes its warps' instructions more finely than whole operations can be placed{gain}")
    for variant in found.variants[1:]:
        if variant.schedule is not None:
            share = variant.schedule.interval * found.ctas / variant.ctas
            per = f", {share:,.0f} for what the kernel has in flight" if variant.ctas != found.ctas else ""
            room = f"; it does not fit as it is ({variant.fits})" if variant.fits else ""
            out.append(f"{variant.change}: {_best(variant)}{per}{room}")
    return out


def _print(found: Optimum, title: str) -> None:
    from rich.markup import escape

    from .render import _console, _table

    console, built = _console(), found.built
    console.print(f"[bold]{escape(title)}[/bold] ({escape(found.kernel)}, {found.ctas} CTAs an SM)")
    console.print(escape(headline(found)))
    if built.bounds.chain:
        console.print(escape(f"recurrence {built.bounds.recurrence:,.0f}: {' -> '.join(built.bounds.chain)}"))
    units = sorted(built.bounds.units.items(), key=lambda item: -item[1])[:8]
    console.print(escape("units: " + ", ".join(f"{name} {cycles:,.0f}" for name, cycles in units)))
    if built.schedule is not None:
        title = f"best schedule, II {built.schedule.interval:,}"
        table = _table(title, "operation", "role", "unit", "start", "cycles", "stage", text=3)
        for p in ordered(built.schedule.placed):
            op = p.operation
            role = f"{op.role}.{op.cta}" if found.ctas > 1 else op.role
            table.add_row(escape(op.name), role, op.unit, f"{p.start:,}", f"{p.cycles:,}", str(p.stage))
        console.print(table)
    for move in found.moves:
        console.print(escape(f"move: {move}"))
    for note in notes(found):
        console.print(escape(f"note: {note}"))


def ordered(placed: tuple[Placed, ...]) -> list[Placed]:
    return sorted(placed, key=lambda p: (p.start, p.operation.role, p.operation.name))


# --- for programs ---


def as_dict(found: Optimum) -> dict[str, Any]:
    """An Optimum in plain numbers, for ``--json``."""
    return {
        "kernel": found.kernel, "gpu": found.gpu, "ctas": found.ctas, "own_ii": found.own, "line": headline(found),
        "moves": list(found.moves), "notes": notes(found), "variants": [_variant_dict(v) for v in found.variants],
    }  # fmt: skip


def _variant_dict(v: Variant) -> dict[str, Any]:
    bounds, s = v.bounds, v.schedule
    rows = [] if s is None else [
        {
            "op": p.operation.name, "role": p.operation.role, "cta": p.operation.cta, "kind": p.operation.kind,
            "unit": p.operation.unit, "start": p.start, "stage": p.stage, "cycles": p.cycles, "beside": p.beside,
        }
        for p in ordered(s.placed)
    ]  # fmt: skip
    return {
        "change": v.change, "ctas": v.ctas, "fits": not v.fits, "lacks": v.fits,
        "bounds": {
            "resource": bounds.resource, "unit": bounds.unit, "recurrence": bounds.recurrence, "chain": list(bounds.chain),
            "units": dict(bounds.units), "units_without_slowdown": dict(bounds.plain),
        },
        "best_ii": None if s is None else s.interval, "optimal": bool(s and s.optimal),
        "refuted_ii": None if s is None else s.refuted, "seconds": None if s is None else s.seconds,
        "copies": {} if s is None else dict(s.copies), "schedule": rows,
    }  # fmt: skip
