"""Tuning: numbers of `tuning.yaml` searched on the user's own GPU, kept in an overlay that lies over the shipped row.

space (what is searched), search (how), overlay (the file, and the row in use) are plain arithmetic without torch;
pool, workload and gpu_bench do the work on a device, behind the protocol `search.Bench`; flow is the whole command.
"""
