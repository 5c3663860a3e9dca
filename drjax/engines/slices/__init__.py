"""Partitioned values of engines, wherever their slices are.

groups, parquet     arguments that are made, or read from files, group by group
blocks_of_groups    the slices of a block of groups, loaded for a worker
worker_slices       slices that stay with workers between stages
coordinates         columns of slices, for stages whose groups are coordinates
kept, kept_results  slices that stay between calls: the caller's handles of them, and
                    what the driver does with these
"""
