"""Models that the benchmarks and the demo train."""
