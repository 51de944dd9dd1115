"""The Triton kernels that both GPU vendors share, and the Python that sizes, launches and registers them.

constants, tuning, fitting and workspace are plain arithmetic and import neither torch nor triton. The kernels (codec,
store, gather, copy_blocks, schedule, attend, reduce) and `launch` need both; `operators` registers them for GPU
tensors.
"""
