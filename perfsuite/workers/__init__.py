"""Worker processes: pytest started again on the same cases, measuring what the coordinator asks for."""
