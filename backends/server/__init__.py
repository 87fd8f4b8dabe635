"""The process edge of an engine instance: sockets, threads, signals. Knows nothing of tensors or schedules."""
