"""Bridges to other libraries, each imported on first use only."""
