"""Compute kernels of the MoE layer: every op has a definition (naive), a CPU path and a Triton path.

`prophet.kernels.<op>` exports the dispatching entry point; `impl` chooses the path, "auto" by the device of the input.
"""
