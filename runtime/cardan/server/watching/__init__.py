"""What looks on while requests run: logs, traces, metrics, and the memory for a crash dump."""
