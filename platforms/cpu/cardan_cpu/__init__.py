"""The CPU platform."""
