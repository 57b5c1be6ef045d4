"""Benchmarks: one timing harness, and what it measures. Uses the public API only."""
