"""Errors of a cross-check, overall and by group."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

GROUPS = ("gpu", "kernel", "pass", "head_dim", "causal")


def summarize(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts; errors overall, by each of GROUPS and by their combinations; reasons of skipped rows with how often."""
    good = [report for report in reports if report["status"] == "ok"]
    skipped = [report for report in reports if report["status"] == "skipped"]
    summary: dict[str, Any] = {"ok": len(good), "skipped": len(skipped)}
    if good:
        summary["overall"] = errors_of(good)
    for keys in (*((name,) for name in GROUPS), GROUPS):
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for report in good:
            groups.setdefault(" ".join(str(report[key]) for key in keys), []).append(report)
        summary["/".join(keys)] = {name: errors_of(groups[name]) for name in sorted(groups)}
    reasons: dict[str, dict[str, int]] = {}
    for report in skipped:
        reasons.setdefault(report["reason"], {"n": 0, "first_line": report["line"]})["n"] += 1
    summary["skipped_reasons"] = reasons
    return summary


def grouped(reports: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(values of ``keys``, errors of the rows that have them, the row furthest off as ``worst``), in order of the values."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for report in reports:
        groups.setdefault(tuple(report[key] for key in keys), []).append(report)
    return [
        (values, {**errors_of(groups[values]), "worst": max(groups[values], key=lambda report: abs(report["error_pct"]))})
        for values in sorted(groups)
    ]


def errors_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Number of rows that were predicted; of their errors in %: mean, median and largest size, and the mean with its sign."""
    errors = [float(report["error_pct"]) for report in reports]
    sizes = [abs(error) for error in errors]
    return {
        "n": len(errors),
        "mean_abs_error_pct": statistics.fmean(sizes),
        "median_abs_error_pct": statistics.median(sizes),
        "max_abs_error_pct": max(sizes),
        "bias_pct": statistics.fmean(errors),
    }
