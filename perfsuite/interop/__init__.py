"""Bridges to other tools: one file for each."""
