"""A Program as text."""

from __future__ import annotations

from .program import CODE_COLUMNS, Opcode, Program

STATEMENT = CODE_COLUMNS.index("statement")


def render(program: Program) -> str:
    """The Program as text: roles, buffers, then each statement with the instructions it issues per warp."""
    lines = [f"program {program.name}: {len(program.tiles)} tiles, {program.smem_bytes} B SMEM, counts: {program.profile}"]
    lines += [f"  role {r.name}: {r.warps} warps, {r.registers} registers per thread" for r in program.roles]
    for b in program.buffers:
        lines.append(f"  {b.space} {b.name}: {b.rows} x {b.cols}, {b.size_bytes} B" + (f", {b.stages} stages" if b.ring else ""))
    lines += [
        f"  {b.kind} {b.name}: {b.count} arrivals" + (f", {b.stages} stages" if b.stages > 1 else "") for b in program.barriers
    ]
    depth, role = 1, -1
    for i, s in enumerate(program.statements):
        if s.role != role and len(program.roles) > 1:
            role = s.role
            lines.append(f"  as {program.roles[role].name}:")
        if s.kind in ("end", "end_when"):
            depth -= 1
        issued: dict[str, int] = {}
        for row in program.code[program.code[:, STATEMENT] == i]:
            if row[0] == Opcode.ISSUE:
                for name, n in program.bundles[row[1]]:
                    issued[name] = issued.get(name, 0) + n * int(row[2])
        text = ", ".join(f"{n} {name}" for name, n in issued.items())
        lines.append(f"{'  ' * depth}{s}" + (f"    # per warp: {text}" if text else ""))
        if s.kind in ("loop", "when"):
            depth += 1
    return "\n".join(lines)
