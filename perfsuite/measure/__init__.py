"""Measuring inside a worker: clocks, controls, sampling, conditions, peak memory."""
