"""Compiled CPU kernels: paged attention, and the decode step of dense models. Optional: torch can do it all."""
