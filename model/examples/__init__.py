"""Schedules to read, to repair and to start from: see README.md."""
