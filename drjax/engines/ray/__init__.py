"""What only Ray needs: a pool whose workers are actors.

adapter          `compile`, and the actors as a `Pool`
actor            a worker as an object
placement        which worker has which task
resident_slices  slices that stay in Ray's object store, and need not be sent again
read_by_workers  data that workers read themselves, such as Parquet files
tree_of_sums     workers add up partial reductions, so that the driver gets one
gang             a worker of several processes, which may be on several hosts
process_exit     a process of Ray that ends when this one does
"""
