"""Schedules with a fault each: find it, or let ``flashsim check`` name it."""
