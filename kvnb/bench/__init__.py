"""Checking, timing, statistics, run files and the run itself."""
