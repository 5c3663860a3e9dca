"""Partitioned values of engines, wherever their slices are; below the core.

slices              the interface: an array, what is read, what workers have
groups, parquet     arguments that are made, or read from files, group by group
worker_slices       slices that stay with workers between stages
coordinates         columns of slices, for stages whose groups are coordinates
kept                the caller's handles of slices that stay between calls
"""
